// The barriers in shared memory of the forward (forward.cuh). One thread initialises them.
#pragma once

#include "cuda/sm90/forward/score_policy.cuh"

namespace flashattn_ext::sm90 {

template <class Kernel>
__device__ __forceinline__ void init_barriers(typename Kernel::Shared& shared) {
  ptx::barrier_init(&shared.q_full, 1);
  ptx::barrier_init(&shared.q_empty, Kernel::kWarps);
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

}  // namespace flashattn_ext::sm90
