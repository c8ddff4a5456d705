// Statistics per row: where they lie in memory, and their exchange among the four lanes that share an accumulator row.
#pragma once

#include "../../mask.h"
#include "../../seqlen.h"

namespace flashattn_ext {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float* row_statistic(const RowView& v, int64_t b, int64_t h, int64_t row) {
  return static_cast<float*>(v.data) + b * v.batch_stride + h * v.head_stride + row;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores become powers of two by the absolute value of the scale; its sign is taken into the scores. Never 0, because
// 0 * -inf (a masked score) would be NaN.
FLASHATTN_HOST_DEVICE float log2_scale(double softmax_scale) {
  const float scale = static_cast<float>(softmax_scale < 0 ? -softmax_scale : softmax_scale) * kLog2E;
  return scale < 1.17549435e-38f ? 1.17549435e-38f : scale;
}

using TileMask = BasicMask<int>;
using Limits = TileMask::Range;  // what one row of scores sees, or one key is seen by

__device__ __forceinline__ Limits rows_that_see(const TileMask& mask, int key) {
  return key < mask.seqlen_k ? mask.rows_of(key, key + 1) : Limits{0, 0};
}

}  // namespace flashattn_ext
