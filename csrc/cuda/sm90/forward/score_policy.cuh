// The score policies of the Hopper forward (forward.cuh): those of cuda/score/score_policy.cuh and two more. T: the
// element type; kKeys: of a step. Besides the functions that the other file lists, a policy here has:
//   Maps                      tensor maps of the call
//   kTileStages               of bias tiles in shared memory; 0: the producer loads none
//   kBatchesTogether          as in each_forward_work
//   begin(..., row)           row: this warp's first row within the tile of queries, and of the bias
//   skip(shared)              the warpgroup skips a key tile
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/score/score_policy.cuh"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// --- tiles of a bias -----------------------------------------------------------------------------------------------
//
// TMA prefetches the tiles of a dense bias by one step, like the tiles of keys, and they are added to the scores from
// shared memory. Panels are as in cuda/tile/panels.cuh, with keys as columns.

// Double buffering: one tile is read while the next one arrives.
constexpr int kBiasStages = 2;

// Starts copying a tile, from a row and a key of a head on; one thread calls it.
template <class T, int kPanels, int kRows>
__device__ __forceinline__ void load_bias_tile(T (&to)[kPanels][kRows][kPanelColumns], ptx::Barrier& full,
                                               const CUtensorMap& map, int row, int key, int head, int batch) {
  ptx::barrier_arrive_expect(&full, kPanels * kRows * kPanelColumns * static_cast<int>(sizeof(T)));
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    ptx::tma_load(to[panel], &map, &full, key + panel * kPanelColumns, row, head, batch);
  }
}

// Products x become natural logits: scale * x + bias. row: of the lane's first score, within the tile.
template <class T, int N, int kPanels, int kRows>
__device__ __forceinline__ void add_bias_tile(float (&x)[N][4], const T (&bias)[kPanels][kRows][kPanelColumns], int row,
                                              float scale) {
  const int swizzle = row % 8;
  const auto pair = [&](int n, int r) {
    const T* const chunk = bias[n / 8][row + 8 * r] + ((n % 8) ^ swizzle) * 8;
    return *reinterpret_cast<const uint32_t*>(chunk + 2 * lane_in_quad());
  };
  uint32_t lowest = pair(0, 0);
  unrolled<N, 2>([&](int n, int r) {
    const uint32_t both = pair(n, r);
    const float2 added = TensorCore<T>::unpack(both);
    lowest = ptx::min_x2(lowest, both, T());
    x[n][2 * r] = fmaf(x[n][2 * r], scale, added.x);
    x[n][2 * r + 1] = fmaf(x[n][2 * r + 1], scale, added.y);
  });
  // A bias of -inf masks the score, even if the score is NaN.
  const float2 least = TensorCore<T>::unpack(lowest);
  if (!__any_sync(~0u, fminf(least.x, least.y) == -infinity())) return;
  unrolled<N, 2>([&](int n, int r) {
    const float2 added = TensorCore<T>::unpack(pair(n, r));
    if (added.x == -infinity()) x[n][2 * r] = -infinity();
    if (added.y == -infinity()) x[n][2 * r + 1] = -infinity();
  });
}

// --- policies ------------------------------------------------------------------------------------------------------

struct ForwardMaps {
  CUtensorMap q, k, v;
  CUtensorMap out;  // boxes of the rows of a warp
  bool has_out;     // whether the kernel stores `out` by TMA, and its rows are aligned
};
struct BiasedForwardMaps : ForwardMaps {
  CUtensorMap bias;
};

// A policy without bias tiles.
template <class Policy>
struct WithoutBiasTiles : Policy {
  using Maps = ForwardMaps;
  static constexpr int kTileStages = 0;
  static constexpr bool kBatchesTogether = false;

  static void set_bias_map(const AttnParams&, Maps*, int) {}
  template <class CoordinatesOf, class Shared>
  __device__ __forceinline__ auto begin(const AttnParams& p, const CoordinatesOf& coordinates, Shared&, int) {
    return Policy::begin(p, coordinates);
  }
  template <class Shared>
  __device__ __forceinline__ void skip(Shared&) {}
};

// Products in fp8 (forward_operands.cuh), with the descales of DescaledScores. Weights are rounded to e4m3 later, whose
// largest number is 448: with 256 for the largest weight of a row, weights down to 2^-14 of it keep all bits.
struct Fp8ProductScores : DescaledScores<Float8> {
  static constexpr float kWeightScale = LargerWeights::kScale;

