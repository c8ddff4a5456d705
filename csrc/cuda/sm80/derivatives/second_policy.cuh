// Policies of second derivatives (second.cuh) for scores: from the products of a step to the operands of the gradients
// (docs/derivatives.md, where F is called G). They have the members of the backward's policies (gradient_policy.cuh),
// with one function for the scores:
//   differentiate_twice<kMasked>(step, rows, ...)
//                            products, transposed: of q and k, of their tangents (<tq, k> + <q, tk>), dP = <dout, v>
//                            and B = <dout, tv>. The first three become P m (A - tlse), T and F.
#pragma once

#include "cuda/sm80/shared/general_gradients.cuh"
#include "cuda/stages/second.cuh"

namespace flashattn_ext::sm80 {

// Options of a score and biases, which run-time branches select.
template <class T, int kKeyTiles, int kQueryTiles>
struct GeneralSecond {
  using Workspace = GeneralWorkspace;
  static constexpr bool kMasksAlways = true, kTwoWords = true;
  // Second derivatives have no centres (rules/bias.h).
  struct NoCentres {
    __device__ __forceinline__ float2 pair(Centre, int) const { return {0, 0}; }
  };
  using Bias = TileBias<T, true, kKeyTiles, kQueryTiles>;
  using Gradient = TileBiasGradient<Bias, T, kKeyTiles, kQueryTiles, RelativeGradient::kInAnyOrderOrExact, NoCentres>;

  BiasSums<kKeyTiles, true> sums;

  template <bool kMasked, class Step, class Scores, class SeenBy, class Dropping>
  __device__ void differentiate_twice(const Step& step, const SecondRows& statistics, Scores& x, Scores& tangents,
                                      Scores& dp, const Scores& b, const SeenBy& seen_by, Dropping& dropping) {
    constexpr int kTogether = 2;  // query tiles
    const GeneralScore& score = step.workspace.score;
    const bool is_plain = !score.changes_products() && !step.p.has_bias();
    const int query = step.query;
    const Bias bias(step.p, step.b, step.h, step.mask(), step.row0 + query, step.key);
    const Bias moving(step.p.tangents, step.b, step.h, step.mask(), step.row0 + query, step.key);
    Gradient gradient{step.p, bias, step.workspace, {}, step.b, step.h, step.is_first_split, sums};
#pragma unroll
    for (int first = 0; first < kQueryTiles; first += kTogether) {
      float logits[kKeyTiles][kTogether][4], of_biases[kKeyTiles][kTogether][4] = {}, e_of[kKeyTiles][kTogether][4];
      // x becomes the score that the rule stores, `logits` their logits in units of log2.
      each_element<kKeyTiles, kTogether>([&](int i, int n, int e) {
        float& own = x[i][first + n][e];
        if (score.changes_products()) store_score<T>(score, &own);
        logits[i][n][e] = own * score.factor;
      });
      bias.add_columns(logits, first);
      moving.add_columns(of_biases, first);
      dropping.draw(first);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int row = query + (first + n) * 8 + 2 * lane_in_quad();
        const RowPair rows(statistics, row);
        const float2 log2_sum = RowPair::pair(statistics.log2_sum, row);
        each_element<kKeyTiles, 1>([&](int i, int, int e) {
          const bool odd = e % 2, keeps = dropping.keeps(i, n, e);
          float &own = x[i][first + n][e], &tangent = tangents[i][first + n][e], &product = dp[i][first + n][e];
          const float top = odd ? rows.lse.y : rows.lse.x;
          // The forward of a plain call takes the exact product of small rows.
          const bool exact = is_plain && !rounds_products(top);
          const float below = exact ? fmaf(own, score.factor, -top) : logits[i][n][e] - top;
          const float weight = ptx::ex2(below - (odd ? log2_sum.y : log2_sum.x));
          const float slope = score.changes_products() ? slope_at(score, own) : 1.f;
          const float scaled_tangent = tangent * score.softmax_scale;
          const SecondScore of{
              weight, fmaf(of_biases[i][n][e], kLn2<float>, scaled_tangent * slope) - (odd ? rows.tlse.y : rows.tlse.x),
              (keeps ? product : 0.f) - (odd ? rows.delta.y : rows.delta.x),
              (keeps ? b[i][first + n][e] : 0.f) - (odd ? rows.r.y : rows.r.x)};
          // A weight of 0 has no gradient, even if a product is not finite: the bias may mask the score.
          const bool counts = seen_by.includes(i, e / 2, (first + n) * 8 + odd) && weight != 0;
          const float dlogit = counts ? of.dlogit() * slope : 0.f, second = counts ? of.second() : 0.f;
          const float curved = score.changes_products() ? score.curvature(own) * dlogit * scaled_tangent : 0.f;
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
  __device__ void end_head(const AttnGradParams& p, const Workspace& workspace, int b, int h, int n, int warp, int key,
                           int length_k) {
    store_bias_sums(sums, p, workspace, b, h, n, warp, key, length_k);
  }
};

}  // namespace flashattn_ext::sm80
