// The forward of invariant calls on Hopper: forward.cuh with the keys in chunks (../common/chunks.h). To the mainloop a
// chunk is a tile of queries of its own, which sees the keys of the chunk alone. In a forward the chunks of a tile of
// queries follow one another in a thread block, which keeps the sum of those before in global memory; a tile with one
// chunk does not use it. invariant_decode.cuh has the kernel for decoding.
#pragma once

#include "invariant_decode.cuh"

namespace flashattn_ext::sm90 {

struct ChunkGrid : TileGrid {
  float4* sums;  // InvariantForward::kSumVectors for each consumer thread
};

template <class T, int kHeadDim, class TileOfRow, class Policies>
struct InvariantForward : ChunkedForward<T, kHeadDim, TileOfRow, Policies, ChunkWork> {
  using Base = ChunkedForward<T, kHeadDim, TileOfRow, Policies, ChunkWork>;
  using Base::kChunkTiles, Base::kGroups, Base::kKeys, Base::kOutTiles, Base::kQueries;
  using Base::out, Base::p, Base::shared, Base::softmax;
  using typename Base::Maps, typename Base::Score, typename Base::Shared, typename Base::Visibility,
      typename Base::Work;
  static constexpr int kSumVectors = kOutTiles + 2;  // of a thread: accumulators, sums, largest logits

  struct Loader : Base::Loader {
    __device__ void load_tiles(const TileGrid& grid) {
      each_work(
          this->p, grid, [&](int tile) { return grid.next(tile); },
          [&](const Work& work, int key_start) {
            publish_work(this->shared, work, &this->work_parity);
            if (work.sees_keys()) this->load_tile(work, key_start);
          });
      publish_work(this->shared, Work{}, &this->work_parity);
    }
  };

  const ChunkGrid& grid;

  __device__ InvariantForward(Shared& shared, const AttnParams& params, const Score& score, int group,
                              const ChunkGrid& grid)
      : Base(shared, params, score, group), grid(grid) {}

  // Calls body(work, first row of the keys) for every chunk of every tile of this thread block; as each_forward_work.
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
    this->compute_chunks([&](const Work& work) { return ChunkWork{work}; },
                         [&](const ChunkWork& work, ChunkSum(&sums)[2]) { end_chunk(work, sums); });
  }

  __device__ __forceinline__ void end_chunk(const ChunkWork& work, ChunkSum (&sums)[2]) {
    const Limits visible = work.mask(p).keys_of(work.row0, min(work.row0 + kQueries, work.length_q));
    const Limits chunks = chunks_of<kKeys>(visible);
    const int chunk = work.first / kChunkTiles;
    if (chunk < chunks.end - 1) add_earlier(sums);
    if (chunk > chunks.begin && chunk < chunks.end) {
      keep(sums);
    } else {
      finish(work, sums);
    }
  }

