// What the Hopper forward (forward.cuh) keeps in shared memory besides the operands of its products: barriers, and the
// rows of `out` until TMA has stored them.
#pragma once

#include "cuda/ptx/async.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/forward/score_policy.cuh"
#include "cuda/tile/panels.cuh"

namespace flashattn_ext::sm90 {

// One thread calls it.
template <class Kernel>
__device__ __forceinline__ void init_barriers(SharedOf<Kernel>& shared) {
  for (int i = 0; i < Kernel::kQueryStages; ++i) {
    ptx::barrier_init(&shared.q_full[i], 1);
    ptx::barrier_init(&shared.q_empty[i], Kernel::kWarps);
  }
  for (int i = 0; i < Kernel::kStages; ++i) {
    ptx::barrier_init(&shared.k_full[i], 1);
    ptx::barrier_init(&shared.k_empty[i], Kernel::kWarps);
    ptx::barrier_init(&shared.v_full[i],
                      Kernel::kTransposers ? Kernel::kTransposers : Kernel::Visibility::kValueArrivals);
    ptx::barrier_init(&shared.v_empty[i], Kernel::kWarps);
    Kernel::Visibility::init_stage(shared, i);
  }
  for (ptx::Barrier& barrier : shared.rows_full) ptx::barrier_init(&barrier, 1);
  for (ptx::Barrier& barrier : shared.rows_empty) ptx::barrier_init(&barrier, Kernel::kTransposers);
  BiasTileLoader<Kernel::kBiasTiles>::init(shared, Kernel::kWarps);
  Kernel::Visibility::init(shared);
  ptx::barrier_init(&shared.work_full, 1);
  ptx::barrier_init(&shared.work_empty, Kernel::kWarps + Kernel::kTransposers);
  ptx::barrier_init(&shared.tail_cleared, Kernel::kWarps);
}

// At the end of a tile of queries all thread blocks write at the same time, and a warp that stores its rows itself
// waits for the stores of others. Instead it leaves them in shared memory, and TMA stores them while the warp computes
// the next tile.

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
