// The policies of the Hopper backward kernels, by the options of their rows in the table of kernels. The first policy
// of each sort is empty and compiles to nothing. The policies of scores are here, beside PlainGradients
// (packed_scores.cuh, which describes their functions).
#pragma once

#include <type_traits>

#include "cuda/score/block_mask.cuh"
#include "cuda/score/general_score.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/backward/backward_bias.cuh"
#include "cuda/sm90/shared/backward_blocks.cuh"
#include "cuda/sm90/shared/backward_policies.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/sm90/shared/backward_visibility.cuh"
#include "cuda/sm90/shared/dq_adder.cuh"
#include "cuda/sm90/shared/packed_scores.cuh"
#include "cuda/stages/bias_gradient.cuh"

namespace flashattn_ext::sm90 {

// No option, where the query heads of a group add up dk and dv (QueryHeads).
template <class Packing>
struct GroupedGradients : PlainGradients<Packing> {
  using Workspace = GroupedWorkspace;
};

// The arithmetic between the products of the backward, for calls with options of a score, ALiBi or a relative bias: the
// counterpart of PackedScores (packed_scores.cuh). The options of a call are runtime values. Each is a separate
// in-place pass over a lane's scores, behind a warp-uniform branch.
template <class T, int kQueries>
struct PackedDistanceScores {
  using Packing = PackedScores<T, kQueries, false>;
  using Core = TensorCore<T>;
  using Scores = typename Packing::Scores;
  using Packed = typename Packing::Packed;
  using Bias = DistanceBias<true, 1, kQueries / 8>;
  struct Centres {
    const float (*rows)[kQueries];  // in shared memory, kCentres times
    __device__ __forceinline__ float2 pair(Centre which, int n) const {
      return *reinterpret_cast<const float2*>(&rows[which][8 * n + 2 * lane_in_quad()]);
    }
  };
  using BiasGradient = TileBiasGradient<Bias, T, 1, kQueries / 8, RelativeGradient::kInAnyOrder, Centres>;

  // Turns products into weights and overwrites `scores`. slopes: with an option of a score, the factors for the
  // gradients of logits. has_marks: whether lse has marks of rows; subtract_words(rule) handles these before the
  // weights are computed. Other arguments as in PackedScores.
  template <class SubtractWords, class MaskOf>
  static __device__ __forceinline__ void weigh(Packed& weights, Packed& slopes, Scores& scores,
                                               const GeneralScore& score, const Bias& bias,
                                               const float (&lse)[kQueries], bool has_marks,
                                               const SubtractWords& subtract_words, bool masked, const MaskOf& mask,
                                               int row0, int key) {
    if (score.changes_products()) {
      // An option of a score alone, the usual case, has one pass: the arithmetic of one score hides the latency of
      // another one's tanh.
      if (!masked && !has_marks && bias.is_absent()) return store_and_weigh(weights, slopes, scores, score, lse);
      store(slopes, scores, score);
    }
    const float scale = bias.add(reinterpret_cast<float (&)[1][kQueries / 8][4]>(scores), score.factor);
    const ScaledLogit rule{scale};
    const auto prepare = [&] {
      subtract_words(rule);
      return mask();
    };
    Packing::weigh(weights, scores, rule, lse, masked || has_marks, prepare, row0, key);
  }

  // Turns dP into dS and sums the gradients of biases. masked_or_marked, prepare: as in PackedScores; masked_or_marked
  // also if the bias may hide a score.
  template <class Prepare>
  static __device__ __forceinline__ void differentiate(Scores& dscores, const Packed& weights, const Packed& slopes,
                                                       const GeneralScore& score, BiasGradient& bias_gradient,
                                                       const float (&delta)[kQueries], bool masked_or_marked,
                                                       const Prepare& prepare) {
    Packing::differentiate(dscores, weights, ScaledLogit{}, delta, masked_or_marked, prepare);
    bias_gradient.add_all(reinterpret_cast<const float (&)[1][kQueries / 8][4]>(dscores));
    if (score.changes_products()) multiply(dscores, slopes);
  }

