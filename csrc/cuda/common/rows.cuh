// Statistics per row: where they lie in memory, and their exchange among the four lanes that share an accumulator row.
#pragma once

#include "../../mask.h"
#include "../../score.h"
#include "../../seqlen.h"
#include "../ptx/math.cuh"

namespace flashattn_ext {

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

// What is subtracted from the scores of a row: 0 as long as it has seen nothing.
__device__ __forceinline__ float finite_max(float max) { return max == -infinity() ? 0.f : max; }

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

// In units of log2; -inf where there is none.
__device__ __forceinline__ float head_sink(const AttnParams& p, int64_t h) {
  const float sink = p.sink ? static_cast<const float*>(p.sink)[h] : 0.f;
  return p.has_sink ? sink * kLog2E<float> : -infinity();
}

// The online softmax of a row (Milakov and Gimelshein 2018) takes in the largest score of a step; both in units of
// log2. Returns what is to be multiplied to all that was summed up before. The maximum stays as it is while no score is
// further than `tolerance` beyond it: then there is nothing to multiply.
constexpr float kTolerance = 8;
__device__ __forceinline__ float raise_max(float* max, float largest, float tolerance = kTolerance) {
  const float before = *max, now = fmaxf(before, largest);
  const bool stays = now - before <= tolerance;
  *max = stays ? before : now;
  return stays ? 1.f : ptx::ex2(before - finite_max(*max));
}

using TileMask = BasicMask<int>;
using Limits = TileMask::Range;  // what one row of scores sees, or one key is seen by

__device__ __forceinline__ Limits rows_that_see(const TileMask& mask, int key) {
  return key < mask.seqlen_k ? mask.rows_of(key, key + 1) : Limits{0, 0};
}

}  // namespace flashattn_ext
