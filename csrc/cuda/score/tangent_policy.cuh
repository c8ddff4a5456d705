// Policies of forward mode (jvp.cuh of both architectures) for scores: how products become stored scores, and how the
// products of tangents become tangents of logits. All lanes of a warp call them, and their branches are warp-uniform.
// T: the element type; kRowTiles: of a warp; kKeys: of a step. x, tangents: [row tile][column tile][4].
//   Rule                      the kernel's argument
//   has_biases(kernel)        whether a tangent of a bias is given
//   make_logits(...)          products of q and k become stored scores, and <tq, k> + <q, tk> becomes the part of the
//                             logits' tangents that comes from q and k; returns the rule for weight_of
//   add_biases(...)           adds the tangents of the biases to the tangents of the logits
#pragma once

#include "cuda/score/bias.cuh"
#include "cuda/score/general_score.cuh"
#include "cuda/score/scores.cuh"

namespace flashattn_ext {

// No option of a score.
struct PlainTangents {
  using Rule = ScoreRule<float, PlainProducts<true>>;

  template <class Kernel>
  static __device__ bool has_biases(const Kernel&) {
    return false;
  }
  template <class Kernel, class Step, int kRowTiles, int N>
  static __device__ const Rule& make_logits(const Kernel& kernel, float (&x)[kRowTiles][N][4],
                                            float (&tangents)[kRowTiles][N][4], const Step&) {
    store_scores(x, kernel.score);
    each_element<kRowTiles, N>([&](int i, int n, int e) { tangents[i][n][e] *= kernel.score.softmax_scale; });
    return kernel.score;
  }
  template <class Kernel, class Step, int kRowTiles, int N>
  static __device__ void add_biases(const Kernel&, float (&)[kRowTiles][N][4], const Step&) {}
};

// Every option, selected by run-time branches.
template <class T, int kRowTiles, int kKeys>
struct GeneralTangents {
  using Rule = GeneralScore;
  using Bias = TileBias<T, false, kRowTiles, kKeys / 8>;
  using Scores = float[kRowTiles][kKeys / 8][4];

  template <class Kernel>
  static __device__ bool has_biases(const Kernel& kernel) {
    return kernel.p.tangents.has_bias();
  }
  template <class Kernel, class Step>
  static __device__ ScaledLogit make_logits(const Kernel& kernel, Scores& x, Scores& tangents, const Step& step) {
    const GeneralScore& score = kernel.score;
    const float scale = score.softmax_scale;
    // In plain calls scores are products, as in the forward, which rounds none that is small.
    if (!score.changes_products() && !kernel.p.has_bias() && score.factor > 0) {
      each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) { tangents[i][n][e] *= scale; });
      return {score.factor};
    }
    each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) {
      const float slope = score.changes_products() ? store_score<T>(score, &x[i][n][e]) : 1.f;
      x[i][n][e] *= score.factor;
      tangents[i][n][e] *= slope * scale;
    });
    if (kernel.p.has_bias()) kernel.template bias<Bias>(kernel.p, step).add_columns(x, 0);
    return {1};
  }
  template <class Kernel, class Step>
  static __device__ void add_biases(const Kernel& kernel, Scores& tangents, const Step& step) {
    if (!has_biases(kernel)) return;
    // add_columns adds biases in units of log2; the tangents of logits are in natural units before and after.
    each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) { tangents[i][n][e] *= kLog2E<float>; });
    kernel.template bias<Bias>(kernel.p.tangents, step).add_columns(tangents, 0);
    each_element<kRowTiles, kKeys / 8>([&](int i, int n, int e) { tangents[i][n][e] *= kLn2<float>; });
  }
};

}  // namespace flashattn_ext
