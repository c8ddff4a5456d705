// The kernels of the library, one per stage and type. `<stage>_<type>.cpp` in inst/ defines each.
#pragma once

#include <kernel_operator.h>

#include "arguments.h"

#define FLASHATTN_KERNEL(name) extern "C" __global__ __aicore__ void name(flashattn_ext::ascend::Arguments arguments)

FLASHATTN_KERNEL(flash_forward_fp16);
FLASHATTN_KERNEL(flash_forward_bf16);
FLASHATTN_KERNEL(flash_backward_prepare_fp16);
FLASHATTN_KERNEL(flash_backward_prepare_bf16);
FLASHATTN_KERNEL(flash_backward_fp16);
FLASHATTN_KERNEL(flash_backward_bf16);
FLASHATTN_KERNEL(flash_backward_finish_fp16);
FLASHATTN_KERNEL(flash_backward_finish_bf16);
