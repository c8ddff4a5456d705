// The arithmetic of second derivatives (second.cuh of both architectures) between the products, transposed as in the
// backward.
//
// Here m is 1 where dropout keeps the score and 0 elsewhere: the factor 1 / p_keep multiplies the finished gradients,
// and delta and r have been divided by it. With the first and second derivatives of the rule, slope and curvature (1
// and 0 in plain calls), and the tangent A of the logit:
//
//   dS = P (m dP - delta)      E = P ((m dP - delta) (A - tlse) + m B - r)
//   T  = slope dS              F = slope E + curvature dS * softmax_scale * (<tq, k> + <q, tk>)
#pragma once

#include "cuda/score/scores.cuh"
#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext {

// The statistics of rows `query` and `query + 1` of the query tile, from the kernel's arrays in shared memory.
struct RowPair {
  float2 lse, delta, r, tlse;

  template <class Kernel>
  __device__ __forceinline__ RowPair(const Kernel& kernel, int query)
      : lse(pair(kernel.lse, query)),
        delta(pair(kernel.delta, query)),
        r(pair(kernel.r, query)),
        tlse(pair(kernel.tlse, query)) {}
  static __device__ __forceinline__ float2 pair(const float* values, int query) {
    return *reinterpret_cast<const float2*>(values + query);
  }
};

// One score, after the rule and dropout.
struct SecondScore {
  float weight, moved, dp, b;  // P, A - tlse, m dP - delta, m B - r

  __device__ __forceinline__ float dlogit() const { return weight * dp; }                  // dS
  __device__ __forceinline__ float second() const { return weight * fmaf(dp, moved, b); }  // E
  __device__ __forceinline__ float of_value(bool keeps) const { return keeps ? weight * moved : 0.f; }
};

// No option of a score. Rows whose lse is a mark (large_rows.cuh) have been handled.
struct PlainSecond {
  using Workspace = BackwardWorkspace;
  static constexpr bool kMasksAlways = false, kTwoWords = false;

  template <bool kMasked, class Kernel, class Scores, int kKeyTiles, class Dropping>
  __device__ void differentiate_twice(const Kernel& kernel, int, int, Scores& x, Scores& tangents, Scores& dp,
                                      const Scores& b, const SeenBy<kKeyTiles>& seen_by, Dropping& dropping) {
    const auto& score = kernel.workspace.score;
#pragma unroll
    for (int n = 0; n < Kernel::kScoreTiles; ++n) {
      if (n % 2 == 0) dropping.draw(n);
      const RowPair rows(kernel, kernel.score_query() + n * 8 + 2 * t());
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
  template <class Kernel>
  __device__ void end_head(const Kernel&, int) {}
};

}  // namespace flashattn_ext
