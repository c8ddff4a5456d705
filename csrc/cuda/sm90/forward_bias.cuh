// A dense bias in the forward (forward.cuh): TMA prefetches its tiles by one step, like the tiles of keys, and they are
// added to the scores from shared memory. Panels are as in common/panels.cuh, with keys as columns.
#pragma once

#include "../common/panels.cuh"
#include "../common/rows.cuh"
#include "../common/tensor_core.cuh"
#include "../common/tensor_map.h"
#include "../ptx/math.cuh"

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

// The largest magnitude of a lane's biases, by which the few tiles with a special bias are found: -inf, or one beyond
// kNarrowsFrom, which fp16 does not have.
template <class T>
struct LargestBias {
  static constexpr uint32_t kSigns = std::is_same_v<T, __half> ? 0 : 0x80008000u;
  uint32_t lowest = 0;  // of each of two numbers: the smallest bias, or minus the largest magnitude

  __device__ __forceinline__ void add(uint32_t pair) { lowest = ptx::min_x2(lowest, pair | kSigns, T()); }
  // Whether a lane of the warp has a special bias. All lanes call it.
  __device__ __forceinline__ bool is_special() const {
    const float2 least = TensorCore<T>::unpack(lowest);
    return __any_sync(~0u, fminf(least.x, least.y) < -kNarrowsFrom<float>) != 0;
  }
};
// A natural logit with its bias in a tile with a special bias. A bias of -inf masks the score, even if the score is
// NaN. Beside a bias beyond kNarrowsFrom the product does not count, so that the sum is narrowed.
__device__ __forceinline__ float special_logit(float logit, float bias) {
  return bias == -infinity() ? -infinity() : narrowed(logit);
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
  LargestBias<T> largest;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t both = pair(n, r);
      const float2 added = TensorCore<T>::unpack(both);
      largest.add(both);
      x[n][2 * r] = fmaf(x[n][2 * r], scale, added.x);
      x[n][2 * r + 1] = fmaf(x[n][2 * r + 1], scale, added.y);
    }
  }
  if (!largest.is_special()) return;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 added = TensorCore<T>::unpack(pair(n, r));
      x[n][2 * r] = special_logit(x[n][2 * r], added.x);
      x[n][2 * r + 1] = special_logit(x[n][2 * r + 1], added.y);
    }
  }
}

}  // namespace flashattn_ext::sm90
