// The output of the Hopper forward (forward.cuh) by TMA. At the end of a tile of queries all thread blocks write at the
// same time, and a warp that stores its rows itself waits for the stores of others. Instead it leaves them in shared
// memory, and TMA stores them while the warp computes the next tile.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/tile/panels.cuh"

namespace flashattn_ext::sm90 {

constexpr int kOutRows = 16;  // rows of a warp

// Starts storing the rows of a warp, `out` times `factors`, from `row` of the map on; `staged` is this warp's part of
// shared memory. All lanes call it. Before the thread block ends they call ptx::bulk_wait.
template <class T, int kPanels, int N>
__device__ __forceinline__ void start_store(T (&staged)[kPanels][kOutRows][kPanelColumns], const CUtensorMap& map,
                                            float (&out)[N][4], const float (&factors)[2], int row, int head,
                                            int batch) {
  const bool starts = threadIdx.x % 32 == 0;
  if (starts) ptx::bulk_wait_read<0>();  // the last tile's rows have been read from `staged`
  __syncwarp();
  rescale(out, factors);
  uint32_t packed[N / 2][4];
  pack_scores<T>(packed, out);
  store_panels(staged, 0, packed);
  ptx::fence_async_shared();
  __syncwarp();
  if (!starts) return;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    ptx::tma_store(&map, staged[panel], panel * kPanelColumns, row, head, batch);
  }
  ptx::bulk_commit();
}

}  // namespace flashattn_ext::sm90
