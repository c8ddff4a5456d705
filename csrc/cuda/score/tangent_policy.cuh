// Policies of forward mode (jvp.cuh of both architectures) for scores: how products become stored scores, and how the
// products of tangents become tangents of logits. All lanes of a warp call them, and their branches are warp-uniform.
// T: the element type; kRowTiles: row tiles of a warp; kKeys: keys of a step. score_policy.cuh says what coordinates()
// is. x, tangents: [row tile][column tile][4].
//   Rule                      the kernel's argument
//   has_biases(p)             whether a tangent of a bias is given
//   make_logits(...)          products of q and k become stored scores, and <tq, k> + <q, tk> becomes the part of the
//                             logits' tangents that comes from q and k; returns the rule for weight_of
//   add_biases(...)           adds the tangents of the biases to the tangents of the logits
#pragma once

#include "cuda/score/bias.cuh"
#include "cuda/score/general_score.cuh"
#include "cuda/score/scores.cuh"
#include "derivative_params.h"

namespace flashattn_ext {

// No option of a score.
struct PlainTangents {
  using Rule = ScoreRule<float, PlainProducts<true>>;

  static __device__ bool has_biases(const JvpParams&) { return false; }
  template <class CoordinatesOf, int kRowTiles, int N>
  static __device__ const Rule& make_logits(const JvpParams&, const Rule& rule, float (&x)[kRowTiles][N][4],
                                            float (&tangents)[kRowTiles][N][4], const CoordinatesOf&) {
    store_scores(x, rule);
    each_element<kRowTiles, N>([&](int i, int n, int e) { tangents[i][n][e] *= rule.softmax_scale; });
    return rule;
  }
  template <class CoordinatesOf, int kRowTiles, int N>
  static __device__ void add_biases(const JvpParams&, float (&)[kRowTiles][N][4], const CoordinatesOf&) {}
};

// Every option, selected by run-time branches.
template <class T, int kRowTiles, int kKeys>
struct GeneralTangents {
  using Rule = GeneralScore;
  using Bias = TileBias<T, false, kRowTiles, kKeys / 8>;
  using Scores = float[kRowTiles][kKeys / 8][4];

  static __device__ bool has_biases(const JvpParams& p) { return p.tangents.has_bias(); }
  template <class CoordinatesOf>
  static __device__ ScaledLogit make_logits(const JvpParams& p, const Rule& rule, Scores& x, Scores& tangents,
                                            const CoordinatesOf& coordinates) {
    const float scale = rule.softmax_scale;
    // In plain calls scores are products, as in the forward, which rounds none that is small.
    if (!rule.changes_products() && !p.has_bias() && rule.factor > 0) {
      each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) { tangents[i][n][e] *= scale; });
      return {rule.factor};
    }
    each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) {
      const float slope = rule.changes_products() ? store_score<T>(rule, &x[i][n][e]) : 1.f;
      x[i][n][e] *= rule.factor;
      tangents[i][n][e] *= slope * scale;
    });
    if (p.has_bias()) coordinates().template bias<Bias>(p).add_columns(x, 0);
    return {1};
  }
  template <class CoordinatesOf>
  static __device__ void add_biases(const JvpParams& p, Scores& tangents, const CoordinatesOf& coordinates) {
    if (!has_biases(p)) return;
    // add_columns adds biases in units of log2; the tangents of logits are in natural units before and after.
    each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) { tangents[i][n][e] *= kLog2E<float>; });
    coordinates().template bias<Bias>(p.tangents).add_columns(tangents, 0);
    each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) { tangents[i][n][e] *= kLn2<float>; });
  }
};

}  // namespace flashattn_ext
