// Runs of a BlockMask's entries (cuda/score/block_mask.cuh), as the loading warps of the Hopper kernels read them.
#pragma once

#include "cuda/score/block_mask.cuh"

namespace flashattn_ext::sm90 {

// Whether causal or a window hides pairs beside the BlockMask.
__device__ __forceinline__ bool is_bounded(const AttnParams& p) {
  return p.window_left != kUnbounded || p.window_right != kUnbounded;
}

// The first of the entries [begin, end) of a run whose block is at least `block`; `end` if there is none. All lanes of
// a warp call it together, and look at 32 entries at a time: each round takes as long as a load.
__device__ __forceinline__ int first_of_warp(const BlockRun& run, int block) {
  int begin = run.begin;
  for (int left = run.end - run.begin; left > 0;) {
    // A lane looks at the last entry of its part, if there is one.
    const int part = (left + 31) / 32, place = (lane() + 1) * part - 1;
    const bool is_below = place < left && run.at(begin + place).block < block;
    const int below = __popc(__ballot_sync(~0u, is_below)) * part;
    begin += below;
    left = min(part - 1, left - below);
  }
  return begin;
}

// The entries of the blocks [first, end).
__device__ __forceinline__ BlockRun clipped(const BlockRun& run, int first, int end) {
  const int begin = first_of_warp(run, first), last = first_of_warp({run.entries, begin, run.end}, end);
  return {run.entries, begin, last};
}

}  // namespace flashattn_ext::sm90
