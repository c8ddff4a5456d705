// Instead of the kernels that a library of another tiling leaves out: `supports` lets no call come here.
#include "../kernels.h"

static void LeftOut(const flashattn_ext::ascend::Arguments&) {
  ascend_emulator::fail(ascend_emulator::Site::here(), "this kernel is not in a library of another tiling");
}

#define LEFT_OUT(name) \
  FLASHATTN_KERNEL(name) { LeftOut(arguments); }

LEFT_OUT(flash_forward_bf16)
LEFT_OUT(flash_backward_prepare_fp16)
LEFT_OUT(flash_backward_prepare_bf16)
LEFT_OUT(flash_backward_fp16)
LEFT_OUT(flash_backward_bf16)
LEFT_OUT(flash_backward_finish_fp16)
LEFT_OUT(flash_backward_finish_bf16)
