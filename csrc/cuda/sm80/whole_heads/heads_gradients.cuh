// How the backward of whole heads makes weights and dS of a step: what a policy of gradients has. An object is of a
// warp and a tile of queries.
//   Rule                 the kernel's argument, of(p, plan): the rule of scores and the factors of sums
//   statistics(words)    of a row: the number that is subtracted from its logits, and what is subtracted after it
//   sees_some(row, rows) whether some of these rows of the sequence see a key of the warp, as far as a Mask says
//   begin(kernel, tile, query)
//                        before the products of the queries from `query` on, within the tile: what is read ahead
//   weigh_and_differentiate(kernel, tile, now, query, begun, weights, dscores)
//                        S^T of these queries becomes P^T with dropout applied, and dP^T becomes dS^T
//   finish(kernel, tile)
//                        after the last step: stores sums over the scores, for the gradients of biases, or adds them to
//                        those of the tiles before
#pragma once

#include <limits>

#include "cuda/score/large_rows.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/general_gradients.cuh"
#include "cuda/sm80/whole_heads/heads_masks.cuh"
#include "cuda/sm80/whole_heads/plan.h"

namespace flashattn_ext::sm80 {

// Delta of every row, for the gradients of sinks and of biases, which launches after the kernel's compute.
inline BackwardWorkspace delta_workspace(const AttnGradParams& p) { return {p, kRowStep, 0, 1}; }
// The workspace with the sums of each warp over the scores of a query head. A sequence is one tile of keys, however
// many it has.
inline GeneralWorkspace heads_workspace(const AttnGradParams& p, const HeadsBackwardPlan& plan) {
  return {p, delta_workspace(p), std::numeric_limits<int>::max(), plan.warps()};
}

// The base of policies without a Mask that read nothing ahead and sum nothing up.
struct StatelessGradients {
  template <class... Arguments>
  __device__ __forceinline__ StatelessGradients(const Arguments&...) {}
  template <class... Arguments>
  static __device__ __forceinline__ Nothing begin(const Arguments&...) {
    return {};
  }
  static __device__ __forceinline__ constexpr bool sees_some(int, int) { return true; }
  template <class... Arguments>
  static __device__ __forceinline__ void finish(const Arguments&...) {}
};

// Calls without an option of a score.
struct PlainHeadGradients : StatelessGradients {
  using StatelessGradients::StatelessGradients;
  struct Rule : ScoreRule<float, PlainProducts<false>> {
    static Rule of(const AttnGradParams& p, const HeadsBackwardPlan&) { return {ScoreRule::of(p)}; }
    __device__ __forceinline__ float gradient_scale() const { return softmax_scale; }
    static __device__ __forceinline__ float keep_scale() { return 1; }
  };
  // The number of a row is one word or a mark (large_rows.cuh).
  static __device__ __forceinline__ float2 statistics(const LseWords<float>& words) {
    const bool is_marked = is_large(words.top) && has_one_weight(words);
    return {is_marked ? mark_of_one_weight() : one_word(words.sum()), 0.f};
  }

  template <class Kernel, class Tile, class Stage, int N>
  static __device__ __forceinline__ void weigh_and_differentiate(const Kernel& kernel, const Tile& tile,
                                                                 const Stage& now, int query, Nothing,
                                                                 float (&weights)[1][N][4], float (&dscores)[1][N][4]) {
    const int row = tile.row + query, key = kernel.key();
    const float *const lse = now.lse + query, *const delta = now.delta + query + 2 * lane_in_quad();
    if (has_mark<8 * N>(lse)) {
      subtract_words(weights, kernel.rule, lse, [&](int i) { return kernel.words_of(tile, query + i); });
      clear_rows_of_one_weight(dscores, lse);
    }
    const auto mask = kernel.mask();
    Limits all = mask.rows_of_all(key, key + kRowStep);
    if (all.end == mask.seqlen_q) all.end += 8 * N;  // after the last query come zeros, which need no mask
    NoDropout::Columns<1> dropping(kernel.p, kernel.b, tile.h, key, row);
    if (row >= all.begin && row + 8 * N <= all.end) {
      flashattn_ext::weigh_and_differentiate<false, false>(weights, dscores, kernel.rule, lse + 2 * lane_in_quad(), lse,
                                                           delta, SeenBy<1>(), dropping);
    } else {
      flashattn_ext::weigh_and_differentiate<true, false>(
          weights, dscores, kernel.rule, lse + 2 * lane_in_quad(), lse, delta,
          SeenBy<1>(mask, row + 2 * lane_in_quad(), key + quad()), dropping);
    }
  }
};

// Every option but a BlockMask, found out at run time.
struct GeneralHeadGradients {
  struct Rule : GeneralWorkspace {
    static Rule of(const AttnGradParams& p, const HeadsBackwardPlan& plan) { return {heads_workspace(p, plan)}; }
    __device__ __forceinline__ float gradient_scale() const { return BackwardWorkspace::gradient_scale; }
    __device__ __forceinline__ float keep_scale() const { return BackwardWorkspace::keep_scale; }
  };
  static __device__ __forceinline__ float2 statistics(const LseWords<float>& words) {
    return {words.top, second_word(words)};
  }

