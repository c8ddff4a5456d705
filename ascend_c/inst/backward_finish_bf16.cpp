#include "../backward_finish.h"
#include "../kernels.h"

FLASHATTN_KERNEL(flash_backward_finish_bf16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  flashattn_ext::ascend::BackwardFinish<bfloat16_t> vector(arguments);
  vector.Run();
}
