// The end of a head in the sm_80 kernels of gradients (backward.cuh, second.cuh).
#pragma once

#include "cuda/stages/bias_gradient.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext::sm80 {

// Hands over this warp's sums over the scores of head h, for the gradients of biases, and resets them. The first split
// of the columns does it for all.
template <class Kernel, class Sums>
__device__ __forceinline__ void hand_over(const Kernel& kernel, Sums& sums, int h) {
  if (kernel.split() != 0) return;
  const AttnGradParams& p = kernel.p;
  const int64_t tile = kernel.workspace.first_key_tile(p, kernel.b, key_sequence(p, kernel.b)) + kernel.n;
  end_head(sums, p, kernel.workspace, kernel.b, h, tile, kernel.warp(), kernel.first_score_key() + g(),
           kernel.extent()->length_k);
}

}  // namespace flashattn_ext::sm80
