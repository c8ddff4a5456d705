// The forward of invariant calls on Hopper: forward.cuh with the keys in chunks (cuda/host/chunks.h). The chunks of a
// tile of queries follow one another in a thread block, within the steps of its mainloop (chunking_policy.cuh). With a
// Mask, whose tiles of keys are found as the mainloop goes, a chunk is a tile of queries of its own, which sees the
// keys of the chunk alone. invariant_decode.cuh has the kernel for decoding.
#pragma once

#include "cuda/sm90/invariant/invariant_decode.cuh"

namespace flashattn_ext::sm90 {

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
  using typename Base::Maps, typename Base::Score, typename Base::Shared, typename Base::Visibility,
      typename Base::SeenWork, typename Base::Work;
  using Earlier = EarlierChunks<kOutTiles, kGroups>;
  using Grid = ChunkGrid;

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
    const int row = work.row0 + this->warp_row + g();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = finish_chunks(&sums[r], sink);
      const bool exists = row + 8 * r < work.length_q;
      const int64_t at = int64_t{work.query_start} + row + 8 * r;
      if (exists && t() == 0) write_lse(p, work.b, work.h, at, sums[r].max, sums[r].sum);
      if (exists && t() == r && p.row_maxima.data) {
        write_largest(p, work.b, work.h, at, softmax.largest_logit);
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
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries), tiles = blocks * p.batch * p.heads_q;
  int* const taken = takes_tiles(p, tiles, Kernel::kMasks) ? static_cast<int*>(p.workspace) : nullptr;
  if (taken) zero_taken(p, taken);
  ChunkGrid grid{};
  static_cast<TileGrid&>(grid) = {forward_order(p, blocks, sizeof(T)), static_cast<int>(tiles), taken};
  grid.sums = reinterpret_cast<float4*>(static_cast<char*>(p.workspace) + kForwardBytes);
  const typename Kernel::Maps maps{query_map(p, p.q, p.head_dim, Kernel::kQueries),
                                   key_map(p, p.k, p.head_dim, Kernel::kKeys),
                                   key_map(p, p.v, p.head_dim_v, Kernel::kKeys)};
  launch_forward_kernel<Kernel>("sm90 invariant forward", p, tiles, maps, grid);
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
