// Rings of stages in shared memory, which one warp fills and others empty.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace flashattn_ext {

// Where a warp is in a ring of stages, and the parity of the stage's barriers in this round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ RingPosition after() const {
    RingPosition next = *this;
    next.advance();
    return next;
  }
};

// Signals that this warp is done with a stage; barriers of empty stages count warps.
__device__ __forceinline__ void release(ptx::Barrier& empty) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&empty);
}

}  // namespace flashattn_ext
