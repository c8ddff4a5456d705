#include "../backward_finish.h"
#include "../entry.h"

FLASHATTN_KERNEL(FLASHATTN_VECTOR, flash_backward_finish_fp16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  flashattn_ext::ascend::RunPart<flashattn_ext::ascend::BackwardFinish<half>>(
      FLASHATTN_ARGUMENTS(flash_backward_finish_fp16));
}
