// Policies of a forward for scores, of both architectures: how products become the logits of the softmax, and what is
// summed up for the gradients of biases. A policy is a member of the kernel's object, and may hold registers there; all
// lanes of a warp call its functions, and its branches are warp-uniform. T: the element type; kRowTiles: row
// tiles of a warp; kKeys: keys of a step. rule: the kernel's argument. coordinates(): the TileCoordinates of the warp's
// scores in a step, which are computed again rather than kept in registers. x, weights: [row tile][column tile][4].
//   Rule                      the kernel's argument
//   kIsFp8                    whether inputs were widened from fp8: out then has the dtype AttnParams::out_dtype
//   kWeightScale              the weight of the largest score of a row, a power of two; above 1 in kernels that count
//                             the sink after the last key
//   start_tile(p, b, h)       before the tiles of keys of a tile of queries
//   value_scale(p, b, h)      the factor of values that out gets: descale_v in fp8, otherwise 1
//   begin(p, coordinates)     while the product of a step runs, or before it; its result goes to make_logits
//   make_logits(...)          products become stored scores; returns the rule for OnlineSoftmax::weigh
//   add_centres(...)          after the scores of row tile i have become weights. sums: the sums of this lane's
//                             weights of rows g and g + 8; shrink: the factors for the earlier sums
//   store_centres(...)        with the output of row r of row tile i
#pragma once

#include "cuda/score/bias.cuh"
#include "cuda/score/distance_bias.cuh"
#include "cuda/score/general_score.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// --- centres -------------------------------------------------------------------------------------------------------
//
// The centres of a forward's rows, for the gradients of biases (rules/bias.h): sums of weights times distances, and of
// weights in both ends of the relative bias. They are accumulated like the sum of a row's weights, and divided by it at
// the end.

// The sums for rows g and g + 8 of a 16-row tile, of which lane t of a quad holds the sum of centre t.
struct CentreSums {
  float sums[2];

  __device__ __forceinline__ void start() { sums[0] = sums[1] = 0; }

  // Adds a key tile. bias: the biases of the warp's tile, whose row tile i is added; weights: relative to the running
  // maximum, before dropout; weight_sums: their sums over this lane's elements; shrink: the factors for the earlier
  // sums.
  template <int kRowTiles, int N>
  __device__ __forceinline__ void add(const DistanceBias<false, kRowTiles, N>& bias, int i,
                                      const float (&weights)[N][4], const float (&weight_sums)[2],
                                      const float (&shrink)[2]) {
    const float first = static_cast<float>(bias.place.distance), reach = static_cast<float>(bias.reach);
    auto distance_on = [&](int n, int e) { return static_cast<float>(bias.place.distance_on(i, n, e)); };
    float own[2][4] = {};  // this lane's partial sums
    static_assert(kCentres <= 4);
    // Adds term(column tile, element, weight) of all weights of each row.
    auto add_to = [&](Centre which, const auto& term) {
      unrolled<N, 4>([&](int n, int e) { own[e / 2][which] += term(n, e, weights[n][e]); });
    };
    if (bias.has_slopes && bias.is_one_sided()) {
      add_to(kDistance, [&](int n, int e, float weight) { return weight * distance_on(n, e); });
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = fmaf(first, weight_sums[r], own[r][kDistance]);
        own[r][kDistance] = bias.place.tile_distance < 0 ? -sum : sum;
      }
    } else if (bias.has_slopes) {
      add_to(kDistance, [&](int n, int e, float weight) { return weight * fabsf(first + distance_on(n, e)); });
    }
    if (bias.range == Reached::kSome && !bias.is_inside()) {
      // A score counts for one end only, even if the reach is 0.
      add_to(kBelow, [&](int n, int e, float weight) { return first + distance_on(n, e) <= -reach ? weight : 0.f; });
      add_to(kAbove, [&](int n, int e, float weight) {
        const float distance = first + distance_on(n, e);
        return distance >= reach && distance > -reach ? weight : 0.f;
      });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (bias.range == Reached::kBelow) own[r][kBelow] = weight_sums[r];
      if (bias.range == Reached::kAbove) own[r][kAbove] = weight_sums[r];
      sums[r] = fmaf(sums[r], shrink[r], quad_sum_of_own(own[r]));
    }
  }

  // Stores the centres of row r (g for 0, g + 8 for 1). total: the sum of the row's weights, 0 if it is fully masked;
  // to: the row's centres in memory; exists: whether the row is within the sequence.
  __device__ __forceinline__ void store(float* to, int r, float total, bool exists) const {
    ptx::store_if(exists && lane_in_quad() < kCentres, to + lane_in_quad(), total == 0 ? 0.f : sums[r] / total);
  }
};

