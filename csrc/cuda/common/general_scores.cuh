// What scores.cuh does, for calls with softcap or biases. The rule is found out at run time, by branches that all lanes
// take alike, and logits are stored: in units of log2, with their biases.
#pragma once

#include "bias.cuh"
#include "bias_gradient.cuh"
#include "scores.cuh"

namespace flashattn_ext {

// Forward: products become logits, in units of log2.
template <class T, int kRowTiles, int N>
__device__ __forceinline__ void make_logits(float (&x)[kRowTiles][N][4], const GeneralScore& score,
                                            const TileBias<T, false, kRowTiles, N>& bias) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float logits[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) logits[i][e] = x[i][n][e];
    }
    score.store<T>(logits);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) logits[i][e] *= score.factor;
    }
    bias.add(logits, n);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][n][e] = logits[i][e];
    }
  }
}

// Backward: as weigh_and_differentiate in scores.cuh, with all scores masked. `drops`: whether the call has dropout.
// A weight of 0 has no gradient, also when something else is not finite: the score may be hidden by its bias.
template <class T, int kKeyTiles, int N, class Keep>
__device__ __forceinline__ void weigh_and_differentiate(
    float (&weights)[kKeyTiles][N][4], float (&dscores)[kKeyTiles][N][4], const GeneralScore& score,
    const TileBias<T, true, kKeyTiles, N>& bias, TileBiasGradient<T, kKeyTiles, N>& bias_gradient, const float* lse,
    const float* delta, const SeenBy<kKeyTiles>& seen_by, bool drops, const Keep& keep) {
  Dropout::Column<kKeyTiles> kept;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (n % 2 == 0) {
      if (drops) {
        kept = keep(n);
      } else {
        kept.keep_all();
      }
    }
    const float2 row_lse = *reinterpret_cast<const float2*>(lse + n * 8);
    const float2 row_delta = *reinterpret_cast<const float2*>(delta + n * 8);
    float x[kKeyTiles][4], logits[kKeyTiles][4], gradient[kKeyTiles][4];
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = weights[i][n][e];
    }
    score.store<T>(x);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) logits[i][e] = x[i][e] * score.factor;
    }
    bias.add(logits, n);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int odd = e % 2;
        const bool seen = seen_by.includes(i, e / 2, n * 8 + odd), keeps = kept.keeps(i, n, e);
        const float weight = seen ? ptx::ex2(logits[i][e] - (odd ? row_lse.y : row_lse.x)) : 0.f;
        const float dp = keeps ? dscores[i][n][e] : 0.f;
        weights[i][n][e] = keeps ? weight : 0.f;
        gradient[i][e] = weight == 0 ? 0.f : weight * (dp - (odd ? row_delta.y : row_delta.x));
        if (weight == 0) x[i][e] = 0;
      }
    }
    bias_gradient.add(gradient, n);
    score.apply_slope<T>(gradient, x);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dscores[i][n][e] = gradient[i][e];
    }
  }
  bias_gradient.finish();
}

}  // namespace flashattn_ext
