// The arithmetic of forward mode (jvp.cuh of both architectures) between the products: scores and the tangents of their
// logits become the operands of the products along keys, and the sums over the keys of a row become the tangent of its
// lse. Accumulators are as in scores.cuh.
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/tile/rows.cuh"
#include "derivative_params.h"

namespace flashattn_ext {

// A head's sink and its tangent, in natural units.
struct SinkTangent {
  float sink, tangent;

  __device__ SinkTangent(const JvpParams& p, int h)
      : sink(p.sink ? static_cast<const float*>(p.sink)[h] : 0.f),
        tangent(p.tangents.sink ? static_cast<const float*>(p.tangents.sink)[h] : 0.f) {}
};

// What tout and tlse of a row consist of, besides the sum over its keys.
struct RowTangent {
  float lse;     // the tangent of lse; 0 if the row has no weight
  float factor;  // factor of out
  float sums;    // the factor of the sums over keys
};

// State of rows g and g + 8 of each of a warp's row tiles. The sums are of P * (A - pivot), about a pivot near the
// mean of A (cpu/derivatives/tangent.h explains it). total and deviation are this lane's sums of P and of
// P * (A - pivot). kTwoWords: weights always come from both words of lse (large_rows.cuh).
template <int kRowTiles, bool kTwoWords>
struct TangentRows {
  // The weight that a row has seen by the end of the tile of its pivot. In 16 bits a weight that is smaller by a factor
  // of 2^-12 than another one is lost beside it anyway.
  static constexpr float kLeastWeight = kTwoWords ? 0x1p-32f : 0x1p-12f;

  float lse[kRowTiles][2];  // one word in units of log2, or the mark; +inf for rows without a weight
  float pivot[kRowTiles][2], total[kRowTiles][2], deviation[kRowTiles][2];
  bool has_pivot[kRowTiles][2];

  // words: of row r (g or g + 8) of row tile i; of_no_key() if the row has no weight or does not exist.
  __device__ __forceinline__ void start(int i, int r, const LseWords<float>& words) {
    lse[i][r] = kTwoWords && !words.is_of_no_key() ? -0.f : one_word(words.sum());
    pivot[i][r] = total[i][r] = deviation[i][r] = 0;
    has_pivot[i][r] = words.is_of_no_key();
  }

  // Subtracts the words of marked rows from the scores of a tile. words_of(i, r): as `words` in start().
  template <int N, class Rule, class WordsOf>
  __device__ __forceinline__ void subtract_words(float (&scores)[kRowTiles][N][4], const Rule& rule,
                                                 const WordsOf& words_of) const {
    bool marked = kTwoWords;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) marked = marked || is_mark(lse[i][0]) || is_mark(lse[i][1]);
    if (marked) subtract_words_of_rows(scores, rule, lse, words_of);
  }

  // The tangents of masked scores become 0: they may be NaN.
  template <int N>
  static __device__ __forceinline__ void hide(const float (&scores)[kRowTiles][N][4],
                                              float (&tangents)[kRowTiles][N][4]) {
    each_element<kRowTiles, N>(
        [&](int i, int n, int e) { tangents[i][n][e] = scores[i][n][e] == -infinity() ? 0.f : tangents[i][n][e]; });
  }

  // Calls each(i, r, weight, tangent) for every score of row r of row tile i: its weight and the tangent of its logit.
  template <int N, class Rule, class Each>
  __device__ __forceinline__ void each_score(const float (&scores)[kRowTiles][N][4],
                                             const float (&tangents)[kRowTiles][N][4], const Rule& rule,
                                             const Each& each) const {
    each_element<kRowTiles, N>([&](int i, int n, int e) {
      each(i, e / 2, weight_of(rule, scores[i][n][e], lse[i][e / 2]), tangents[i][n][e]);
    });
  }

