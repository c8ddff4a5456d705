// Policies of the Hopper forward (forward.cuh) for invariant calls: where the keys of a row are divided in chunks
// (cuda/host/chunks.h) within a tile of queries.
//   Work                   what the consumer warpgroups compute of a ForwardWork
//   begins(n)              whether a chunk ends before the step of key tile n, which is not the first one
//   end_scores(n, softmax) before the softmax of that step: puts the sums of the chunk aside
//   end_values(out)        after the products of the chunk: puts `out` aside, and starts it anew
#pragma once

#include "cuda/score/chunks.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/shared/forward_work.cuh"

namespace flashattn_ext::sm90 {

// The sums of the chunks so far of a tile of queries, which a consumer thread keeps in global memory, in the L2 cache.
template <int kOutTiles, int kGroups>
struct EarlierChunks {
  static constexpr int kVectors = kOutTiles + 2;  // per thread: accumulators, their sums, those of the chunk that ends

  float4* vectors;  // vectors of all threads
  bool exist = false;

  // Vector i of this thread; those of a warp are adjacent.
  __device__ __forceinline__ float4& at(int i) const {
    const int warp = static_cast<int>(blockIdx.x) * kGroups * 4 + static_cast<int>(threadIdx.x) / 32 - 4;
    return vectors[(int64_t{warp} * kVectors + i) * 32 + threadIdx.x % 32];
  }
  __device__ __forceinline__ void store(int i, const ChunkSum (&sums)[2]) const {
    at(i) = make_float4(sums[0].max, sums[0].sum, sums[1].max, sums[1].sum);
  }
  __device__ __forceinline__ void load(int i, ChunkSum (&sums)[2]) const {
    const float4 x = at(i);
    sums[0] = {x.x, x.y};
    sums[1] = {x.z, x.w};
  }

  __device__ __forceinline__ void keep(const float (&out)[kOutTiles][4], const ChunkSum (&sums)[2]) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) at(n) = make_float4(out[n][0], out[n][1], out[n][2], out[n][3]);
    store(kOutTiles, sums);
    exist = true;
  }
  // Adds them to `out` and `sums` of one chunk.
  __device__ __forceinline__ void add_to(float (&out)[kOutTiles][4], ChunkSum (&sums)[2]) const {
    if (!exist) return;
    ChunkSum all[2];
    load(kOutTiles, all);
    const ChunkFactors factors[2] = {add_chunk(&all[0], sums[0]), add_chunk(&all[1], sums[1])};
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float4 x = at(n);
      out[n][0] = factors[0].add(x.x, out[n][0]), out[n][1] = factors[0].add(x.y, out[n][1]);
      out[n][2] = factors[1].add(x.z, out[n][2]), out[n][3] = factors[1].add(x.w, out[n][3]);
    }
    sums[0] = all[0], sums[1] = all[1];
  }
};

// The chunks of a tile of queries follow one another in the steps of the mainloop, whose products go on.
template <int kKeys, int kOutTiles, int kGroups>
struct ChunksInTurn {
  using Work = ForwardWork;
  EarlierChunks<kOutTiles, kGroups> earlier;

  static __device__ __forceinline__ bool begins(int n) { return (n + 1) % kTilesOfChunk<kKeys> == 0; }
  __device__ __forceinline__ void end_scores(int n, OnlineSoftmax<>& softmax) const {
    if (!begins(n)) return;
    earlier.store(kOutTiles + 1, {{softmax.max[0], softmax.total(0)}, {softmax.max[1], softmax.total(1)}});
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax.max[r] = -infinity();
      softmax.sum[r] = 0;
    }
  }
  __device__ __forceinline__ void end_values(float (&out)[kOutTiles][4]) {
    ChunkSum sums[2];
    earlier.load(kOutTiles + 1, sums);
    earlier.add_to(out, sums);
    earlier.keep(out, sums);
    set_zero(out);
  }
};

}  // namespace flashattn_ext::sm90
