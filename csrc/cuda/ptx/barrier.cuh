// Barriers, and register budgets of Hopper kernels, one instruction in each wrapper (PTX ISA, "mbarrier", "barrier",
// "setmaxnreg").
#pragma once

#include "cuda/ptx/memory.cuh"

namespace flashattn_ext::ptx {

using Barrier = uint64_t;  // an mbarrier in shared memory

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers visible to the asynchronous copies; a __syncthreads has to follow.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;\n"); }

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Arrives, and makes the phase wait for `bytes` of asynchronous copies as well.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Arrives when all earlier cp_async copies of this thread have completed.
__device__ __forceinline__ void barrier_arrive_copied(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
// Before Hopper the instruction does not suspend the thread for a while.
#if __CUDA_ARCH__ >= 900
#define FLASHATTN_TRY_WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define FLASHATTN_TRY_WAIT "mbarrier.test_wait.parity.shared::cta.b64"
#endif
__device__ __forceinline__ bool barrier_try_wait(Barrier* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred done;\n" FLASHATTN_TRY_WAIT
               " done, [%1], %2;\n"
               "selp.u32 %0, 1, 0, done;\n}\n"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done;
}
// Returns when the phase of this parity is complete. A new barrier counts as having completed a phase of parity 1.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// The numbered barriers of a thread block; number 0 is __syncthreads. threads: how many sync or arrive in all.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}

// Orders this thread's ordinary shared memory accesses before later asynchronous ones (TMA, wgmma).
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
// Orders this thread's ordinary accesses to global memory before later asynchronous ones.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;\n" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace flashattn_ext::ptx