 private:
  template <class Body>
  static __device__ __forceinline__ void each_pair(const Body& body) {
    unrolled<kQueries / 8, 2>([&](int n, int r) { body(n, r, n / 2, n % 2 * 2 + r); });
  }
  static __device__ __forceinline__ void store(Packed& slopes, Scores& scores, const GeneralScore& score) {
    each_pair([&](int n, int r, int step, int i) { slopes[step][i] = store_pair(&scores[n][2 * r], score); });
  }
  static __device__ __forceinline__ void store_and_weigh(Packed& weights, Packed& slopes, Scores& scores,
                                                         const GeneralScore& score, const float (&lse)[kQueries]) {
    const ScaledLogit rule{score.factor};
    each_pair([&](int n, int r, int step, int i) {
      const float2 row_lse = *reinterpret_cast<const float2*>(&lse[n * 8 + 2 * lane_in_quad()]);
      float* const pair = &scores[n][2 * r];
      slopes[step][i] = store_pair(pair, score);
      weights[step][i] = Core::pack(weight_of(rule, pair[0], row_lse.x), weight_of(rule, pair[1], row_lse.y));
    });
  }
  // Turns two products into stored scores; returns their slopes.
  static __device__ __forceinline__ uint32_t store_pair(float* pair, const GeneralScore& score) {
    const float even = store_score<T>(score, &pair[0]), odd = store_score<T>(score, &pair[1]);
    return Core::pack(even, odd);
  }
  static __device__ __forceinline__ void multiply(Scores& dscores, const Packed& slopes) {
    each_pair([&](int n, int r, int step, int i) {
      const float2 slope = Core::unpack(slopes[step][i]);
      dscores[n][2 * r] *= slope.x;
      dscores[n][2 * r + 1] *= slope.y;
    });
  }
};

// Options of a score, ALiBi or a relative bias: there are no loads for single scores. Calls with an origin never have
// this policy (options.h), so the mask is the unplaced one.
template <class T, class Packing>
struct DistanceGradients : UnbiasedGradients<Packing> {
  using Workspace = GeneralWorkspace;
  static constexpr int kQueries = Packing::kTiles * 8;
  using Arithmetic = PackedDistanceScores<T, kQueries>;
  using Bias = typename Arithmetic::Bias;
  static constexpr bool kHasCentres = true;

  typename Packing::Packed slopes;  // with an option of a score: derivatives at these scores
  BiasSums<1, false> sums;

