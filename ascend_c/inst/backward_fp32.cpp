#include "../backward.h"
#include "../entry.h"

FLASHATTN_KERNEL(FLASHATTN_MIXED, flash_backward_fp32) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  flashattn_ext::ascend::Backward<float>(FLASHATTN_ARGUMENTS(flash_backward_fp32));
}
