// Keeps non-finite inputs out of the results from which a Mask or a BlockMask hides them. In a product along keys or
// rows a masked pair has the weight 0, and 0 * NaN is NaN. So in partially masked tiles, rows with an inf or a NaN
// become zeros in shared memory before the product, and the results that see such a row are set to NaN separately: each
// kernel says how. Without such rows the only cost is that these tiles are read once more than without a mask.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext {

// Detects an inf or a NaN among the numbers given to add(): its product with 0 is NaN, the product of a finite number
// 0.
template <class T>
struct FiniteCheck {
  uint32_t sum = 0;

  __device__ __forceinline__ void add(const uint4& x) {
    for (const uint32_t word : {x.x, x.y, x.z, x.w}) sum = ptx::fma_zero(word, sum, T());
  }
  __device__ __forceinline__ bool fails() const { return sum != 0; }
};

// Zeroes the rows of a tile (operand_tile.cuh) that are not finite. Every thread of the block calls it once the tile is
// visible to all. Returns whether there is such a row. If so, one thread per row calls each(row, whether it is finite),
// and the block synchronises afterwards.
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

// Zeroes rows with an element that is not finite in a tile of panels: each of kWarps warps handles its own rows, four
// at a time. Every lane of a warp calls it. Returns whether the warp has such a row; then one lane per row calls
// each(row, whether it is finite), and ptx::fence_async_shared has to follow before the tile is used.
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

// Sets rows g and g + 8 of accumulators to NaN where `poisoned`.
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
