// The order of additions to dq in a deterministic call: key tiles add to a tile of queries in ascending order. A
// counter in the workspace (BackwardWorkspace::dq_added) says how many have added. In kernels that can read a Mask it
// says instead which one has added last (its number plus 1, or 0 before the first), unless the call has a BlockMask.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/tile/rows.cuh"

namespace flashattn_ext {

// How many key tiles of `keys` keys add before key tile n to the `queries` queries from row0 on.
template <class Mask>
__device__ __forceinline__ int key_tiles_before(const Mask& mask, int n, int keys, int row0, int queries) {
  return n - mask.keys_of(row0, min(row0 + queries, mask.seqlen_q)).begin / keys;
}

// One key tile's place in that order, for the threads that add together. before(): the value of the counter at which
// this key tile may add. after(): its value once the tile has added. sync(): a barrier of these threads. One of them,
// the leader, reads and writes the counter.
template <class Before, class After, class Sync>
struct DqOrder {
  int* added;
  bool leader;
  Before before;
  After after;
  Sync sync;

  __device__ __forceinline__ void await_earlier_keys() const {
    if (leader) {
      const int wanted = before();
      while (ptx::load_acquire(added) != wanted) __nanosleep(64);
    }
    sync();
  }
  // Whether that wait would end at once. The leader calls it.
  __device__ __forceinline__ bool earlier_keys_have_added() const { return ptx::load_acquire(added) == before(); }
  // The leader's store releases the additions of all these threads, which the barrier orders before it.
  __device__ __forceinline__ void admit_later_keys() const {
    sync();
    if (leader) ptx::store_release(added, after());
  }
};
template <class Before, class After, class Sync>
DqOrder(int*, bool, Before, After, Sync) -> DqOrder<Before, After, Sync>;

}  // namespace flashattn_ext
