// The kernels of the library, one per stage and type. `<stage>_<type>.cpp` in inst/ defines each.
#pragma once

#include "arguments.h"
#include "kernel_operator.h"

extern "C" __global__ __aicore__ void flash_forward_fp16(flashattn_ext::ascend::Arguments arguments);
extern "C" __global__ __aicore__ void flash_forward_bf16(flashattn_ext::ascend::Arguments arguments);
