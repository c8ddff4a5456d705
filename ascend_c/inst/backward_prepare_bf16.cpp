#include "../backward_prepare.h"
#include "../kernels.h"

FLASHATTN_KERNEL(flash_backward_prepare_bf16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  flashattn_ext::ascend::BackwardPrepare<bfloat16_t> vector(arguments);
  vector.Run();
}
