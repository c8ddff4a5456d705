#include "../forward.h"
#include "../kernels.h"

extern "C" __global__ __aicore__ void flash_forward_fp16(flashattn_ext::ascend::Arguments arguments) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  flashattn_ext::ascend::Forward<half>(arguments);
}