  // A factor of products that is not positive, and options of a score, are applied to each score.
  template <class CoordinatesOf, int kRowTiles, int N>
  __device__ __forceinline__ LargerWeights make_logits(const AttnParams&, const Rule& rule, float (&x)[kRowTiles][N][4],
                                                       const CoordinatesOf&, Nothing) {
    const GeneralScore score = rule.times(of_products);
    if (!score.changes_products() && score.factor >= kSmallest<float>) return {score.factor};
    flashattn_ext::make_logits<Float8>(score, x);
    return {1};
  }
};

// Options of a score, ALiBi or a relative bias: there are no loads for single scores.
template <class T, int kKeys>
struct DistanceScores : CentredScores<1, DistanceBias<false, 1, kKeys / 8>> {
  using Rule = GeneralScore;
  using Bias = DistanceBias<false, 1, kKeys / 8>;

  template <class CoordinatesOf>
  __device__ __forceinline__ Bias begin(const AttnParams& p, const CoordinatesOf& coordinates) {
    return coordinates().template bias<Bias>(p);
  }
  template <class CoordinatesOf>
  __device__ __forceinline__ DistanceLogit make_logits(const AttnParams&, const Rule& rule, float (&x)[1][kKeys / 8][4],
                                                       const CoordinatesOf&, const Bias& bias) {
    DistanceLogit logit;
    store_scores<T>(rule, x);
    logit.factor = bias.add(x, rule.factor, logit.row);
    return logit;
  }
};

// A 16-bit bias alone, whose tiles TMA brings.
template <class T, int kKeys>
struct BiasTileScores : UncentredScores {
  using Rule = GeneralScore;
  using Maps = BiasedForwardMaps;
  static constexpr int kTileStages = kBiasStages;
  static constexpr bool kBatchesTogether = true;  // they may read the same bias

  RingPosition<kBiasStages> at;

  static void set_bias_map(const AttnParams& p, Maps* maps, int queries) { maps->bias = bias_map(p, p.bias, queries); }
  template <class Shared>
  struct Tile {
    Shared& shared;
    int row;
  };
  template <class CoordinatesOf, class Shared>
  __device__ __forceinline__ Tile<Shared> begin(const AttnParams&, const CoordinatesOf&, Shared& shared,
                                                int row) const {
    return {shared, row};
  }
  template <class CoordinatesOf, class Shared>
  __device__ __forceinline__ ScaledLogit make_logits(const AttnParams&, const Rule& rule, float (&x)[1][kKeys / 8][4],
                                                     const CoordinatesOf&, const Tile<Shared>& tile) {
    ptx::barrier_wait(&tile.shared.bias_full[at.stage], at.parity);
    add_bias_tile(x[0], tile.shared.bias[at.stage], tile.row + quad(), rule.softmax_scale);
    release_tile(tile.shared);
    return {kLog2E<float>};
  }
  template <class Shared>
  __device__ __forceinline__ void skip(Shared& shared) {
    ptx::barrier_wait(&shared.bias_full[at.stage], at.parity);
    release_tile(shared);
  }

 private:
  template <class Shared>
  __device__ __forceinline__ void release_tile(Shared& shared) {
    __syncwarp();
    release(shared.bias_empty[at.stage]);
    at.advance();
  }
};

// The producer's side: initialises the barriers, and loads the bias tile of a step, if there are tiles.
template <int kStages>
struct BiasTileLoader {
  RingPosition<kStages> at;

  // warps: that read a tile.
  template <class Shared>
  static __device__ __forceinline__ void init(Shared& shared, int warps) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&shared.bias_full[i], 1);
      ptx::barrier_init(&shared.bias_empty[i], warps);
    }
  }
  template <class Shared, class Maps, class Work>
  __device__ __forceinline__ void load(Shared& shared, const Maps& maps, const Work& work, int key) {
    ptx::barrier_wait(&shared.bias_empty[at.stage], at.parity ^ 1);
    load_bias_tile(shared.bias[at.stage], shared.bias_full[at.stage], maps.bias, work.row0, key, work.h, work.b);
    at.advance();
  }
};
template <>
struct BiasTileLoader<0> {
  template <class Shared>
  static __device__ __forceinline__ void init(Shared&, int) {}
  template <class Shared, class Maps, class Work>
  __device__ __forceinline__ void load(Shared&, const Maps&, const Work&, int) {}
};

}  // namespace flashattn_ext::sm90
