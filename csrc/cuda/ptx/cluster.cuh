// Thread blocks of a cluster, which read and write each other's shared memory, one instruction in each wrapper (PTX
// ISA, "mapa", "st.async", "barrier.cluster").
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace flashattn_ext::ptx {

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

}  // namespace flashattn_ext::ptx
