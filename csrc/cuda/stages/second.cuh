// Second derivatives (second.cuh of both architectures): the first and last stages, the data that they share with the
// main one, and the main one's arithmetic between its products.
#pragma once

#include "cuda/score/scores.cuh"
#include "cuda/stages/backward_workspace.h"
#include "derivative_params.h"

namespace flashattn_ext {

// The workspace of a backward, and r / keep_scale of every row, like its delta.
template <class Base>
struct SecondWorkspace : Base {
  float* r;

  SecondWorkspace(const AttnGradParams& p, const Base& base)
      : Base(base), r(reinterpret_cast<float*>(static_cast<char*>(p.workspace) + base.bytes)) {
    this->bytes += (p.heads_q * this->rows * 4 + 63) / 64 * 64;
  }
};

// delta and lse of every row, and r: the delta of a call that has tout in the place of out, and no dlse.
template <class T, class Workspace>
static void prepare_second(const SecondParams& p, const Workspace& workspace) {
  launch_prepare<T>(p, workspace);
  AttnGradParams of_tangents = p;
  of_tangents.out = p.tangents.out;
  of_tangents.dlse = {};
  BackwardWorkspace of_r = workspace;
  of_r.delta = workspace.r;
  of_r.zeroed_bytes = 0;
  launch_prepare<T>(of_tangents, of_r);
}

// What the gradient of a sink sums up beside the weight of the sink: delta (tsink - tlse) + r.
struct SecondOfRow {
  const float* r;

  __device__ __forceinline__ double operator()(const SecondParams& p, const BackwardWorkspace& workspace, int64_t b,
                                               int64_t h, int64_t row, int64_t at) const {
    const float tangent = p.tangents.sink ? static_cast<const float*>(p.tangents.sink)[h] : 0.f;
    return workspace.delta[at] * (static_cast<double>(tangent) - *row_statistic(p.tangents.lse, b, h, row)) + r[at];
  }
};

// --- scores --------------------------------------------------------------------------------------------------------
//
// The arithmetic between the products, transposed as in the backward.
//
// Here m is 1 where dropout keeps the score and 0 elsewhere: the factor 1 / p_keep multiplies the finished gradients,
// and delta and r have been divided by it. With the first and second derivatives of the rule, slope and curvature (1
// and 0 in plain calls), and the tangent A of the logit:
//
//   dS = P (m dP - delta)      E = P ((m dP - delta) (A - tlse) + m B - r)
//   T  = slope dS              F = slope E + curvature dS * softmax_scale * (<tq, k> + <q, tk>)

// The statistics of the queries of a tile, in shared memory. log2_sum: with two words of lse.
struct SecondRows {
  const float *lse, *log2_sum, *delta, *r, *tlse;
};
// The statistics of queries `query` and `query + 1`.
struct RowPair {
  float2 lse, delta, r, tlse;

  __device__ __forceinline__ RowPair(const SecondRows& rows, int query)
      : lse(pair(rows.lse, query)),
        delta(pair(rows.delta, query)),
        r(pair(rows.r, query)),
        tlse(pair(rows.tlse, query)) {}
  static __device__ __forceinline__ float2 pair(const float* values, int query) {
    return *reinterpret_cast<const float2*>(values + query);
  }
};

// One score, after the rule and dropout.
struct SecondScore {
  float weight, log_tangent, dp, b;  // P, A - tlse, m dP - delta, m B - r

  __device__ __forceinline__ float dlogit() const { return weight * dp; }                        // dS
  __device__ __forceinline__ float second() const { return weight * fmaf(dp, log_tangent, b); }  // E
  __device__ __forceinline__ float of_value(bool keeps) const { return keeps ? weight * log_tangent : 0.f; }
};

// No option of a score. Rows whose lse is a mark (large_rows.cuh) have been handled.
struct PlainSecond {
  using Workspace = BackwardWorkspace;
  static constexpr bool kMasksAlways = false, kTwoWords = false;

  // step: as KeyTileStep of ../sm80/, of which it reads the rule of the workspace and the first query. b: [key tile]
  // [query tile][4], as the others.
  template <bool kMasked, class Step, int kKeyTiles, int N, class Dropping>
  __device__ void differentiate_twice(const Step& step, const SecondRows& statistics, float (&x)[kKeyTiles][N][4],
                                      float (&tangents)[kKeyTiles][N][4], float (&dp)[kKeyTiles][N][4],
                                      const float (&b)[kKeyTiles][N][4], const SeenBy<kKeyTiles>& seen_by,
                                      Dropping& dropping) {
    const auto& score = step.workspace.score;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n % 2 == 0) dropping.draw(n);
      const RowPair rows(statistics, step.query + n * 8 + 2 * lane_in_quad());
      each_element<kKeyTiles, 1>([&](int i, int, int e) {
        const bool odd = e % 2, keeps = dropping.keeps(i, n, e);
        const float weight = weight_of(score, x[i][n][e], odd ? rows.lse.y : rows.lse.x);
        const SecondScore of{weight, fmaf(tangents[i][n][e], score.softmax_scale, -(odd ? rows.tlse.y : rows.tlse.x)),
                             (keeps ? dp[i][n][e] : 0.f) - (odd ? rows.delta.y : rows.delta.x),
                             (keeps ? b[i][n][e] : 0.f) - (odd ? rows.r.y : rows.r.x)};
        // A masked score has no gradient, even if a product is not finite.
        const bool seen = !kMasked || seen_by.includes(i, e / 2, n * 8 + odd);
        x[i][n][e] = seen ? of.of_value(keeps) : 0.f;
        tangents[i][n][e] = seen ? of.dlogit() : 0.f;
        dp[i][n][e] = seen ? of.second() : 0.f;
      });
    }
  }
  template <class... Arguments>
  static __device__ void end_head(const Arguments&...) {}
};

}  // namespace flashattn_ext