  // In this form it takes no registers from the consumer warps.
  template <class Shared>
  static __device__ __forceinline__ void load_rows(Shared& shared, int stage, const AttnGradParams& p,
                                                   const BackwardWorkspace&, int row, int h, int batch, int rows) {
    const float* const from = static_cast<const float*>(p.centres.data) + batch * p.centres.batch_stride +
                              h * p.centres.head_stride + int64_t{row} * kCentres;
    const int known = p.centres.data ? rows : 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kQueries; i += 32) {
#pragma unroll
      for (int which = 0; which < kCentres; ++which) {
        shared.centres[stage][which][i] = i < known ? from[i * kCentres + which] : 0.f;
      }
    }
  }
  // The zero rows after the last query get biases too, so they must be masked.
  static __device__ __forceinline__ Limits unmasked(const AttnParams& p, const BackwardWork& work, int key) {
    return row_mask(p, work).rows_of_all(key, key + 64);
  }
  // Recomputed rather than kept in registers.
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ Bias begin(const Step& step, const Work& work, const Walk& now) const {
    const AttnGradParams& p = step.p;
    return {p, uniform(work.b), now.h, row_mask(p, work), now.m * kQueries, uniform(work.key0) + step.warp_key};
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void weigh(typename Packing::Packed& weights, typename Packing::Scores& scores,
                                        const Step& step, const Work& work, const Walk& now, bool masked,
                                        const Bias& bias) {
    const int row0 = now.m * kQueries;
    Arithmetic::weigh(
        weights, slopes, scores, step.workspace.score, bias, step.lse(), step.has_marks != 0,
        [&](const auto& rule) { step.subtract_words(scores, rule, work.b, now.h, row0); }, masked,
        [&] { return row_mask(step.p, work); }, row0, work.key0 + step.warp_key);
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void differentiate(typename Packing::Scores& dscores,
                                                const typename Packing::Packed& weights, const Step& step,
                                                const Work& work, const Walk& now, bool masked) {
    const auto bias = begin(step, work, now);
    const bool masked_or_marked = step.is_masked_or_marked(masked || bias.range != Reached::kNone);
    typename Arithmetic::BiasGradient gradient{step.p, bias,  step.workspace, {step.shared.centres[step.stage]},
                                               work.b, now.h, true,           sums};
    Arithmetic::differentiate(dscores, weights, slopes, step.workspace.score, gradient, step.delta(), masked_or_marked,
                              [&] { step.clear_rows(dscores); });
    if (uniform(static_cast<int>(now.ends_head()))) end_head(step, work, now.h);
  }

 private:
  static __device__ __forceinline__ UnplacedMask32 row_mask(const AttnParams& p, const BackwardWork& work) {
    return {p, uniform(work.length_q), uniform(work.length_k)};
  }
  // Adds this warp's sums over a head's scores to the gradients of biases.
  template <class Step>
  __device__ __forceinline__ void end_head(const Step& step, const BackwardWork& work, int h) {
    const AttnGradParams& p = step.p;
    const int64_t tile = step.workspace.first_key_tile(p, work.b, key_sequence(p, work.b)) + work.n;
    flashattn_ext::end_head(sums, p, step.workspace, work.b, h, tile, step.warp_key / 16,
                            work.key0 + step.warp_key + quad(), work.length_k);
  }
};

// A 16-bit bias alone, whose tiles TMA brings (backward_bias.cuh).
template <class T, class Packing>
struct BiasTileGradients : UnbiasedGradients<Packing> {
  using Workspace = GeneralWorkspace;
  using Maps = BiasedBackwardMaps;
  static constexpr int kCopies = 2, kAdders = 2;
  static constexpr bool kHasBias = true, kBatchesTogether = true;

  bool hides;  // whether the bias hides some of these scores with -inf

  static void set_more_maps(const AttnGradParams& p, Maps* maps, int queries, int) {
    maps->bias = bias_map(p, p.bias, queries);
    if (p.dbias.data) maps->dbias = bias_map(p, p.dbias, queries);
  }
  static __device__ __forceinline__ void prefetch_map(const Maps& maps) { ptx::prefetch_tensor_map(&maps.bias); }
  template <class Shared>
  static __device__ __forceinline__ void load_queries(Shared& shared, int stage, const Maps& maps, int row, int h,
                                                      int batch, int key) {
    load_panels(shared.bias[stage], shared.q_full[stage], maps.bias, row, h, batch, key);
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void weigh(typename Packing::Packed& weights, typename Packing::Scores& scores,
                                        const Step& step, const Work& work, const Walk& now, bool masked, Nothing) {
    hides = add_bias_panel(scores, step.shared.bias[step.stage][step.group], step.warp_key % 64,
                           step.workspace.score.softmax_scale);
    const int row0 = now.m * Packing::kTiles * 8;
    const ScaledLogit rule{kLog2E<float>};
    const auto prepare = [&] {
      step.subtract_words(scores, rule, work.b, now.h, row0);
      return visible(step.p, work, now.h);
    };
    Packing::weigh(weights, scores, rule, step.lse(), step.is_masked_or_marked(masked), prepare, row0,
                   work.key0 + step.warp_key);
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void differentiate(typename Packing::Scores& dscores,
                                                const typename Packing::Packed& weights, const Step& step, const Work&,
                                                const Walk&, bool masked) {
    Packing::differentiate(dscores, weights, ScaledLogit{}, step.delta(), step.is_masked_or_marked(masked || hides),
                           [&] { step.clear_rows(dscores); });
  }
  template <class Step>
  __device__ __forceinline__ void store_bias_gradient(const Step& step, const typename Packing::Scores& dscores,
                                                      const typename Packing::Packed& packed) const {
    if (!step.p.dbias.data) return;
    pass_bias_gradient<T>(step.shared.dq[step.group], dscores, packed, step.group,
                          step.p.dbias.dtype == DType::kFloat32);
  }
};

// Transposes 32 x 32 bits: lane i has row i, bit j of which is column j, and gets column i.
__device__ __forceinline__ uint32_t transposed_bits(uint32_t x) {
  uint32_t low = 0xFFFFu;  // the bits of the lower half of each square
#pragma unroll
  for (int size = 16; size > 0; size /= 2, low ^= low << size) {
    const uint32_t other = __shfl_xor_sync(~0u, x, size);
    const bool upper = threadIdx.x & size;
    x = upper ? (x & ~low) | (other >> size & low) : (x & low) | (other << size & ~low);
  }
  return x;
}

// A BlockMask: ListedStep and Shared::has_marks (backward_blocks.cuh) say what a step hides.
template <class Packing>
struct ListedGradients : UnbiasedGradients<Packing> {
  static constexpr int kQueries = Packing::kTiles * 8;
  using Seen = SeenQueries<1, Packing::kTiles>;
  Seen seen;  // what the lane sees of a step with marks

  template <class Step, class Walk>
  __device__ __forceinline__ Nothing begin(const Step& step, const BackwardWork& work, const Walk&) {
    if (step.has_marks != 0) find_seen(step.p, listed(step), work, step.warp_key);
    return {};
  }
  template <class Step, class Walk>
  __device__ __forceinline__ void weigh(typename Packing::Packed& weights, typename Packing::Scores& scores,
                                        const Step& step, const BackwardWork& work, const Walk&, bool, Nothing) {
    Packing::weigh_seen(weights, scores, step.workspace.score, step.lse(), step.has_marks != 0, [&]() -> const Seen& {
      if (step.has_marks & kMarkedRows) {
        const ListedStep& now = listed(step);
        step.subtract_words(scores, step.workspace.score, work.b, now.h, now.m * kQueries);
      }
      return seen;
    });
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void differentiate(typename Packing::Scores& dscores,
                                                const typename Packing::Packed& weights, const Step& step, const Work&,
                                                const Walk&, bool) {
    Packing::differentiate(dscores, weights, step.workspace.score, step.delta(), step.has_marks != 0, [&] {
      if (step.has_marks & kMarkedRows) step.clear_rows(dscores);
    });
  }

 private:
  template <class Step>
  static __device__ __forceinline__ const ListedStep& listed(const Step& step) {
    return step.shared.listed[0].steps[step.stage];
  }
  __device__ __forceinline__ void find_seen(const AttnParams& p, const ListedStep& now, const BackwardWork& work,
                                            int warp_key) {
    const int m = uniform(now.m), bits = uniform(now.bits), row = m * kQueries + 2 * lane_in_quad();
    const Mask32 mask = work.mask(p);
    seen = Seen([&](int, int r) {
      const Limits rows = rows_that_see(mask, work.key0 + warp_key + quad() + 8 * r);
      return Limits{rows.begin - row, rows.end - row};
    });
    if (bits != kWholeBlock) keep_seen(PartialBlock(p, bits), place_in_block<kQueries>(m), warp_key);
  }
  // Keeps the queries that see the lane's keys g and g + 8 by the bits of a block, as SeenQueries::keep does. Each lane
  // loads those of one query in 32, for the 16 keys of the warp. row, key: the first of both, in the block.
  __device__ __forceinline__ void keep_seen(const PartialBlock& block, int row, int key) {
    static_assert(Seen::kWords % 2 == 0);
    uint32_t bits[Seen::kWords];
#pragma unroll
    for (int i = 0; i < Seen::kWords; ++i) bits[i] = block.of_row<16>(row + 32 * i + lane(), key).words[0];
#pragma unroll
    for (int i = 0; i < Seen::kWords; i += 2) {
      const uint32_t columns = transposed_bits((bits[i] & 0xFFFF) | bits[i + 1] << 16);
      unrolled<2, 2>([&](int half, int r) {
        seen.queries[0][r][i + half] &= __shfl_sync(~0u, columns, 16 * half + 8 * r + quad()) >> (2 * lane_in_quad());
      });
    }
  }
};

struct PlainBackwardPolicies {
  using Visibility = ArithmeticQueries;
  using Heads = WholeGroups;
  template <class T, class Packing>
  using Gradients = PlainGradients<Packing>;
  using Dropping = NoBackwardDropout;
};

template <Options kOptions>
struct BackwardPolicies;
template <>
struct BackwardPolicies<kPlain> : PlainBackwardPolicies {};
template <>
struct BackwardPolicies<kGroups> : PlainBackwardPolicies {
  using Heads = QueryHeads;
  template <class T, class Packing>
  using Gradients = GroupedGradients<Packing>;
};
template <>
struct BackwardPolicies<kDropout> : PlainBackwardPolicies {
  using Dropping = CounterBackwardDropout;
};
template <>
struct BackwardPolicies<kIntervals> : PlainBackwardPolicies {
  using Visibility = IntervalQueries;
};
template <>
struct BackwardPolicies<kBlocks> : PlainBackwardPolicies {
  using Visibility = BlockQueries;
  template <class T, class Packing>
  using Gradients = ListedGradients<Packing>;
};
template <>
struct BackwardPolicies<kScores> : PlainBackwardPolicies {
  template <class T, class Packing>
  using Gradients = DistanceGradients<T, Packing>;
};
template <>
struct BackwardPolicies<kBias> : PlainBackwardPolicies {
  template <class T, class Packing>
  using Gradients = BiasTileGradients<T, Packing>;
};

}  // namespace flashattn_ext::sm90
