// The largest scores of rows with the integer instruction of Hopper that compares three numbers.
#pragma once

#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// The largest scores of rows g and g + 8 of a 16-row tile, as OnlineSoftmax::weigh takes them. As integers, the numbers
// that are not negative have the order of their values, and are larger than negative ones, which have the opposite
// order: if the largest integer of a row is negative, its smallest one is the largest score.
template <int N>
__device__ __forceinline__ void largest_scores(float (&largest)[2], const float (&x)[N][4]) {
  int found[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    found[r] = max(__float_as_int(x[0][2 * r]), __float_as_int(x[0][2 * r + 1]));
#pragma unroll
    for (int n = 1; n < N; ++n) {
      found[r] = __vimax3_s32(found[r], __float_as_int(x[n][2 * r]), __float_as_int(x[n][2 * r + 1]));
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) found[r] = max(found[r], __shfl_xor_sync(~0u, found[r], step));
  }
  if (__any_sync(~0u, (found[0] | found[1]) < 0)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int least = min(__float_as_int(x[0][2 * r]), __float_as_int(x[0][2 * r + 1]));
#pragma unroll
      for (int n = 1; n < N; ++n) {
        least = __vimin3_s32(least, __float_as_int(x[n][2 * r]), __float_as_int(x[n][2 * r + 1]));
      }
      for (int step = 1; step < 4; step *= 2) least = min(least, __shfl_xor_sync(~0u, least, step));
      if (found[r] < 0) found[r] = least;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = __int_as_float(found[r]);
}

}  // namespace flashattn_ext
