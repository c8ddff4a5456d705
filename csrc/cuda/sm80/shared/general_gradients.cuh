// What the sm_80 kernels of gradients (backward.cuh, second.cuh) do with scores that have options or biases.
// Warp-uniform branches select the score rule at run time. Stored scores are logits in units of log2, with their
// biases.
#pragma once

#include "cuda/score/bias.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/stages/bias_gradient.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// Backward: as weigh_and_differentiate in scores.cuh with two words of lse. A weight of 0 has no gradient, even if
// another operand is not finite: the bias may mask the score.
template <class T, bool kMasked, int kKeyTiles, int N, class Bias, class BiasGradient, class SeenBy, class Dropping>
__device__ __forceinline__ void weigh_and_differentiate(float (&weights)[kKeyTiles][N][4],
                                                        float (&dscores)[kKeyTiles][N][4], const GeneralScore& score,
                                                        const Bias& bias, BiasGradient& bias_gradient, const float* top,
                                                        const float* log2_sum, const float* delta,
                                                        const SeenBy& seen_by, Dropping& dropping) {
  constexpr int kTogether = 2;  // query tiles
  // The forward of fp32 takes the exact products of small rows where a logit has no other term (make_scores).
  const bool takes_products = sizeof(T) == 4 && !score.changes_products() && !bias.has_any();
#pragma unroll
  for (int first = 0; first < N; first += kTogether) {
    float own[kKeyTiles][kTogether][4], logits[kKeyTiles][kTogether][4], gradient[kKeyTiles][kTogether][4];
    each_element<kKeyTiles, kTogether>([&](int i, int n, int e) { own[i][n][e] = weights[i][first + n][e]; });
    make_logits<T>(score, own);
    each_element<kKeyTiles, kTogether>([&](int i, int n, int e) { logits[i][n][e] = own[i][n][e]; });
    bias.add_columns(logits, first);
    dropping.draw(first);
    each_element<kKeyTiles, kTogether>([&](int i, int n, int e) {
      const int query = (first + n) * 8 + e % 2;
      const bool seen = !kMasked || seen_by.includes(i, e / 2, query), keeps = dropping.keeps(i, n, e);
      const bool exact = takes_products && !rounds_products(top[query]);
      const float product = weights[i][first + n][e], logit = logits[i][n][e];
      const float below = exact ? fmaf(product, score.factor, -top[query]) : logit - top[query];
      const float weight = seen ? ptx::ex2(below - log2_sum[query]) : 0.f;
      const float dp = keeps ? dscores[i][first + n][e] : 0.f;
      weights[i][first + n][e] = keeps ? weight : 0.f;
      gradient[i][n][e] = weight == 0 ? 0.f : weight * (dp - delta[query]);
    });
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      bias_gradient.add([&](int i, int e) { return gradient[i][n][e]; }, first + n);
    }
    apply_slope(score, gradient, own);
    each_element<kKeyTiles, kTogether>([&](int i, int n, int e) { dscores[i][first + n][e] = gradient[i][n][e]; });
  }
  bias_gradient.finish();
}

namespace sm80 {

// Stores this warp's sums over the scores of head h, for the gradients of biases, and resets them. n: the tile of keys;
// key: the first of this warp, within the sequence.
template <class Sums>
__device__ __forceinline__ void store_bias_sums(Sums& sums, const AttnGradParams& p, const GeneralWorkspace& workspace,
                                                int b, int h, int n, int warp, int key, int length_k) {
  const int64_t tile = workspace.first_key_tile(p, b, key_sequence(p, b)) + n;
  end_head(sums, p, workspace, b, h, tile, warp, key + quad(), length_k);
}

}  // namespace sm80
}  // namespace flashattn_ext
