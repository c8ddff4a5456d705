// Wrappers of the instructions for what runs beside a thread, and for waiting for it: barriers in shared memory, copies
// by TMA, other thread blocks of a cluster, other kernels of a stream. cp.async is in memory.cuh.
#pragma once

#include <cuda.h>

#include "cuda/ptx/memory.cuh"

namespace flashattn_ext::ptx {

// --- barriers ------------------------------------------------------------------------------------------------------
//
// PTX ISA, "mbarrier" and "barrier". Register budgets of Hopper kernels ("setmaxnreg") are beside them.

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

// --- copies by TMA -------------------------------------------------------------------------------------------------
//
// Asynchronous copies between global and shared memory by TMA: of boxes of tensors into shared memory and out of it
// (PTX ISA, "cp.async.bulk.tensor" and "cp.reduce.async.bulk.tensor"), and additions of whole pieces of shared memory
// ("cp.reduce.async.bulk").
//
// The asynchronous proxy reads shared memory: the threads that have written it call fence_async_shared before they
// signal the thread that starts a store or an addition. Groups of those belong to the thread that has started them.

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map));
}

// Starts copying the box of the map that begins at (column, row, head, batch); what is outside the tensor becomes zero.
// `arrived` counts the bytes of the whole box.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, Barrier* arrived, int column, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(arrived)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Starts copying the box into one place of every thread block of the cluster whose bit is in `blocks`; the barrier in
// the same place of each of them counts the bytes that it gets.
__device__ __forceinline__ void tma_load_to_cluster(void* to, const CUtensorMap* map, Barrier* arrived, int column,
                                                    int row, int head, int batch, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;\n" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(arrived)), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(blocks)
      : "memory");
}
// Starts storing the box of the map that begins there; what is outside the tensor is not stored.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(map),
               "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
// Starts adding the box to what is there.
__device__ __forceinline__ void tma_add(const CUtensorMap* map, const void* from, int column, int row, int head,
                                        int batch) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(
          map),
      "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

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
// Waits until the shared memory of all but `kPending` groups has been read and may be overwritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

// --- clusters ------------------------------------------------------------------------------------------------------
//
// Thread blocks of a cluster read and write each other's shared memory (PTX ISA, "mapa", "st.async",
// "barrier.cluster").

// The number of this thread block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// Waits for every thread of the cluster that has not ended.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
// The address in another thread block's shared memory that corresponds to `local` in this one's.
__device__ __forceinline__ uint32_t address_in(uint32_t rank, const void* local) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
  return address;
}
// Starts storing 16 bytes in another thread block; its barrier `arrived` counts them.
__device__ __forceinline__ void store_async(uint32_t to, const float (&x)[4], uint32_t arrived) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(to),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(arrived)
               : "memory");
}
// Starts storing 4 bytes there.
__device__ __forceinline__ void store_async(uint32_t to, int x, uint32_t arrived) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];\n" ::"r"(to), "r"(x),
               "r"(arrived)
               : "memory");
}
// Starts copying `bytes`, a multiple of 16, of this thread block's shared memory to another thread block; its barrier
// `arrived` counts them. The asynchronous proxy reads the data (fence_async_shared).
__device__ __forceinline__ void bulk_send(uint32_t to, const void* from, int bytes, uint32_t arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
      "r"(shared_address(from)), "r"(bytes), "r"(arrived)
      : "memory");
}
// Arrives at a barrier of another thread block, to signal that this block has read data which the other one may
// overwrite. It does not publish data that this thread has written: that takes .release.cluster, which puts a
// device-wide fence before each arrival and takes longer than a product.
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Arrives there if `wanted`, without a branch.
__device__ __forceinline__ void barrier_arrive_in_if(bool wanted, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %1, 0;\n"
      "@wanted mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(barrier),
      "r"(static_cast<int>(wanted))
      : "memory");
}
// As barrier_wait, for a barrier that another thread block arrives at.
__device__ __forceinline__ void barrier_wait_for_cluster(Barrier* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// --- kernels of a stream -------------------------------------------------------------------------------------------
//
// Their order (PTX ISA, "griddepcontrol"). GPUs before Hopper lack these instructions: there a kernel begins when the
// previous one has ended.

// Returns when all earlier kernels of the stream have ended and what they wrote is visible. Until then a kernel that
// launch_early has started reads and writes nothing in global memory; it may prefetch.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Lets thread blocks of the next kernel become resident, once every thread block of this one has called it.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}

}  // namespace flashattn_ext::ptx
