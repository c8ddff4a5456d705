#include "../backward.h"
#include "../kernels.h"

FLASHATTN_KERNEL(flash_backward_bf16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  flashattn_ext::ascend::Backward<bfloat16_t>(arguments);
}
