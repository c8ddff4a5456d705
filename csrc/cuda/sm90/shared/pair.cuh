// Exchanges between the two thread blocks of a cluster: tile numbers and, in the backward of head dims above 256,
// partial scores. There each block has one half of the columns of q, k, v and dout, and scores are sums over these
// columns: a warpgroup adds the partial sums of the same warpgroup of the other block. In the backward of head dims
// from 193 to 256 the blocks exchange dS^T instead (backward_wide.cuh).
#pragma once

#include "cuda/ptx/async.cuh"
#include "cuda/sm90/shared/tiles.h"

namespace flashattn_ext::sm90 {

constexpr bool is_paired(int head_dim) { return head_dim > 256; }

// Which half this block has, of the columns or of the keys.
template <bool kPaired>
__device__ __forceinline__ int half_of_pair() {
  return kPaired ? static_cast<int>(ptx::cluster_rank()) : 0;
}

// The receive buffer for the other block's partial scores of a warpgroup: kTiles accumulator tiles, of each thread the
// registers of the corresponding thread.
template <int kTiles>
struct OtherPart {
  alignas(16) float scores[kTiles][kGroupThreads][4];
  ptx::Barrier full, empty;  // empty: it may be overwritten by the other block

  __device__ void init() {
    ptx::barrier_init(&full, 1);
    ptx::barrier_init(&empty, kGroupThreads / 32);
  }

  // Sends this warpgroup's partial scores to the other block and adds the received ones: then both have the same sums.
  // Both blocks call it equally often. parity: of the barriers, 0 at first.
  __device__ __forceinline__ void exchange(float (&own)[kTiles][4], uint32_t* parity) {
    const uint32_t other = ptx::cluster_rank() ^ 1;
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    if (thread == 0) ptx::barrier_arrive_expect(&full, static_cast<int>(sizeof(scores)));
    ptx::barrier_wait(&empty, *parity ^ 1);
    const uint32_t to = ptx::address_in(other, &scores[0][thread]), arrived = ptx::address_in(other, &full);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) ptx::store_async(to + n * static_cast<int>(sizeof(scores[0])), own[n], arrived);
    ptx::barrier_wait_for_cluster(&full, *parity);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 part = *reinterpret_cast<const float4*>(scores[n][thread]);
      own[n][0] += part.x, own[n][1] += part.y, own[n][2] += part.z, own[n][3] += part.w;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive_in(ptx::address_in(other, &empty));
    *parity ^= 1;
  }
};

// Passes the number of the next tile from the first block of a pair to the second. One thread of each block uses it.
struct SharedTile {
  int number;
  ptx::Barrier full, empty;  // full is the second block's, empty the first block's

  __device__ void init() {
    ptx::barrier_init(&full, 1);
    ptx::barrier_init(&empty, 1);
  }

  // The number that take() returns in the first block.
  template <class Take>
  __device__ __forceinline__ int next(const Take& take, uint32_t* parity) {
    int tile;
    if (ptx::cluster_rank() == 0) {
      tile = take();
      ptx::barrier_wait(&empty, *parity ^ 1);
      ptx::store_async(ptx::address_in(1, &number), tile, ptx::address_in(1, &full));
    } else {
      ptx::barrier_arrive_expect(&full, static_cast<int>(sizeof(number)));
      ptx::barrier_wait_for_cluster(&full, *parity);
      tile = *static_cast<volatile int*>(&number);
      ptx::barrier_arrive_in(ptx::address_in(0, &empty));
    }
    *parity ^= 1;
    return tile;
  }
};

// Between the initialisation of barriers and their use, and at the end of a kernel: the other block may still arrive at
// a barrier of this one.
template <bool kPaired>
__device__ __forceinline__ void sync_pair_or_block() {
  kPaired ? ptx::cluster_sync() : __syncthreads();
}

}  // namespace flashattn_ext::sm90
