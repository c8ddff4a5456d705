#include "../backward.h"
#include "../entry.h"

FLASHATTN_KERNEL(FLASHATTN_MIXED, flash_backward_general_fp16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  flashattn_ext::ascend::Backward<half>(FLASHATTN_ARGUMENTS(flash_backward_general_fp16));
}
