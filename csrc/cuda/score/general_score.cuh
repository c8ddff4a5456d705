// The score rule of a call with softcap or biases: either rule of score.h, selected at run time by warp-uniform
// branches.
#pragma once

#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tensor_core.cuh"
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
  static __device__ __forceinline__ float of(float x) {
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

struct GeneralScore {
  bool is_capped;
  float factor, softmax_scale;
  float inner, inverse;  // only a capped rule has them; inverse is 1 / factor

  static GeneralScore of(const AttnParams& p) {
    if (p.softcap > 0) {
      const auto rule = CappedScore<float, void>::of(p);
      return {true, rule.factor, rule.softmax_scale, rule.inner, 1 / rule.factor};
    }
    const auto rule = PlainScore<float, false>::of(p);
    return {false, rule.factor, rule.softmax_scale, 0, 0};
  }

  // The rule for products that still lack the factor `scale`, which may be negative. Of its functions only make_logits
  // may be called.
  __device__ __forceinline__ GeneralScore times(float scale) const {
    return {is_capped, is_capped ? factor : factor * scale, softmax_scale, inner * scale, inverse};
  }
  // Products become scores whose logits are factor * score, without bias. T: the input type.
  template <class T, int kRowTiles, int N>
  __device__ __forceinline__ void store(float (&x)[kRowTiles][N][4]) const {
    if (!is_capped) return;
    each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] = capped<T>().stored(x[i][n][e]); });
  }
  // Stores one product of a capped rule. Returns the factor for the gradient of its logit.
  template <class T>
  __device__ __forceinline__ float cap(float* x) const {
    *x = capped<T>().stored(*x);
    // fmaxf(NaN, 0) is 0, so that a gradient of 0 stays 0.
    return fmaxf(capped<T>().times_slope(1.f, *x), 0.f);
  }
  // Products become logits without bias, in units of log2.
  template <class T, int kRowTiles, int N>
  __device__ __forceinline__ void make_logits(float (&x)[kRowTiles][N][4]) const {
    if (is_capped) {
      each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] = capped<T>().stored(x[i][n][e]) * factor; });
    } else {
      each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] *= factor; });
    }
  }
  // Products become the stored scores of a forward, without bias; returns their rule. In fp32 they stay products where
  // a logit has no other term, which the derivatives take as well: a logit would be rounded. Weights of 16 bits do not
  // show that rounding.
  template <class T, int kRowTiles, int N>
  __device__ __forceinline__ auto make_scores(float (&x)[kRowTiles][N][4], bool has_bias) const {
    if constexpr (sizeof(T) == 4) {
      if (is_capped || has_bias) {
        make_logits<T>(x);
        return ScaledLogit{1};
      }
      if (factor < 0) each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] = -x[i][n][e]; });
      return ScaledLogit{fabsf(factor)};
    } else {
      make_logits<T>(x);
      return StoredLogit{};
    }
  }
  // Makes logits of products of which those of row g + 8 r of row tile i still lack the factor scale[i][r].
  template <class T, int kRowTiles, int N>
  __device__ __forceinline__ void make_logits(float (&x)[kRowTiles][N][4], const float (&scale)[kRowTiles][2]) const {
    if (is_capped) {
      each_element<kRowTiles, N>(
          [&](int i, int n, int e) { x[i][n][e] = times(scale[i][e / 2]).capped<T>().stored(x[i][n][e]) * factor; });
    } else {
      each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] *= factor * scale[i][e / 2]; });
    }
  }
  // Gradients of logits become gradients of scaled products. logits: without bias, as above; they are ignored where the
  // gradient is 0.
  template <class T, int kRowTiles, int N>
  __device__ __forceinline__ void apply_slope(float (&gradient)[kRowTiles][N][4],
                                              const float (&logits)[kRowTiles][N][4]) const {
    if (!is_capped) return;
    each_element<kRowTiles, N>([&](int i, int n, int e) {
      const float x = fminf(fmaxf(logits[i][n][e] * inverse, -1.f), 1.f);
      const float slope = capped<T>().times_slope(gradient[i][n][e], x);
      gradient[i][n][e] = gradient[i][n][e] == 0 ? 0.f : slope;
    });
  }

 private:
  template <class T>
  __device__ __forceinline__ CappedScore<float, TanhOf<T>> capped() const {
    return {factor, softmax_scale, inner};
  }
};

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
