// Rings of stages in shared memory, which one warp fills and others empty, and members of shared memory that only some
// kernels have.
#pragma once

#include <type_traits>

#include "cuda/ptx/async.cuh"

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

// The position in a buffer of one stage.
struct OneStage {
  static constexpr int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() { parity ^= 1; }
};
// The position of the queries of a forward, most of which have one stage and need no register for its number.
template <int kStages>
using QueryPosition = std::conditional_t<kStages == 1, OneStage, RingPosition<kStages>>;

// Signals that this warp is done with a stage; barriers of empty stages count warps.
__device__ __forceinline__ void release(ptx::Barrier& empty) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&empty);
}

template <class T>
struct alignas(8) NoElements {
  __device__ __forceinline__ T* begin() { return nullptr; }
  __device__ __forceinline__ T* end() { return nullptr; }
};

template <class T, int kCount>
struct MaybeArrayType {
  using Type = T[kCount];
};
template <class T>
struct MaybeArrayType<T, 0> {
  using Type = NoElements<T>;
};

// An array of kCount elements, which may be arrays themselves; for 0 a type of 8 bytes that code can only loop over.
// Members behind an empty one are aligned to 8 bytes: tiles need alignas(kPanelAlignment) (panels.cuh). An empty member
// with [[no_unique_address]] would take no bytes, but nvcc and g++ then give the members behind it different offsets,
// and the host passes a smaller size of shared memory than the kernel uses.
template <class T, int kCount>
using MaybeArray = typename MaybeArrayType<T, kCount>::Type;

}  // namespace flashattn_ext
