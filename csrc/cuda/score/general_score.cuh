// The score rule of a call with options of a score or biases, on fragments of products. Whether the rule changes
// products is found out at run time, by warp-uniform branches.
#pragma once

#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"
#include "rules/score.h"

namespace flashattn_ext {

// tanh with a relative error of at most 2^-15, from a quotient of polynomials in x^2. Their first coefficients are 1,
// so that the relative error vanishes towards 0: a large softcap multiplies it. The result is NaN for NaN.
__device__ __forceinline__ float tanh_of_half(float x) {
  constexpr float kFlat = 6;  // tanh is constant from here on
  x = ptx::max_nan(ptx::min_nan(x, kFlat), -kFlat);
  const float square = x * x;
  const float above = x * fmaf(fmaf(1.5228421e-3f, square, 0.11498365f), square, 1.f);
  const float below = fmaf(fmaf(fmaf(5.6746916e-5f, square, 0.017664496f), square, 0.44828268f), square, 1.f);
  return above * ptx::rcp(below);
}

// tanh with the precision that the input type T needs. The instruction has the error of fp16 itself, which is small
// beside that of bf16 only.
template <class T>
struct TanhOf {
  static __device__ __forceinline__ float of(float x, bool) {
    if constexpr (sizeof(T) == 4) {
      return ::tanhf(x);
    } else if constexpr (std::is_same_v<T, __half>) {
      return tanh_of_half(x);
    } else {
      return ptx::tanh(x);
    }
  }
};

// The rule of scores that are logits in units of log2 already.
struct StoredLogit {
  static constexpr float factor = 1;
};
__device__ __forceinline__ constexpr bool has_products(const StoredLogit&) { return false; }
// The rule of scores whose logits, in units of log2, are factor * score. The factor is positive in kernels that take
// the maximum of a row.
struct ScaledLogit {
  static constexpr bool kConstantSlope = true;
  float factor;
  __device__ __forceinline__ float stored(float x) const { return x; }
  __device__ __forceinline__ float times_slope(float gradient, float) const { return gradient; }
};

// The rule of the call. The functions below add the tanh of the input type T.
using GeneralScore = ScoreRule<float, void>;

// Products become scores whose logits are factor * score, without bias.
template <class T, int kRowTiles, int N>
__device__ __forceinline__ void store_scores(const GeneralScore& score, float (&x)[kRowTiles][N][4]) {
  if (!score.changes_products()) return;
  const auto rule = score.with<TanhOf<T>>();
  each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] = rule.stored(x[i][n][e]); });
}
// The slope at a stored score of a rule that changes products: a factor for the gradient of its logit.
__device__ __forceinline__ float slope_at(const GeneralScore& score, float x) {
  return fmaxf(score.slope(x, 1.f), 0.f);  // fmaxf(NaN, 0) is 0, so that a gradient of 0 stays 0
}
// Stores one product, for a rule that changes products. Returns the slope there.
template <class T>
__device__ __forceinline__ float store_score(const GeneralScore& score, float* x) {
  *x = score.with<TanhOf<T>>().changed(*x);
  return slope_at(score, *x);
}
// Products become logits without bias, in units of log2. They are rounded once, before any bias is added.
template <class T, int kRowTiles, int N>
__device__ __forceinline__ void make_logits(const GeneralScore& score, float (&x)[kRowTiles][N][4]) {
  if (score.changes_products()) {
    const auto rule = score.with<TanhOf<T>>();
    each_element<kRowTiles, N>(
        [&](int i, int n, int e) { x[i][n][e] = __fmul_rn(rule.stored(x[i][n][e]), rule.factor); });
  } else {
    each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] = __fmul_rn(x[i][n][e], score.factor); });
  }
}
// Products become the stored scores of a forward, without bias; returns their rule. In fp32 they stay products where a
// logit has no other term, which the derivatives take as well: a logit would be rounded. Weights of 16 bits do not show
// that rounding.
template <class T, int kRowTiles, int N>
__device__ __forceinline__ auto make_scores(const GeneralScore& score, float (&x)[kRowTiles][N][4], bool has_bias) {
  if constexpr (sizeof(T) == 4) {
    if (score.changes_products() || has_bias) {
      make_logits<T>(score, x);
      return ScaledLogit{1};
    }
    if (score.factor < 0) each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] = -x[i][n][e]; });
    return ScaledLogit{fabsf(score.factor)};
  } else {
    make_logits<T>(score, x);
    return StoredLogit{};
  }
}
// Makes logits of products of which those of row g + 8 r of row tile i still lack the factor scale[i][r].
template <class T, int kRowTiles, int N>
__device__ __forceinline__ void make_logits(const GeneralScore& score, float (&x)[kRowTiles][N][4],
                                            const float (&scale)[kRowTiles][2]) {
  if (score.changes_products()) {
    const auto rule = score.with<TanhOf<T>>();
    each_element<kRowTiles, N>(
        [&](int i, int n, int e) { x[i][n][e] = rule.times(scale[i][e / 2]).stored(x[i][n][e]) * rule.factor; });
  } else {
    each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] *= score.factor * scale[i][e / 2]; });
  }
}
// Gradients of logits become gradients of scaled products. logits: without bias, as above; they are ignored where the
// gradient is 0.
template <int kRowTiles, int N>
__device__ __forceinline__ void apply_slope(const GeneralScore& score, float (&gradient)[kRowTiles][N][4],
                                            const float (&logits)[kRowTiles][N][4]) {
  if (!score.changes_products()) return;
  each_element<kRowTiles, N>([&](int i, int n, int e) {
    const float x = fminf(fmaxf(logits[i][n][e] * score.inverse, -score.bound()), score.bound());
    const float slope = score.slope(x, gradient[i][n][e]);
    gradient[i][n][e] = gradient[i][n][e] == 0 ? 0.f : slope;
  });
}

