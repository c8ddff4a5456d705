// A dense bias in the forward (forward.cuh): TMA prefetches its tiles by one step, like the tiles of keys, and they are
// added to the scores from shared memory. Panels are as in cuda/tile/panels.cuh, with keys as columns.
#pragma once

#include "cuda/host/tensor_map.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tensor_core.cuh"

namespace flashattn_ext::sm90 {

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
    return *reinterpret_cast<const uint32_t*>(chunk + 2 * t());
  };
  uint32_t lowest = pair(0, 0);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t both = pair(n, r);
      const float2 added = TensorCore<T>::unpack(both);
      lowest = ptx::min_x2(lowest, both, T());
      x[n][2 * r] = fmaf(x[n][2 * r], scale, added.x);
      x[n][2 * r + 1] = fmaf(x[n][2 * r + 1], scale, added.y);
    }
  }
  // A bias of -inf masks the score, even if the score is NaN.
  const float2 least = TensorCore<T>::unpack(lowest);
  if (!__any_sync(~0u, fminf(least.x, least.y) == -infinity())) return;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 added = TensorCore<T>::unpack(pair(n, r));
      if (added.x == -infinity()) x[n][2 * r] = -infinity();
      if (added.y == -infinity()) x[n][2 * r + 1] = -infinity();
    }
  }
}

}  // namespace flashattn_ext::sm90
