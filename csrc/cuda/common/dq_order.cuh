// The order of additions to dq in a deterministic call: key tiles add to a tile of queries in ascending order. A
// counter in the workspace (BackwardWorkspace::dq_added) says how many have added.
#pragma once

#include "../ptx/memory.cuh"
#include "rows.cuh"

namespace flashattn_ext {

// How many key tiles of `keys` keys add before key tile n to the `queries` queries from row0 on.
__device__ __forceinline__ int key_tiles_before(const Mask32& mask, int n, int keys, int row0, int queries) {
  return n - mask.keys_of(row0, min(row0 + queries, mask.seqlen_q)).begin / keys;
}

// One key tile's part in that order, for the threads that add together. before() is the number of key tiles that come
// first, sync() a barrier of these threads; one of them, the leader, reads and writes the counter.
template <class Before, class Sync>
struct DqOrder {
  int* added;
  bool leader;
  Before before;
  Sync sync;

  __device__ __forceinline__ void await_earlier_keys() const {
    if (leader) {
      const int wanted = before();
      while (ptx::load_acquire(added) != wanted) __nanosleep(64);
    }
    sync();
  }
  // What these threads have added is visible to those who see the counter.
  __device__ __forceinline__ void admit_later_keys() const {
    __threadfence();
    sync();
    if (leader) ptx::store_release(added, before() + 1);
  }
};
template <class Before, class Sync>
DqOrder(int*, bool, Before, Sync) -> DqOrder<Before, Sync>;

}  // namespace flashattn_ext
