// Tiles in shared memory as TMA writes and wgmma reads them: panels of 64 columns of 16-bit elements, whose 128-byte
// rows are swizzled (wgmma.cuh).
#pragma once

#include "cuda/ptx/async.cuh"

namespace flashattn_ext {

constexpr int kPanelColumns = 64;
// A tile begins at a multiple of these bytes of shared memory: its swizzle repeats after 8 rows of 128 bytes.
constexpr int kPanelAlignment = 1024;
// The alignment of a tile that may be empty (MaybeArray in ring.cuh).
constexpr int panel_alignment(int count) { return count > 0 ? kPanelAlignment : 8; }

// The number of panels of a tile with this many columns.
constexpr int panels(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

// Starts copying kRows rows of the tile's columns, from `row` of a head and `column` on; one thread calls it. `full` is
// the barrier that counts their bytes.
template <class T, int kPanels, int kRows>
__device__ __forceinline__ void load_panels(T (&to)[kPanels][kRows][kPanelColumns], ptx::Barrier& full,
                                            const CUtensorMap& map, int row, int head, int batch, int column = 0) {
  ptx::barrier_arrive_expect(&full, kPanels * kRows * kPanelColumns * static_cast<int>(sizeof(T)));
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    ptx::tma_load(to[panel], &map, &full, column + panel * kPanelColumns, row, head, batch);
  }
}

// Writes a warp's 16 rows of scores into panels of [keys][64 queries], from its first key on. first_step: 16 queries
// each, before those of the scores.
template <class T, int kPanels, int kKeys, int kSteps>
__device__ __forceinline__ void store_panels(T (&panels)[kPanels][kKeys][kPanelColumns], int key,
                                             const uint32_t (&packed)[kSteps][4], int first_step = 0) {
  const int lane = threadIdx.x % 32, chunk = (lane / 16) ^ (lane % 8);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = first_step + i;
    T* const row = panels[step / 4][key + lane % 16];
    ptx::stmatrix(row + (chunk ^ (step % 4 * 2)) * 8, packed[i]);
  }
}

// Loads a warp's 16 rows of a tile, from `row` on, as A operands of steps of 16 columns.
template <class T, int kPanels, int kRows, int kSteps>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[kSteps][4], const T (&tile)[kPanels][kRows][kPanelColumns],
                                               int row) {
  const int lane = threadIdx.x % 32, chunk = (lane / 16) ^ (lane % 8);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::ldmatrix(a[step], tile[step / 4][row + lane % 16] + (chunk ^ (step % 4 * 2)) * 8);
  }
}

// Zeroes the rows from `first` on. thread: index among the `threads` that divide the work.
template <class T, int kPanels, int kRows>
__device__ __forceinline__ void clear_rows(T (&tile)[kPanels][kRows][kPanelColumns], int first, int thread,
                                           int threads) {
  const int vectors = (kRows - first) * 8;
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel) {
    uint4* const rows = reinterpret_cast<uint4*>(tile[panel][first]);
#pragma unroll 1
    for (int i = thread; i < vectors; i += threads) rows[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace flashattn_ext