// --- policies ------------------------------------------------------------------------------------------------------

// What most policies do not need.
struct UncentredScores {
  static constexpr bool kIsFp8 = false;
  static constexpr float kWeightScale = 1;

  __device__ __forceinline__ void start_tile(const AttnParams&, int, int) {}
  static __device__ __forceinline__ float value_scale(const AttnParams&, int, int) { return 1; }
  template <class CoordinatesOf>
  __device__ __forceinline__ Nothing begin(const AttnParams&, const CoordinatesOf&) {
    return {};
  }
  template <class CoordinatesOf, int N>
  __device__ __forceinline__ void add_centres(const AttnParams&, const CoordinatesOf&, int, const float (&)[N][4],
                                              const float (&)[2], const float (&)[2]) {}
  __device__ __forceinline__ void store_centres(const AttnParams&, int, int, int64_t, int, int, float, bool) const {}
};

// No option of a score.
struct PlainScores : UncentredScores {
  using Rule = ScoreRule<float, PlainProducts<true>>;

  template <class CoordinatesOf, int kRowTiles, int N>
  __device__ __forceinline__ const Rule& make_logits(const AttnParams&, const Rule& rule, float (&x)[kRowTiles][N][4],
                                                     const CoordinatesOf&, Nothing) {
    store_scores(x, rule);
    return stored_rule(rule);
  }
};

// With the centres of rows. Bias: DistanceBias or TileBias.
template <int kRowTiles, class Bias>
struct CentredScores : UncentredScores {
  CentreSums centres[kRowTiles];

  __device__ __forceinline__ void start_tile(const AttnParams&, int, int) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) centres[i].start();
  }
  template <class CoordinatesOf, int N>
  __device__ __forceinline__ void add_centres(const AttnParams& p, const CoordinatesOf& coordinates, int i,
                                              const float (&weights)[N][4], const float (&sums)[2],
                                              const float (&shrink)[2]) {
    if (p.centres.data) centres[i].add(coordinates().template bias<Bias>(p), i, weights, sums, shrink);
  }
  __device__ __forceinline__ void store_centres(const AttnParams& p, int b, int h, int64_t at, int i, int r, float sum,
                                                bool exists) const {
    if (p.centres.data) centres[i].store(row_pointer<float>(p.centres, b, h, at), r, sum, exists);
  }
};

// Inputs that were widened from fp8: products are multiplied by descale_q and descale_k of their batch entry and KV
// head, and out by descale_v. T: the widened type.
template <class T>
struct DescaledScores : UncentredScores {
  using Rule = GeneralScore;
  static constexpr bool kIsFp8 = true;

  float of_products;

  __device__ __forceinline__ void start_tile(const AttnParams& p, int b, int h) {
    const int64_t key_head = h / p.group_size();
    of_products = p.descale_q.of(b, key_head) * p.descale_k.of(b, key_head);
  }
  static __device__ __forceinline__ float value_scale(const AttnParams& p, int b, int h) {
    return p.descale_v.of(b, h / p.group_size());
  }
  template <class CoordinatesOf, int kRowTiles, int N>
  __device__ __forceinline__ StoredLogit make_logits(const AttnParams&, const Rule& rule, float (&x)[kRowTiles][N][4],
                                                     const CoordinatesOf&, Nothing) {
    flashattn_ext::make_logits<T>(rule.times(of_products), x);
    return {};
  }
};

// Every option, found out at run time. Biases of single scores are loaded ahead of the wait for the product; the rest
// is recomputed rather than kept in registers.
template <class T, int kRowTiles, int kKeys>
struct GeneralScores : CentredScores<kRowTiles, TileBias<T, false, kRowTiles, kKeys / 8>> {
  using Rule = GeneralScore;
  using Bias = TileBias<T, false, kRowTiles, kKeys / 8>;

  typename Bias::Ahead ahead;

  template <class CoordinatesOf>
  __device__ __forceinline__ Nothing begin(const AttnParams& p, const CoordinatesOf& coordinates) {
    coordinates().template bias<Bias>(p).load_ahead(ahead);
    return {};
  }
  template <class CoordinatesOf>
  __device__ __forceinline__ auto make_logits(const AttnParams& p, const Rule& rule,
                                              float (&x)[kRowTiles][kKeys / 8][4], const CoordinatesOf& coordinates,
                                              Nothing) {
    const auto stored = make_scores<T>(rule, x, p.has_bias());
    coordinates().template bias<Bias>(p).add(x, ahead);
    return stored;
  }
};

}  // namespace flashattn_ext
