// Runs of a BlockMask's entries (cuda/score/block_mask.cuh), as the loading warps of the Hopper kernels read them.
#pragma once

#include "cuda/score/block_mask.cuh"

namespace flashattn_ext::sm90 {

// Whether causal or a window hides pairs beside the BlockMask.
__device__ __forceinline__ bool is_bounded(const AttnParams& p) {
  return p.window_left != kUnbounded || p.window_right != kUnbounded;
}

// The entries of the blocks [first, end). All lanes of a warp call it together.
__device__ __forceinline__ BlockRun clipped(const BlockRun& run, int first, int end) {
  const int begin = run.first_from<32>(first);
  return {run.entries, begin, BlockRun{run.entries, begin, run.end}.first_from<32>(end)};
}

}  // namespace flashattn_ext::sm90