  // A first pass over all keys, where biases have tangents: sums P and P * (tangent of the biases).
  template <int N, class Rule>
  __device__ __forceinline__ void sum_biases(const float (&scores)[kRowTiles][N][4],
                                             const float (&tangents)[kRowTiles][N][4], const Rule& rule) {
    each_score(scores, tangents, rule, [&](int i, int r, float weight, float tangent) {
      total[i][r] += weight;
      pivot[i][r] += weight * tangent;
    });
  }
  // Turns these sums into the pivot: the weighted mean over all keys.
  __device__ __forceinline__ void end_biases() {
    unrolled<kRowTiles, 2>([&](int i, int r) {
      const float weight = quad_sum(total[i][r]), sum = quad_sum(pivot[i][r]);
      pivot[i][r] = weight > 0 ? sum / weight : 0.f;
      total[i][r] = 0;
    });
  }

  // Completes the pivot of each row in the first tile by whose end the row has a weight that counts: adds the mean of
  // the tangents of this tile that come from q and k. A smaller weight would make its own tangent the pivot of a row
  // whose mean may be far away, and P * (A - pivot) of the mean would have the rounding error of a 16-bit operand. The
  // products along keys of tiles before are about 0 instead, for which their weights are too small; their deviation,
  // whose rounding would be all of tlse's, is corrected.
  template <int N, class Rule>
  __device__ __forceinline__ void find_pivots(const float (&scores)[kRowTiles][N][4],
                                              const float (&tangents)[kRowTiles][N][4], const Rule& rule) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) all = all && has_pivot[i][0] && has_pivot[i][1];
    if (__all_sync(~0u, all)) return;
    float weights[kRowTiles][2] = {}, sums[kRowTiles][2] = {};
    each_score(scores, tangents, rule, [&](int i, int r, float weight, float tangent) {
      weights[i][r] += weight;
      sums[i][r] += weight * tangent;
    });
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float weight = quad_sum(weights[i][r]), sum = quad_sum(sums[i][r]), before = quad_sum(total[i][r]);
        if (has_pivot[i][r] || !(weight > 0 && before + weight > kLeastWeight)) continue;
        const float mean = sum / weight;
        pivot[i][r] += mean;
        deviation[i][r] -= total[i][r] * mean;
        has_pivot[i][r] = true;
      }
    }
  }

  // Scores become weights P, and the tangents of logits P * (A - pivot).
  template <int N, class Rule>
  __device__ __forceinline__ void weigh(float (&scores)[kRowTiles][N][4], float (&tangents)[kRowTiles][N][4],
                                        const Rule& rule) {
    each_element<kRowTiles, N>([&](int i, int n, int e) {
      const int r = e / 2;
      const float weight = weight_of(rule, scores[i][n][e], lse[i][r]);
      const float product = weight * (tangents[i][n][e] - pivot[i][r]);
      total[i][r] += weight;
      deviation[i][r] += product;
      scores[i][n][e] = weight;
      tangents[i][n][e] = product;
    });
  }

  // After the last key. words: as in start().
  __device__ __forceinline__ RowTangent finish(const JvpParams& p, const SinkTangent& sink, int i, int r,
                                               const LseWords<float>& words) const {
    const bool used = !words.is_of_no_key();
    const bool has_sink = used && p.has_sink && sink_counts(sink.sink);
    const float sink_weight = has_sink ? exp2f(words.sink_log2_weight(sink.sink)) : 0.f;
    // The sum of the weights of all keys: its exact value if the computed sum is equal within its rounding error, which
    // then leaves the sums over keys too. Otherwise the caller passed the lse of a call with more keys.
    const float sum = quad_sum(total[i][r]), exact = 1 - sink_weight;
    const bool is_all = fabsf(sum - exact) < weight_error(words.top);
    const float scale = is_all && sum > 0 ? exact / sum : 1.f, weight = is_all ? exact : sum;
    const float mean = quad_sum(deviation[i][r]) * scale + pivot[i][r] * weight + sink_weight * sink.tangent;
    return {used ? mean : 0.f, used ? pivot[i][r] - mean : 0.f, scale};
  }
};

}  // namespace flashattn_ext
