// How the backward of whole heads makes weights and dS of a step: what a policy of gradients has.
//   Rule                 the kernel's argument, of(p, keys): the rule of scores and the factors of sums
//   statistics(words)    of a row: the number that is subtracted from its logits, and what is subtracted after it
//   begin(kernel, tile, query)
//                        before the products of the queries from `query` on, within the tile: what is read ahead
//   weigh_and_differentiate(kernel, tile, now, query, begun, weights, dscores)
//                        S^T of these queries becomes P^T with dropout applied, and dP^T becomes dS^T
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/general_gradients.cuh"
#include "cuda/sm80/whole_heads/plan.h"

namespace flashattn_ext::sm80 {

// The base of policies that read nothing ahead.
struct NothingAhead {
  template <class... Arguments>
  static __device__ __forceinline__ Nothing begin(const Arguments&...) {
    return {};
  }
};

// Calls without an option of a score.
struct PlainHeadGradients : NothingAhead {
  struct Rule : ScoreRule<float, PlainProducts<false>> {
    static Rule of(const AttnGradParams& p, int) { return {ScoreRule::of(p)}; }
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

// Options of a score, biases and dropout, found out at run time, with the gradient of a bias of any shape.
struct GeneralHeadGradients {
  struct Rule : GeneralWorkspace {  // without buffers
    static Rule of(const AttnGradParams& p, int keys) {
      return {GeneralWorkspace(p, BackwardWorkspace(p, kRowStep, kRowStep, 1), keys, 1)};
    }
    __device__ __forceinline__ float gradient_scale() const { return BackwardWorkspace::gradient_scale; }
    __device__ __forceinline__ float keep_scale() const { return BackwardWorkspace::keep_scale; }
  };
  static __device__ __forceinline__ float2 statistics(const LseWords<float>& words) {
    return {words.top, second_word(words)};
  }

  // Slopes and a relative bias have no gradients here.
  struct NoCentres {
    static __device__ __forceinline__ float2 pair(Centre, int) { return {}; }
  };

  template <class Kernel, class Tile>
  static __device__ __forceinline__ auto begin(const Kernel& kernel, const Tile& tile, int query) {
    using Bias = TileBiasAhead<typename Kernel::Element, true, 1, Kernel::kStep / 8>;
    Bias bias(kernel.p, kernel.b, tile.h, kernel.mask(), tile.row + query, kernel.key());
    bias.read();
    return bias;
  }
  template <class Kernel, class Tile, class Stage, class Bias, int N>
  static __device__ __forceinline__ void weigh_and_differentiate(const Kernel& kernel, const Tile& tile,
                                                                 const Stage& now, int query, const Bias& bias,
                                                                 float (&weights)[1][N][4], float (&dscores)[1][N][4]) {
    using Gradient = TileBiasGradient<Bias, typename Bias::Element, 1, N, RelativeGradient::kInAnyOrder, NoCentres>;
    const int row = tile.row + query, key = kernel.key(), first = query + 2 * lane_in_quad();
    if (has_mark<8 * N>(now.log2_sum + query)) clear_rows_of_one_weight(dscores, now.log2_sum + query);
    BiasSums<1, true> sums;
    Gradient gradient{kernel.p, bias, kernel.rule, NoCentres(), kernel.b, tile.h, true, sums};
    OptionalDropout::Columns<1> dropping(kernel.p, kernel.b, tile.h, key, row);
    flashattn_ext::weigh_and_differentiate<typename Bias::Element, true>(
        weights, dscores, kernel.rule.score, bias, gradient, now.lse + first, now.log2_sum + first, now.delta + first,
        SeenBy<1>(kernel.mask(), row + 2 * lane_in_quad(), key + quad()), dropping);
  }
};

}  // namespace flashattn_ext::sm80
