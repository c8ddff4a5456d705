// Instead of the kernels that a library of another tiling leaves out: `supports` lets no call come here.
#include "../kernels.h"

#define LEFT_OUT(name)                                                                                         \
  FLASHATTN_KERNEL(FLASHATTN_VECTOR, name) {                                                                   \
    (void)arguments;                                                                                           \
    ascend_emulator::fail(ascend_emulator::Site::here(), "this kernel is not in a library of another tiling"); \
  }

LEFT_OUT(flash_forward_bf16)
LEFT_OUT(flash_forward_fp32)
LEFT_OUT(flash_backward_prepare_fp16)
LEFT_OUT(flash_backward_prepare_bf16)
LEFT_OUT(flash_backward_prepare_fp32)
LEFT_OUT(flash_backward_fp16)
LEFT_OUT(flash_backward_bf16)
LEFT_OUT(flash_backward_fp32)
LEFT_OUT(flash_backward_finish_fp16)
LEFT_OUT(flash_backward_finish_bf16)
LEFT_OUT(flash_backward_finish_fp32)
LEFT_OUT(flash_dropout_mask)
LEFT_OUT(flash_rng_state)