  // Vector i of this thread's sums over earlier chunks; those of a warp are adjacent.
  __device__ __forceinline__ float4* kept(int i) const {
    const int warp = static_cast<int>(blockIdx.x) * kGroups * 4 + static_cast<int>(threadIdx.x) / 32 - 4;
    return grid.sums + (int64_t{warp} * kSumVectors + i) * 32 + threadIdx.x % 32;
  }
  __device__ __forceinline__ void keep(const ChunkSum (&sums)[2]) const {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) *kept(n) = make_float4(out[n][0], out[n][1], out[n][2], out[n][3]);
    *kept(kOutTiles) = make_float4(sums[0].max, sums[0].sum, sums[1].max, sums[1].sum);
    *kept(kOutTiles + 1) = make_float4(softmax.largest_logit, 0, 0, 0);
  }
  __device__ __forceinline__ void add_earlier(ChunkSum (&sums)[2]) {
    const float4 before = *kept(kOutTiles);
    ChunkSum all[2] = {{before.x, before.y}, {before.z, before.w}};
    const ChunkFactors factors[2] = {add_chunk(&all[0], sums[0]), add_chunk(&all[1], sums[1])};
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float4 x = *kept(n);
      out[n][0] = factors[0].add(x.x, out[n][0]), out[n][1] = factors[0].add(x.y, out[n][1]);
      out[n][2] = factors[1].add(x.z, out[n][2]), out[n][3] = factors[1].add(x.w, out[n][3]);
    }
    sums[0] = all[0], sums[1] = all[1];
    softmax.largest_logit = fmaxf(softmax.largest_logit, kept(kOutTiles + 1)->x);
  }

  __device__ __forceinline__ void finish(const ChunkWork& work, ChunkSum (&sums)[2]) {
    const float sink = head_sink(p, work.h);
    const int row = work.row0 + this->warp_row + g();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = finish_chunks(&sums[r], sink);
      const bool exists = row + 8 * r < work.length_q;
      const int64_t at = int64_t{work.query_start} + row + 8 * r;
      if (exists && t() == 0) *row_statistic(p.lse, work.b, work.h, at) = lse_of(sums[r]);
      if (exists && t() == r && p.row_maxima.data) {
        *row_statistic(p.row_maxima, work.b, work.h, at) = softmax.largest_logit * kLn2<float>;
      }
      store_row(row_pointer<T>(p.out, work.b, work.h, at), out, r, factor, sums[r].sum == 0, exists,
                static_cast<int>(p.head_dim_v));
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    invariant_forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ typename Kernel::Maps maps,
                             const __grid_constant__ ChunkGrid grid,
                             const __grid_constant__ typename Kernel::Score score) {
  run_forward<Kernel>(p, maps, grid, score, grid);
}

template <class T, int kHeadDim, Options kOptions, template <class, int, class, class> class Kernel>
using InvariantKernel = Kernel<T, kHeadDim, TileOf<kernel_table::kSm90Invariant, T, kHeadDim, kOptions, kHeadDim>,
                               ForwardPolicies<kOptions>>;

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void invariant(const AttnParams& p) {
  static_assert(kHeadDim == kHeadDimV);
  using Kernel = InvariantKernel<T, kHeadDim, kOptions, InvariantForward>;
  if (p.batch * p.heads_q == 0) return;
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries), tiles = blocks * p.batch * p.heads_q;
  int* const taken = takes_tiles<Kernel>(p, tiles) ? static_cast<int*>(p.workspace) : nullptr;
  if (taken) zero_taken(p, taken);
  ChunkGrid grid{};
  static_cast<TileGrid&>(grid) = {forward_order(p, blocks, sizeof(T)), static_cast<int>(tiles), taken};
  grid.sums = reinterpret_cast<float4*>(static_cast<char*>(p.workspace) + kForwardBytes);
  const typename Kernel::Maps maps{query_map(p, p.q, p.head_dim, Kernel::kQueries),
                                   key_map(p, p.k, p.head_dim, Kernel::kKeys),
                                   key_map(p, p.v, p.head_dim_v, Kernel::kKeys)};
  const char* const name = "sm90 invariant forward";
  launch_early(invariant_forward_kernel<Kernel>, name, p,
               row_of_blocks(std::min<int64_t>(tiles, multiprocessors()), name, p), Kernel::kThreads,
               static_cast<int>(sizeof(typename Kernel::Shared)), p, maps, grid, Kernel::Score::of(p));
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t invariant_bytes(const AttnParams& p) {
  using Kernel = InvariantKernel<T, kHeadDim, kOptions, InvariantForward>;
  constexpr int kThreadBytes = Kernel::kSumVectors * static_cast<int>(sizeof(float4));
  const bool has_one_chunk = (p.is_varlen() ? p.total_k : p.seqlen_k) <= Kernel::kChunkTiles * Kernel::kKeys;
  return has_one_chunk ? 0 : static_cast<size_t>(multiprocessors()) * Kernel::kGroups * kGroupThreads * kThreadBytes;
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
ChunkKernel invariant_chunks() {
  using Kernel = InvariantKernel<T, kHeadDim, kOptions, InvariantDecode>;
  return {run_chunk_tasks<Kernel>, Kernel::kQueries, Kernel::kChunkTiles * Kernel::kKeys, Kernel::kKeys};
}

}  // namespace flashattn_ext::sm90
