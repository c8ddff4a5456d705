// The centres of a forward's rows, for the gradients of biases (rules/bias.h): sums of weights times distances, and of
// weights in both ends of the relative bias. They are accumulated like the sum of a row's weights, and divided by it at
// the end.
#pragma once

#include "cuda/score/distance_bias.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// The sums for rows g and g + 8 of a 16-row tile, of which lane t of a quad holds the sum of centre t.
struct CentreSums {
  float sums[2];

  __device__ __forceinline__ void start() { sums[0] = sums[1] = 0; }

  // Adds a key tile. bias: of the warp's tile, whose row tile i is added; weights: relative to the running maximum,
  // before dropout; weight_sums: their sums over this lane's elements; shrink: the factors for the earlier sums.
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
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) own[e / 2][which] += term(n, e, weights[n][e]);
      }
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

  // Writes the centres of row r (g for 0, g + 8 for 1). total: the sum of the row's weights, 0 if it is fully masked;
  // to: the row's centres in memory; exists: whether the row is within the sequence.
  __device__ __forceinline__ void write(float* to, int r, float total, bool exists) const {
    ptx::store_if(exists && t() < kCentres, to + t(), total == 0 ? 0.f : sums[r] / total);
  }
};

}  // namespace flashattn_ext