  // The centres of a lane's rows (rules/bias.h), which are read where a gradient needs them.
  struct CentresInMemory {
    const AttnGradParams& p;
    int b, h, start, length;  // the sequence's rows
    int row;                  // of the lane's first score

    __device__ __forceinline__ float2 pair(Centre which, int n) const {
      return {centre(which, row + 8 * n), centre(which, row + 8 * n + 1)};
    }
    __device__ __forceinline__ float centre(Centre which, int at) const {
      return p.centres.data && at < length ? row_pointer<const float>(p.centres, b, h, start + at)[which] : 0.f;
    }
  };

  SeenQueriesOfKeys seen;
  BiasSums<1, true> sums;

  template <class Kernel, class Tile>
  __device__ __forceinline__ GeneralHeadGradients(const Kernel& kernel, const Tile& tile)
      : seen(IntervalMask(kernel.mask(),
                          IntervalPairs(kernel.p, kernel.b, kernel.hk, kernel.sequence.key_start).head(tile.h)),
             kernel.key()) {}
  __device__ __forceinline__ bool sees_some(int row, int rows) const { return seen.sees_some(row, rows); }

  template <class Kernel, class Tile>
  static __device__ __forceinline__ auto begin(const Kernel& kernel, const Tile& tile, int query) {
    using Bias = TileBiasAhead<typename Kernel::Element, true, 1, Kernel::kStep / 8>;
    Bias bias(kernel.p, kernel.b, tile.h, kernel.mask(), tile.row + query, kernel.key());
    bias.read();
    return bias;
  }
  template <class Kernel, class Tile, class Stage, class Bias, int N>
  __device__ __forceinline__ void weigh_and_differentiate(const Kernel& kernel, const Tile& tile, const Stage& now,
                                                          int query, const Bias& bias, float (&weights)[1][N][4],
                                                          float (&dscores)[1][N][4]) {
    using Gradient =
        TileBiasGradient<Bias, typename Bias::Element, 1, N, RelativeGradient::kInAnyOrder, CentresInMemory>;
    const int row = tile.row + query, first = query + 2 * lane_in_quad();
    if (has_mark<8 * N>(now.log2_sum + query)) clear_rows_of_one_weight(dscores, now.log2_sum + query);
    const CentresInMemory centres{kernel.p,          kernel.b,        tile.h, kernel.sequence.query_start,
                                  kernel.length_q(), tile.row + first};
    Gradient gradient{kernel.p, bias, kernel.rule, centres, kernel.b, tile.h, true, sums};
    OptionalDropout::Columns<1> dropping(kernel.p, kernel.b, tile.h, kernel.key(), row);
    flashattn_ext::weigh_and_differentiate<typename Bias::Element, true>(
        weights, dscores, kernel.rule.score, bias, gradient, now.lse + first, now.log2_sum + first, now.delta + first,
        seen.from(row + 2 * lane_in_quad()), dropping);
  }
  template <class Kernel, class Tile>
  __device__ __forceinline__ void finish(const Kernel& kernel, const Tile& tile) {
    const bool adds = tile.row > 0 || kernel.chunk.first > 0;
    end_head(sums, kernel.p, kernel.rule, kernel.b, tile.h, kernel.b, kernel.warp, kernel.key() + quad(),
             kernel.length_k(), adds);
  }
};

}  // namespace flashattn_ext::sm80
