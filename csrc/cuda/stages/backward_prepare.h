// First stage of the backward: delta = <dout, out> - dlse of every row (Dao 2023, "FlashAttention-2", Algorithm 2, line
// 4), and lse in units of log2, as one word or a mark and as two words. With dropout, delta is divided by the scale of
// the kept weights: the main stage then scales no weight, and multiplies its sums by the scale once, at the end. The
// same launch zeroes the buffers that the main stage adds to.
#pragma once

#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext {

// T: the element type of q, __half, __nv_bfloat16 or float. No source of a backward compiles these kernels again.
template <class T>
void launch_prepare(const AttnGradParams& p, const BackwardWorkspace& workspace);

}  // namespace flashattn_ext