// With a factor of log2(e) the scores of these rules are logits in natural units, whose biases are narrowed here
// (score.h): where a logit is so large, products do not count beside its bias.
__device__ __forceinline__ float narrowed_score(float factor, float x) {
  return narrowed_beyond(factor == kLog2E<float> ? kNarrowsFrom<float> : infinity(), x);
}
__device__ __forceinline__ float narrowed_score(const ScaledLogit& score, float x) {
  return narrowed_score(score.factor, x);
}
__device__ __forceinline__ float logit_of(const ScaledLogit& score, int, float x) {
  return __fmul_rn(narrowed_score(score, x), score.factor);
}

// The rule of scores x of a forward whose logits, in units of log2, are factor * x + row[r].
struct DistanceLogit {
  float factor;
  float row[2];
};
__device__ __forceinline__ float logit_of(const DistanceLogit& score, int r, float x) {
  return __fmaf_rn(narrowed_score(score.factor, x), score.factor, score.row[r]);
}
__device__ __forceinline__ float offset_of(const DistanceLogit& score, int r, float max) { return max - score.row[r]; }
// The term of a row counts like the offset: the logits of other tiles have it in their sums.
__device__ __forceinline__ bool rounds_row(const DistanceLogit& score, int r, float logit) {
  return is_large_product(logit) | is_large_product(offset_of(score, r, logit));
}

// ScaledLogit in a forward whose weights are larger by the factor kScale, which is in the exponent's offset.
struct LargerWeights {
  static constexpr float kScale = 256, kBits = 8;
  float factor;
};
__device__ __forceinline__ float offset_of(const LargerWeights&, int, float max) { return max - LargerWeights::kBits; }
__device__ __forceinline__ float exponent_of(const LargerWeights&, float logit, float max) {
  return __fsub_rn(logit, max) + LargerWeights::kBits;
}

// The rule of the scores that a forward has stored when it takes the maximum of a row.
template <class Score>
__device__ __forceinline__ const Score& stored_rule(const Score& score) {
  return score;
}
__device__ __forceinline__ StoredLogit stored_rule(const GeneralScore&) { return {}; }

}  // namespace flashattn_ext
