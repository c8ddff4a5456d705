// Asynchronous copies between global and shared memory by TMA, one instruction in each wrapper: of boxes of tensors
// into shared memory and out of it (PTX ISA, "cp.async.bulk.tensor" and "cp.reduce.async.bulk.tensor"), and
// additions of whole pieces of shared memory ("cp.reduce.async.bulk").
//
// The asynchronous proxy reads shared memory: the threads that have written it call fence_async_shared before they
// signal the thread that starts a store or an addition. Groups of those belong to the thread that has started them.
#pragma once

#include <cuda.h>

#include "cuda/ptx/barrier.cuh"

namespace flashattn_ext::ptx {

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

}  // namespace flashattn_ext::ptx
