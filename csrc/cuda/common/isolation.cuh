// Keeps what is not finite out of results that do not see it. In a product along keys or rows a hidden pair has the
// weight 0, and 0 * NaN is NaN. So in tiles of which a Mask hides a part, rows with an inf or a NaN become zeros in
// shared memory before the product, and whatever sees such a row gets a NaN by other means: each kernel says how.
// Normally there is no such row, and a tile is read once more than without a Mask.
#pragma once

#include "../ptx/math.cuh"
#include "panels.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace flashattn_ext {

// Finds out whether any of the numbers that it is shown is an inf or a NaN: their products with 0 are NaNs, those of
// others 0.
template <class T>
struct FiniteCheck {
  uint32_t sum = 0;

  __device__ __forceinline__ void add(const uint4& x) {
    for (const uint32_t word : {x.x, x.y, x.z, x.w}) sum = ptx::fma_zero(word, sum, T());
  }
  __device__ __forceinline__ bool fails() const { return sum != 0; }
};

// Zeroes the rows of a tile (operand_tile.cuh) that are not finite. Every thread of the block calls it, when the tile
// is there for all, and gets whether there is such a row. If there is, one thread calls each(row, whether it is finite)
// for every row, and the block synchronises afterwards.
template <class Tile, int kRows, int kThreads, class Each, class T = typename Tile::Element>
__device__ __forceinline__ bool isolate_rows(T* tile, const Each& each) {
  constexpr int kElements = kVectorBytes / sizeof(T), kVectors = Tile::kColumns / kElements;
  auto vector = [&](int row, int i) -> uint4& {
    return *reinterpret_cast<uint4*>(tile + row * Tile::kStride + i * kElements);
  };
  FiniteCheck<T> all;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kVectors; i += kThreads) all.add(vector(i / kVectors, i % kVectors));
  if (!__syncthreads_or(all.fails())) return false;
#pragma unroll 1
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    FiniteCheck<T> own;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) own.add(vector(row, i));
    if (own.fails()) {
#pragma unroll 1
      for (int i = 0; i < kVectors; ++i) vector(row, i) = make_uint4(0, 0, 0, 0);
    }
    each(row, !own.fails());
  }
  __syncthreads();
  return true;
}

// The same for a tile in panels, of which each of kWarps warps takes care of its own rows: four of them at a time.
// Every lane of a warp calls it, and gets whether there is such a row among them; each(row, whether it is finite) is
// called in one lane. If there is one, ptx::fence_async_shared has to follow before the tile is used.
template <int kWarps, class T, int kPanels, int kRows, class Each>
__device__ __forceinline__ bool isolate_panel_rows(T (&tile)[kPanels][kRows][kPanelColumns], int warp,
                                                   const Each& each) {
  const int lane = threadIdx.x % 32, first = warp * 4 + lane / 8;
  auto vector = [&](int panel, int row) -> uint4& { return reinterpret_cast<uint4*>(tile[panel][row])[lane % 8]; };
  FiniteCheck<T> all;
#pragma unroll 1
  for (int row = first; row < kRows; row += 4 * kWarps) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) all.add(vector(panel, row));
  }
  if (!__any_sync(~0u, all.fails())) return false;
#pragma unroll 1
  for (int row = first; row < kRows; row += 4 * kWarps) {  // kRows is a multiple of 4: all lanes take part
    FiniteCheck<T> own;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) own.add(vector(panel, row));
    const bool finite = (__ballot_sync(~0u, own.fails()) >> (lane & 24) & 0xFF) == 0;
#pragma unroll 1
    for (int panel = 0; panel < kPanels && !finite; ++panel) vector(panel, row) = make_uint4(0, 0, 0, 0);
    if (lane % 8 == 0) each(row, finite);
  }
  return true;
}

// Makes rows g and g + 8 of accumulators NaNs.
template <int N>
__device__ __forceinline__ void poison_rows(float (&x)[N][4], const bool (&poisoned)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!poisoned[r]) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) x[n][2 * r] = x[n][2 * r + 1] = not_a_number();
  }
}

}  // namespace flashattn_ext
