// Asynchronous bulk additions of shared memory to global memory, one instruction in each wrapper (PTX ISA,
// "cp.reduce.async.bulk"). The asynchronous proxy reads the data: the threads that have written them call
// fence_async_shared before they signal the thread that starts the addition. Groups of additions belong to the thread
// that has started them.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.cuh"

namespace flashattn_ext::ptx {

// Starts adding `bytes` of floats, a multiple of 16, element by element; both addresses are multiples of 16 bytes.
__device__ __forceinline__ void bulk_add(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// What this thread has started since the last commit becomes one group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Waits until at most `kPending` of the newest groups have not yet been added to global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}
// The same until shared memory has been read and may be overwritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace flashattn_ext::ptx
