// The forward of invariant calls on Hopper: forward.cuh with the keys in chunks (cuda/host/chunks.h). The chunks of a
// tile of queries follow one another in a thread block, within the steps of its mainloop (ChunksInTurn). With a Mask,
// whose tiles of keys are found as the mainloop goes, a chunk is a tile of queries of its own, which sees the keys of
// the chunk alone. invariant_decode.cuh has the kernel for decoding.
#pragma once

#include "cuda/score/chunks.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/invariant/invariant_decode.cuh"
#include "cuda/sm90/shared/forward_work.cuh"

namespace flashattn_ext::sm90 {

// Policies of the Hopper forward (forward.cuh) for invariant calls: where the keys of a row are divided in chunks
// (cuda/host/chunks.h) within a tile of queries.
//   Work                   what the consumer warpgroups compute of a ForwardWork
//   begins(n)              whether a chunk ends before the step of key tile n, which is not the first one
//   end_scores(n, softmax) before the softmax of that step: puts the sums of the chunk aside
//   end_values(out)        after the products of the chunk: puts `out` aside, and starts it anew

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

struct ChunkGrid : TileGrid {
  float4* sums;  // EarlierChunks::vectors
};

template <int kOutTiles, int kGroups>
struct ChunksAsTiles : ChunksApart<ChunkWork> {
  EarlierChunks<kOutTiles, kGroups> earlier;
};
template <int kKeys, int kOutTiles, int kGroups, bool kMasks>
using ForwardChunking =
    std::conditional_t<kMasks, ChunksAsTiles<kOutTiles, kGroups>, ChunksInTurn<kKeys, kOutTiles, kGroups>>;

template <class T, int kHeadDim, class TileOfRow, class Policies>
using ForwardInChunks =
    ChunkedForward<T, kHeadDim, TileOfRow, Policies,
                   ForwardChunking<TileOfRow::kTile.keys, kHeadDim / 8, TileOfRow::kTile.groups, Policies::kMasks>>;

template <class T, int kHeadDim, class TileOfRow, class Policies>
struct InvariantForward : ForwardInChunks<T, kHeadDim, TileOfRow, Policies> {
  using Base = ForwardInChunks<T, kHeadDim, TileOfRow, Policies>;
  using Base::kChunkTiles, Base::kGroups, Base::kKeys, Base::kMasks, Base::kOutTiles, Base::kQueries;
  using Base::out, Base::p, Base::shared, Base::softmax;
  using typename Base::Score, typename Base::Shared, typename Base::Visibility, typename Base::SeenWork,
      typename Base::Work;
  using Earlier = EarlierChunks<kOutTiles, kGroups>;

  float largest = -infinity();  // with a Mask: the largest logit of the chunks so far

  __device__ InvariantForward(Shared& shared, const AttnParams& params, const Score& score, int group,
                              const ChunkGrid& grid)
      : Base(shared, params, score, group, grid) {
    this->chunking.earlier.vectors = grid.sums;
  }

  // With a Mask, whose producer calls it: calls body(work, first row of the keys) for every chunk of every tile of this
  // thread block; as each_forward_work.
  template <class Take, class Body>
  static __device__ __forceinline__ void each_work(const AttnParams& p, const TileGrid& grid, const Take& take,
                                                   const Body& body) {
    each_forward_work<kQueries, kKeys, false, Visibility::kTakesLate>(
        p, grid, static_cast<int>(blockIdx.x), take, [&](const Work& work, int key_start) {
          int last = work.last;
          do {
            Work part = work;
            part.last = last;
            if (work.sees_keys()) part.first = max(work.first, last / kChunkTiles * kChunkTiles);
            last = part.first - 1;
            body(part, key_start);
          } while (last >= work.first);
        });
  }

  __device__ __forceinline__ void compute_tiles() {
    this->compute_chunks([&](const Work& work) { return SeenWork{work}; },
                         [&](const SeenWork& work, ChunkSum(&sums)[2]) { end_chunk(work, sums); });
  }

  __device__ __forceinline__ void end_chunk(const SeenWork& work, ChunkSum (&sums)[2]) {
    Earlier& earlier = this->chunking.earlier;
    earlier.add_to(out, sums);
    if constexpr (kMasks) {
      if (earlier.exist) softmax.largest_logit = fmaxf(softmax.largest_logit, largest);
      largest = softmax.largest_logit;
      const Limits visible = work.mask(p).keys_of(work.row0, min(work.row0 + kQueries, work.length_q));
      const Limits chunks = chunks_of<kKeys>(visible);
      const int chunk = work.first / kChunkTiles;
      if (chunk > chunks.begin && chunk < chunks.end) return earlier.keep(out, sums);
    }
    earlier.exist = false;
    finish(work, sums);
  }

  __device__ __forceinline__ void finish(const Work& work, ChunkSum (&sums)[2]) {
    const float sink = head_sink(p, work.h);
    const int row = work.row0 + this->warp_row + quad();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = finish_chunks(&sums[r], sink);
      const bool exists = row + 8 * r < work.length_q;
      const int64_t at = int64_t{work.query_start} + row + 8 * r;
      if (exists && lane_in_quad() == 0) store_lse(p, work.b, work.h, at, sums[r].max, sums[r].sum);
      if (exists && lane_in_quad() == r && p.row_maxima.data) {
        store_largest(p, work.b, work.h, at, softmax.largest_logit);
      }
      store_row(row_pointer<T>(p.out, work.b, work.h, at), out, r, factor, sums[r].sum == 0, exists,
                static_cast<int>(p.head_dim_v));
    }
  }
};

template <class T, int kHeadDim, Options kOptions, template <class, int, class, class> class Kernel>
using InvariantKernel = Kernel<T, kHeadDim, TileOf<kernel_table::kSm90Invariant, T, kHeadDim, kOptions, kHeadDim>,
                               ForwardPolicies<kOptions>>;

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void invariant(const AttnParams& p) {
  static_assert(kHeadDim == kHeadDimV);
  using Kernel = InvariantKernel<T, kHeadDim, kOptions, InvariantForward>;
  if (p.batch * p.heads_q == 0) return;
  ChunkGrid grid{};
  static_cast<TileGrid&>(grid) =
      forward_grid(p, tile_count(p.seqlen_q, Kernel::kQueries), sizeof(T), 1, Kernel::kMasks);
  if (grid.taken) zero_taken(p, grid.taken);
  grid.sums = reinterpret_cast<float4*>(static_cast<char*>(p.workspace) + kForwardBytes);
  const ForwardMaps maps{query_map(p, p.q, p.head_dim, Kernel::kQueries), key_map(p, p.k, p.head_dim, Kernel::kKeys),
                         key_map(p, p.v, p.head_dim_v, Kernel::kKeys)};
  launch_forward_kernel<Kernel>("sm90 invariant forward", p, grid.tiles, maps, grid);
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t invariant_bytes(const AttnParams& p) {
  using Kernel = InvariantKernel<T, kHeadDim, kOptions, InvariantForward>;
  constexpr int kThreadBytes = Kernel::Earlier::kVectors * static_cast<int>(sizeof(float4));
  const bool has_one_chunk = key_rows(p) <= Kernel::kChunkTiles * Kernel::kKeys;
  return has_one_chunk ? 0 : static_cast<size_t>(multiprocessors()) * Kernel::kGroups * kGroupThreads * kThreadBytes;
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void invariant_chunks(const AttnParams& p, const ChunkPartials& partials) {
  run_chunk_tasks<InvariantKernel<T, kHeadDim, kOptions, InvariantDecode>>(p, partials);
}

}  // namespace flashattn_ext::sm90
