#include "../backward.h"
#include "../kernels.h"

FLASHATTN_KERNEL(flash_backward_fp16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  flashattn_ext::ascend::Backward<half>(arguments);
}
