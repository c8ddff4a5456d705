// The arithmetic between the products of the Hopper backwards, whose scores are transposed (cuda/score/scores.cuh).
#pragma once

#include "cuda/score/scores.cuh"
#include "cuda/sm90/shared/backward_work.cuh"

namespace flashattn_ext {

// Weights and dS of one 16-key tile, with weights packed into 16 bits: packed, they are operands of the product for dv
// and take half the registers. `weigh` and `differentiate` are separate, because products run in between; stored scores
// are not kept from one to the other.
template <class T, int kQueries, bool kDropout>
struct PackedScores {
  using Core = TensorCore<T>;
  static constexpr int kTiles = kQueries / 8, kSteps = kQueries / 16;
  using Scores = float[kTiles][4];
  using Packed = uint32_t[kSteps][4];  // the sign marks weights that dropout drops

  // Queries that see all of `keys` keys. After the last query of a dense call come zeros, which need no mask.
  static __device__ __forceinline__ Limits unmasked_queries(const AttnParams& p, const Mask32& mask, int key0,
                                                            int keys) {
    Limits queries = mask.rows_of_all(key0, key0 + keys);
    if (queries.end == mask.seqlen_q && !p.is_varlen()) queries.end += kQueries;
    return queries;
  }
  static __device__ __forceinline__ bool is_masked(const Limits& unmasked, int row0) {
    return row0 < unmasked.begin || row0 + kQueries > unmasked.end;
  }

  // Products become weights, without dropout. lse: of all queries. row0: the first query; key: the first of the tile.
  // masked_or_marked: whether the scores are masked, or rows have marks (large_rows.cuh). Then it calls prepare(),
  // which may change the products, and returns the mask.
  template <class Score, class Prepare>
  static __device__ __forceinline__ void weigh(Packed& weights, const Scores& products, const Score& score,
                                               const float (&lse)[kQueries], bool masked_or_marked,
                                               const Prepare& prepare, int row0, int key) {
    weigh_seen(weights, products, score, lse, masked_or_marked,
               [&] { return SeenBy<1>(prepare(), row0 + 2 * lane_in_quad(), key + quad()); });
  }
  // weigh with see() instead of prepare(): it may change the products, and returns which queries see the lane's keys:
  // SeenBy, or SeenQueries (block_mask.cuh).
  template <class Score, class See>
  static __device__ __forceinline__ void weigh_seen(Packed& weights, const Scores& products, const Score& score,
                                                    const float (&lse)[kQueries], bool masked_or_marked,
                                                    const See& see) {
    if (!masked_or_marked) return weigh_part<false>(weights, products, score, lse, SeenBy<1>{});
    weigh_part<true>(weights, products, score, lse, see());
  }

  // The dropout mask of a step for the four warps of a warpgroup, which draw it together (Dropout::transposed_warps),
  // and what one of them draws: every fourth step, from its number on.
  using Kept = uint32_t[kSteps][32];
  using Drawn = uint32_t[(kSteps + 3) / 4];

  // key: the first of the warpgroup's 64. row0: the first of the queries.
  static __device__ __forceinline__ void draw(Drawn& drawn, const Dropout& dropout, const Origin& origin, int h,
                                              int key, int row0) {
    static_assert(kSteps % 4 == 0);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % 4);
#pragma unroll
    for (int i = 0; i < kSteps / 4; ++i) {
      drawn[i] = dropout.transposed_warps(origin, h, key, row0 + (4 * i + warp) * 16);
      asm volatile("" : "+r"(drawn[i]));  // drawn here, not where it is used
    }
  }
  static __device__ __forceinline__ void publish(Kept& kept, const Drawn& drawn) {
#pragma unroll
    for (int i = 0; i < kSteps / 4; ++i) kept[4 * i + threadIdx.x / 32 % 4][threadIdx.x % 32] = drawn[i];
  }
  // Sets the sign of dropped weights. warp: of the warpgroup's four.
  static __device__ __forceinline__ void drop(Packed& weights, const Kept& kept, int warp) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t even = kept[step][threadIdx.x % 32] << warp, odd = even << 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // register i: queries 8 * (i / 2), keys 8 * (i % 2)
        const int byte = i / 2 + i % 2 * 2;
        weights[step][i] |= ~ptx::permute_bytes(even, odd, 0x4000 + 0x1010 * byte) & 0x80008000u;
      }
    }
  }
  // The weights that dropout leaves.
  static __device__ __forceinline__ void keep(Packed& kept, const Packed& weights) {
    unrolled<kSteps, 4>([&](int step, int i) { kept[step][i] = Core::not_negative(weights[step][i]); });
  }

  // dP becomes dS. delta: of all queries. masked_or_marked: as in weigh; then it calls prepare(), which may change dP.
  template <class Score, class Prepare>
  static __device__ __forceinline__ void differentiate(Scores& dscores, const Packed& weights, const Score& score,
                                                       const float (&delta)[kQueries], bool masked_or_marked,
                                                       const Prepare& prepare) {
    static_assert(Score::kConstantSlope, "stored scores have to be kept for the slope");
    if (!masked_or_marked) return differentiate_part<false>(dscores, weights, score, delta);
    prepare();
    differentiate_part<true>(dscores, weights, score, delta);
  }

 private:
  template <bool kMasked, class Score, class Seen>
  static __device__ __forceinline__ void weigh_part(Packed& weights, const Scores& products, const Score& score,
                                                    const float (&lse)[kQueries], const Seen& seen_by) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 row_lse = *reinterpret_cast<const float2*>(&lse[n * 8 + 2 * lane_in_quad()]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          x[odd] = weight_of(score, score.stored(products[n][2 * r + odd]), odd ? row_lse.y : row_lse.x);
          if (kMasked && !seen_by.includes(0, r, n * 8 + odd)) x[odd] = 0;
        }
        weights[n / 2][n % 2 * 2 + r] = Core::pack(x[0], x[1]);
      }
    }
  }
  template <bool kMasked, class Score>
  static __device__ __forceinline__ void differentiate_part(Scores& dscores, const Packed& weights, const Score& score,
                                                            const float (&delta)[kQueries]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 row_delta = *reinterpret_cast<const float2*>(&delta[n * 8 + 2 * lane_in_quad()]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = Core::unpack(weights[n / 2][n % 2 * 2 + r]);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float weight = odd ? pair.y : pair.x;
          float& x = dscores[n][2 * r + odd];
          const float row = odd ? row_delta.y : row_delta.x;
          if constexpr (kDropout) {
            // gradient_of without a comparison for each score, which takes twice as long as a sum.
            x = score.times_slope(fmaf(fmaxf(weight, 0.f), x, -fabsf(weight) * row), 0.f);
          } else {
            x = gradient_of(score, 0.f, weight, x, row);
          }
          if (kMasked && weight == 0) x = 0;  // even if dP is not finite
        }
      }
    }
  }
};

}  // namespace flashattn_ext

