// Rows of scores: where a row's statistics are in memory, its sink, and which keys it sees.
#pragma once

#include "cuda/tile/warp.cuh"
#include "rules/lse_words.h"
#include "rules/mask.h"

namespace flashattn_ext {

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7FFFFFFF); }

// The offset that is subtracted from the logits of a row: 0 while all of its scores so far are masked.
__device__ __forceinline__ float finite_max(float max) { return max == -infinity() ? 0.f : max; }

__device__ __forceinline__ float* row_statistic(const RowView& v, int64_t b, int64_t h, int64_t row) {
  return static_cast<float*>(v.data) + b * v.batch_stride + h * v.head_stride + row;
}

// narrowed() of score.h without branches. limit: kNarrowsFrom, or infinity to leave x as it is.
__device__ __forceinline__ float narrowed_beyond(float limit, float x) {
  return fmaf(x, 0.5f, 0.5f * fminf(fmaxf(x, -limit), limit));
}

// Whether a finite product is at least kRoundsProducts in size.
__device__ __forceinline__ bool is_large_product(float product) {
  const float size = fabsf(product);
  return (size >= kRoundsProducts<float>)&(size < infinity());  // without a branch between them
}

// Stores what a forward has for a row: lse and, where they are wanted, its two words. max: the maximum that the weights
// are relative to, in units of log2; sum: of the weights, 0 if the row is fully masked.
__device__ __forceinline__ void store_lse(const AttnParams& p, int64_t b, int64_t h, int64_t row, float max,
                                          float sum) {
  const bool empty = sum == 0;
  const float top = finite_max(max), log2_sum = log2f(sum);
  *row_statistic(p.lse, b, h, row) = empty ? -infinity() : row_lse(top, log2_sum);
  if (!p.lse_words.data) return;
  const auto words = empty ? LseWords<float>::of_no_key() : LseWords<float>::of_row(top, log2_sum);
  const TensorView& t = p.lse_words;
  float* const to = static_cast<float*>(t.data) + b * t.batch_stride + h * t.head_stride + row * t.row_stride;
  *reinterpret_cast<float2*>(to) = make_float2(words.top, words.log2_sum);
}

// Stores the largest logit of a row, given in units of log2.
__device__ __forceinline__ void store_largest(const AttnParams& p, int64_t b, int64_t h, int64_t row, float largest) {
  *row_statistic(p.row_maxima, b, h, row) = in_natural_units(largest);
}

// The sink of a head, in units of log2; -inf when there is none.
__device__ __forceinline__ float head_sink(const AttnParams& p, int64_t h) {
  const float sink = p.sink ? static_cast<const float*>(p.sink)[h] : 0.f;
  return p.has_sink ? sink_maximum(sink) : -infinity();
}

using Mask32 = BasicMask<int>;
using UnplacedMask32 = BasicMask<int, false>;  // for kernels that run no call whose rows an origin places: options.h
using Limits = Mask32::Range;                  // the keys that a query sees, or the queries that see a key

__device__ __forceinline__ Limits uniform(const Limits& x) { return {uniform(x.begin), uniform(x.end)}; }

template <class Mask>  // Mask32 or UnplacedMask32
__device__ __forceinline__ Limits rows_that_see(const Mask& mask, int key) {
  return key < mask.seqlen_k ? mask.rows_of(key, key + 1) : Limits{0, 0};
}

}  // namespace flashattn_ext
