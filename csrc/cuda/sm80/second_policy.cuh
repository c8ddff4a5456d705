// Policies of second derivatives (second.cuh) for scores: from the products of a step to the operands of the gradients
// (docs/derivatives.md, where F is called G). They have the members of the backward's policies (gradient_policy.cuh),
// with one function for the scores:
//   differentiate_twice(kernel, ...)
//                            products, transposed: of q and k, of their tangents (<tq, k> + <q, tk>), dP = <dout, v>
//                            and B = <dout, tv>. The first three become P m (A - tlse), T and F.
//
// Here m is 1 where dropout keeps the score and 0 elsewhere: the factor 1 / p_keep multiplies the finished gradients,
// and delta and r have been divided by it. With the first and second derivatives of the rule, slope and curvature (1
// and 0 in plain calls), and the tangent A of the logit:
//
//   dS = P (m dP - delta)      E = P ((m dP - delta) (A - tlse) + m B - r)
//   T  = slope dS              F = slope E + curvature dS * softmax_scale * (<tq, k> + <q, tk>)
#pragma once

#include "../common/general_scores.cuh"
#include "bias_sums.cuh"

namespace flashattn_ext::sm80 {

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

// No option of a score.
struct PlainSecond {
  using Workspace = BackwardWorkspace;
  static constexpr bool kMasksAlways = false;

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

// Softcap and biases, which run-time branches select.
template <class T, int kKeyTiles, int kQueryTiles>
struct GeneralSecond {
  using Workspace = GeneralWorkspace;
  static constexpr bool kMasksAlways = true;
  // Second derivatives have no centres (../../bias.h).
  struct NoCentres {
    __device__ __forceinline__ float2 pair(Centre, int) const { return {0, 0}; }
  };
  using Bias = TileBias<T, true, kKeyTiles, kQueryTiles>;
  using Gradient = TileBiasGradient<Bias, T, kKeyTiles, kQueryTiles, RelativeGradient::kInAnyOrderOrExact, NoCentres>;

  BiasSums<kKeyTiles, true> sums;

  template <bool kMasked, class Kernel, class Scores, class Dropping>
  __device__ void differentiate_twice(const Kernel& kernel, int h, int row0, Scores& x, Scores& tangents, Scores& dp,
                                      const Scores& b, const SeenBy<kKeyTiles>& seen_by, Dropping& dropping) {
    constexpr int kTogether = 2;  // query tiles
    const GeneralScore& score = kernel.workspace.score;
    const int query = kernel.score_query(), key = kernel.first_score_key();
    const Bias bias(kernel.p, kernel.b, h, kernel.mask(), row0 + query, key);
    const Bias moving(kernel.p.tangents, kernel.b, h, kernel.mask(), row0 + query, key);
    Gradient gradient{kernel.p, bias, kernel.workspace, {}, kernel.b, h, kernel.split() == 0, sums};
#pragma unroll
    for (int first = 0; first < kQueryTiles; first += kTogether) {
      float logits[kKeyTiles][kTogether][4], of_biases[kKeyTiles][kTogether][4] = {}, e_of[kKeyTiles][kTogether][4];
      // x becomes the score that the rule stores, `logits` their logits in units of log2.
      each_element<kKeyTiles, kTogether>([&](int i, int n, int e) {
        float& own = x[i][first + n][e];
        if (score.is_capped) score.template cap<T>(&own);
        logits[i][n][e] = own * score.factor;
      });
      bias.add_columns(logits, first);
      moving.add_columns(of_biases, first);
      dropping.draw(first);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const RowPair rows(kernel, query + (first + n) * 8 + 2 * t());
        each_element<kKeyTiles, 1>([&](int i, int, int e) {
          const bool odd = e % 2, keeps = dropping.keeps(i, n, e);
          float &own = x[i][first + n][e], &tangent = tangents[i][first + n][e], &product = dp[i][first + n][e];
          const float weight = ptx::ex2(logits[i][n][e] - (odd ? rows.lse.y : rows.lse.x));
          const float slope = score.is_capped ? fmaxf(1 - own * own, 0.f) : 1.f;
          const float moved = tangent * score.softmax_scale;
          const SecondScore of{weight,
                               fmaf(of_biases[i][n][e], kLn2<float>, moved * slope) - (odd ? rows.tlse.y : rows.tlse.x),
                               (keeps ? product : 0.f) - (odd ? rows.delta.y : rows.delta.x),
                               (keeps ? b[i][first + n][e] : 0.f) - (odd ? rows.r.y : rows.r.x)};
          // A weight of 0 has no gradient, even if a product is not finite: the bias may mask the score.
          const bool counts = seen_by.includes(i, e / 2, (first + n) * 8 + odd) && weight != 0;
          const float dlogit = counts ? of.dlogit() * slope : 0.f, second = counts ? of.second() : 0.f;
          const float curved = score.is_capped ? -2 * kLog2E<float> * score.inverse * own * dlogit * moved : 0.f;
          e_of[i][n][e] = second;
          tangent = dlogit;
          product = counts ? fmaf(second, slope, curved) : 0.f;
          own = counts ? of.of_value(keeps) : 0.f;
        });
        gradient.add([&](int i, int e) { return e_of[i][n][e]; }, first + n);
      }
    }
    gradient.finish();
  }
  template <class Kernel>
  __device__ void end_head(const Kernel& kernel, int h) {
    hand_over(kernel, sums, h);
  }
};

}  // namespace flashattn_ext::sm80
