// Starts kernels on a stream. Nothing else of the binding knows how CANN does that.
#pragma once

#include "../arguments.h"
#include "../kernel_list.h"

namespace flashattn_ext {
namespace ascend {

// blocks: cube cores for a mixed kernel (each brings two vector cores), vector cores for the others. stream:
// aclrtStream. Returns 0, or the error of the Ascend runtime.
#define FLASHATTN_DECLARE(cores, stage, type, options, name) \
  int launch_##name(int64_t blocks, void* stream, FlashattnBytes arguments);
FLASHATTN_KERNELS(FLASHATTN_DECLARE)
#undef FLASHATTN_DECLARE

}  // namespace ascend
}  // namespace flashattn_ext