namespace flashattn_ext::sm90 {

// Policies of the Hopper backward (backward.cuh) for scores: how products become weights and dS, and what is summed up
// for the gradients of biases. A policy is a member of the consumer's object, and may hold registers there; all
// lanes of a warp call its functions, and its branches are warp-uniform. T: the element type; kQueries: of a step;
// step: a BackwardStep.
//   Workspace, Maps          of the call
//   kCopies                  by TMA, that arrive at q_full of a stage
//   kHasBias, kHasCentres    whether Shared has bias tiles, or the centres of rows, for each stage of queries
//   kBatchesTogether         whether the batch entries of a head are adjacent, because they may read the same bias
//   kAdders                  the warps that add dq to the workspace
//   set_more_maps(...)       the host, of what load_keys and load_queries copy
//   prefetch_map(maps)       one thread
//   load_keys(...), load_queries(...), load_rows(...)
//                            what a stage of keys or queries has beside them: one lane of the producer warp starts the
//                            copies; all of its lanes load the numbers of rows
//   unmasked(p, work, key)   queries that see all of the 64 keys from `key` on, by causal and window
//   begin(step, work, now)   while the product of a step runs; its result goes to `weigh`
//   weigh(...)               products become packed weights, without dropout
//   differentiate(...)       dP becomes dS
//   store_bias_gradient(...) dS goes to the gradient of the bias

// What most policies have. Packing: PackedScores.
template <class Packing>
struct UnbiasedGradients {
  using Workspace = BackwardWorkspace;
  using Maps = BackwardMaps;
  static constexpr int kCopies = 1, kAdders = 1;
  static constexpr bool kHasBias = false, kHasCentres = false, kBatchesTogether = false;

  template <class CallMaps>
  static void set_more_maps(const AttnGradParams&, CallMaps*, int, int) {}
  static __device__ __forceinline__ void prefetch_map(const Maps&) {}
  template <class Shared, class CallMaps>
  static __device__ __forceinline__ void load_keys(Shared&, int, const CallMaps&, int, int, int) {}
  template <class Shared>
  static __device__ __forceinline__ void load_queries(Shared&, int, const Maps&, int, int, int, int) {}
  template <class Shared>
  static __device__ __forceinline__ void load_rows(Shared&, int, const AttnGradParams&, const BackwardWorkspace&, int,
                                                   int, int, int) {}
  static __device__ __forceinline__ Limits unmasked(const AttnParams& p, const BackwardWork& work, int key) {
    return Packing::unmasked_queries(p, work.mask(p), key, 64);
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ Nothing begin(const Step&, const Work&, const Walk&) const {
    return {};
  }
  template <class Step>
  __device__ __forceinline__ void store_bias_gradient(const Step&, const typename Packing::Scores&,
                                                      const typename Packing::Packed&) const {}
};

// No option of a score.
template <class Packing>
struct PlainGradients : UnbiasedGradients<Packing> {
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void weigh(typename Packing::Packed& weights, typename Packing::Scores& scores,
                                        const Step& step, const Work& work, const Walk& now, bool masked, Nothing) {
    const int row0 = now.m * Packing::kTiles * 8;
    const auto prepare = [&] {
      step.subtract_words(scores, step.workspace.score, work.b, now.h, row0);
      return visible(step.p, work, now.h);
    };
    Packing::weigh(weights, scores, step.workspace.score, step.lse(), step.is_masked_or_marked(masked), prepare, row0,
                   work.key0 + step.warp_key);
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void differentiate(typename Packing::Scores& dscores,
                                                const typename Packing::Packed& weights, const Step& step, const Work&,
                                                const Walk&, bool masked) {
    Packing::differentiate(dscores, weights, step.workspace.score, step.delta(), step.is_masked_or_marked(masked),
                           [&] { step.clear_rows(dscores); });
  }
};

}  // namespace flashattn_ext::sm90
