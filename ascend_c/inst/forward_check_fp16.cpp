#include "../entry.h"
#include "../forward_check.h"

FLASHATTN_KERNEL(FLASHATTN_VECTOR, flash_forward_check_fp16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  flashattn_ext::ascend::RunPart<flashattn_ext::ascend::ForwardCheck<half>>(
      FLASHATTN_ARGUMENTS(flash_forward_check_fp16));
}
