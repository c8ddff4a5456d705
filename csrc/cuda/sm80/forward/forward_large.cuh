// Forward for head dims above 256 in 16 bits, of calls without options (kPlain), on every GPU since Ampere. The
// fp32 accumulators of `out` fill the registers of all warps: each warp holds some columns of all queries. The same
// warps divide the scores by queries and keys, and exchange the weights through shared memory. So every product is
// computed once, with as few reads of shared memory as tiles of this size need. Keys and values are copied in chunks,
// in the order of their use: first the keys of a step, 128 columns at a time, then its values, kValueKeys rows at a
// time. A ring of chunks in shared memory prefetches them.
#pragma once

#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm80/shared/tiles.h"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn_ext::sm80 {

// kShared: bytes of shared memory that a thread block may have.
template <class T, int kHeadDim, int kShared>
struct LargeForward {
  using Core = TensorCore<T>;
  using Score = ScoreRule<float, PlainProducts<true>>;
  static constexpr ForwardTile kTile = large_forward_tile<T, kHeadDim, kShared>();
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32;
  static constexpr int kQueries = kTile.queries(), kKeys = kTile.keys, kStages = kTile.stages;
  // One warp's part of the scores is 32 queries and kWarpKeys keys.
  static constexpr int kRowWarps = kQueries / 32, kKeyWarps = kWarps / kRowWarps, kWarpKeys = kKeys / kKeyWarps;
  using Scores = float[2][kWarpKeys / 8][4];
  static_assert(kTile.column_warps == kWarps && kQueries % 32 == 0 && kWarps % kRowWarps == 0 && kWarpKeys % 16 == 0);
  // One warp's part of `out` is all queries and kWarpColumns columns.
  static constexpr int kWarpColumns = kHeadDim / kWarps;
  using Sums = float[kQueries / 16][kWarpColumns / 8][4];
  static_assert(kHeadDim % (16 * kWarps) == 0);
  // Chunks.
  static constexpr int kKeyColumns = 128, kValueKeys = kKeys / 4;
  static constexpr int kKeyChunks = kHeadDim / kKeyColumns, kChunks = kKeyChunks + kKeys / kValueKeys;  // per step
  using RowTile = SwizzledTile<T, kHeadDim>;  // tiles of queries and values
  using KeyTile = SwizzledTile<T, kKeyColumns>;
  static constexpr int kChunkElements = kKeys * kKeyColumns;
  static_assert(kValueKeys * kHeadDim <= kChunkElements && kHeadDim % kKeyColumns == 0 && kValueKeys % 16 == 0);
  static constexpr int kWeightStride = kTileStride<T, kKeys>;

  struct Shared {
    T q[kQueries * kHeadDim];
    T chunks[kStages][kChunkElements];
    T weights[kQueries * kWeightStride];
    float parts[kKeyWarps][kQueries];  // partial maxima or sums of a row, from the warps that have its keys
    float factors[kQueries];           // what rows of `out` are multiplied by
  };
  static_assert(sizeof(Shared) <= kShared);

  // A chunk of the walk over the key tiles, the last one first.
  struct Chunk {
    int n, part;  // key tile; number of the chunk in its step
    __device__ __forceinline__ void advance() {
      if (++part < kChunks) return;
      part = 0;
      --n;
    }
  };

  const AttnParams& p;
  const Score& score;
  Shared& shared;
  int b = 0, h = 0, row0 = 0;  // row0: first query of the tile
  int length_q = 0, length_k = 0;
  float tolerance = 0;
  const T *k = nullptr, *v = nullptr;  // rows of the head's first key
  Chunk ahead{};                       // what is loaded next, until tile `first` is complete
  int first = 0, stage = 0;            // stage: of the chunk that is used next
  Sums out;
  OnlineSoftmax<> softmax[2];  // state of this warp's 32 queries: maxima over all keys, sums over this lane's keys

  __device__ LargeForward(const AttnParams& params, const Score& score, Shared& shared)
      : p(params), score(score), shared(shared) {}

  static __device__ int warp() { return threadIdx.x / 32; }
  // The first of this warp's queries and keys of the scores, and of its columns of `out`.
  static __device__ int warp_row() { return warp() % kRowWarps * 32; }
  static __device__ int key_warp() { return warp() / kRowWarps; }
  static __device__ int warp_column() { return warp() * kWarpColumns; }
  __device__ UnplacedMask32 mask() const { return UnplacedMask32(p, length_q, length_k); }

  __device__ void run(const TileOrder& order) {
    const int heads = static_cast<int>(p.heads_q);
    const auto [head, block] = order.index(blockIdx.x, heads * static_cast<int>(p.batch));
    b = head / heads;
    h = head % heads;
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const int64_t hk = h / p.group_size();
    length_q = static_cast<int>(queries.length);
    length_k = static_cast<int>(keys.length);
    k = row_pointer<const T>(p.k, b, hk, keys.start);
    v = row_pointer<const T>(p.v, b, hk, keys.start);
    const float sink = head_sink(p, h);
    tolerance = sink_counts(sink) ? 0.f : kTolerance;  // as in forward.cuh
    // The longest tiles of a causal head start first. A sequence may be longer than the grid was sized for.
    const int step = order.blocks * kQueries;
    for (row0 = (order.blocks - 1 - block) * kQueries; row0 < length_q; row0 += step) {
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) set_zero(out[i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        softmax[i].start(sink);
        if (key_warp() != 0) softmax[i].sum[0] = softmax[i].sum[1] = 0;  // a row's sink counts once
      }
      walk_keys(queries.start + row0);
      finish_tile(queries.start + row0);
      __syncthreads();
    }
  }

  // row: of the tile's first query in memory.
  __device__ void walk_keys(int64_t row) {
    const int row_end = min(row0 + kQueries, length_q);
    const Limits visible = mask().keys_of(row0, row_end), full = mask().keys_of_all(row0, row_end);
    if (visible.end == visible.begin) return;
    const int first_full = (full.begin + kKeys - 1) / kKeys, end_full = full.end / kKeys;  // tiles that need no mask
    first = visible.begin / kKeys;
    const int last = (visible.end - 1) / kKeys;
    ahead = {last, 0};
    stage = 0;
    load_tile<RowTile, kQueries, kThreads>(shared.q, row_pointer<const T>(p.q, b, h, row), p.q.row_stride,
                                           row_end - row0, static_cast<int>(p.head_dim));
    for (int i = 0; i < kStages - 1; ++i) load_chunk(i);  // the first one with the queries
    for (int n = last; n >= first; --n) {
      Scores scores;
#pragma unroll
      for (int i = 0; i < 2; ++i) set_zero(scores[i]);
#pragma unroll 1
      for (int part = 0; part < kKeyChunks; ++part) score_chunk(scores, part, next_chunk());
      weigh(scores, n, n < first_full || n >= end_full);
#pragma unroll 1
      for (int part = 0; part < kKeys / kValueKeys; ++part) {
        const T* const values = next_chunk();  // its barrier makes the weights and factors of all warps visible
        if (part == 0) rescale_rows();
        value_chunk(values, part);
      }
    }
    ptx::cp_async_wait<0>();
  }

  // Starts copying the chunk `ahead`, if there is one; commits a group of copies in any case.
  __device__ void load_chunk(int to) {
    if (ahead.n >= first) {
      T* const chunk = shared.chunks[to];
      const int key = ahead.n * kKeys, value = key + (ahead.part - kKeyChunks) * kValueKeys;
      if (ahead.part < kKeyChunks) {
        const int column = ahead.part * kKeyColumns;
        load_tile<KeyTile, kKeys, kThreads>(chunk, k + key * p.k.row_stride + column, p.k.row_stride, length_k - key,
                                            static_cast<int>(p.head_dim) - column);
      } else {
        load_tile<RowTile, kValueKeys, kThreads>(chunk, v + value * p.v.row_stride, p.v.row_stride, length_k - value,
                                                 static_cast<int>(p.head_dim_v));
      }
      ahead.advance();
    }
    ptx::cp_async_commit();
  }

  // Waits for the next chunk, and starts the copy that overwrites the chunk before it, which no warp reads any more.
  __device__ const T* next_chunk() {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    const T* const chunk = shared.chunks[stage];
    load_chunk(stage == 0 ? kStages - 1 : stage - 1);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    return chunk;
  }

  // scores += Q K^T for kKeyColumns columns
  __device__ void score_chunk(Scores& scores, int part, const T* keys) const {
    const T* const q = shared.q + part * kKeyColumns;
    const int q_place = RowTile::first_place_a() + warp_row() * RowTile::kRowBytes;
    const int key_place = KeyTile::first_place_b() + key_warp() * kWarpKeys * KeyTile::kRowBytes;
    accumulate<T, kKeyColumns / Core::kK>(
        scores,
        [&](int i, int step) {
          return RowTile::load_a(q + i * 16 * kHeadDim, RowTile::moved(q_place, step * Core::kK));
        },
        [&](typename Core::B(&pair)[2], int step, int c) {
          KeyTile::load_b(pair, keys + c * 8 * kKeyColumns, KeyTile::moved(key_place, step * Core::kK));
        });
  }

  // Scores against key tile n become weights in shared memory. masked: by causal or window.
  __device__ void weigh(Scores& scores, int n, bool masked) {
    store_scores(scores, score);
    if (masked) {
      hide_keys<true, true>(scores, mask(), row0 + warp_row() + quad(),
                            n * kKeys + key_warp() * kWarpKeys + 2 * lane_in_quad());
    }
    unrolled<2, 2>([&](int i, int r) {
      const float largest = OnlineSoftmax<>::largest(scores[i], r);
      if (lane_in_quad() == 0) shared.parts[key_warp()][row(i, r)] = largest;
    });
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest[r] = shared.parts[0][row(i, r)];
#pragma unroll
        for (int w = 1; w < kKeyWarps; ++w) largest[r] = fmaxf(largest[r], shared.parts[w][row(i, r)]);
      }
      softmax[i].weigh(scores[i], largest, score, tolerance, [&](const float (&shrink)[2]) {
        if (key_warp() == 0 && lane_in_quad() < 2)
          shared.factors[row(i, lane_in_quad())] = lane_in_quad() ? shrink[1] : shrink[0];
      });
      T* const to = shared.weights + row(i, 0) * kWeightStride + key_warp() * kWarpKeys + 2 * lane_in_quad();
#pragma unroll
      for (int c = 0; c < kWarpKeys / 8; ++c) {
        Core::store_pair(to + c * 8, scores[i][c][0], scores[i][c][1]);
        Core::store_pair(to + c * 8 + 8 * kWeightStride, scores[i][c][2], scores[i][c][3]);
      }
    }
  }
  // Row g or g + 8 of row tile i of this warp's scores, within the query tile.
  static __device__ int row(int i, int r) { return warp_row() + i * 16 + quad() + 8 * r; }

  __device__ void rescale_rows() {
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i) {
      const float shrink[2] = {shared.factors[i * 16 + quad()], shared.factors[i * 16 + quad() + 8]};
      rescale(out[i], shrink);
    }
  }

  // out += P V for kValueKeys keys
  __device__ void value_chunk(const T* values, int part) {
    const T* const weights = shared.weights + part * kValueKeys;
    accumulate<RowTile, kValueKeys / Core::kK>(
        out, typename RowTile::Places(),
        [&](int i, int step) { return Core::load_a(weights, kWeightStride, i * 16, step * Core::kK); }, values,
        warp_column());
  }

  // row_in_memory: of the tile's first query.
  __device__ void finish_tile(int64_t row_in_memory) {
    const int rows = min(length_q - row0, kQueries);
    unrolled<2, 2>([&](int i, int r) {
      const float sum = softmax[i].total(r);
      if (lane_in_quad() == 0) shared.parts[key_warp()][row(i, r)] = sum;
    });
    __syncthreads();
    if (key_warp() == 0) {
      unrolled<2, 2>([&](int i, int r) {
        float sum = 0;
        for (int w = 0; w < kKeyWarps; ++w) sum += shared.parts[w][row(i, r)];
        if (lane_in_quad() == 0) shared.factors[row(i, r)] = sum == 0 ? 0.f : 1 / sum;
        if (row(i, r) < rows) softmax[i].store_statistics(p, b, h, row_in_memory + row(i, r), r, sum);
      });
    }
    __syncthreads();
    // `out` takes the place of the queries.
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = i * 16 + quad() + 8 * r;
        const float factor = shared.factors[row];
#pragma unroll
        for (int c = 0; c < kWarpColumns / 8; ++c) {
          const float x = factor == 0 ? 0.f : out[i][c][2 * r] * factor;
          const float y = factor == 0 ? 0.f : out[i][c][2 * r + 1] * factor;
          Core::store_pair(shared.q + RowTile::offset(row, warp_column() + c * 8 + 2 * lane_in_quad()), x, y);
        }
      }
    }
    __syncthreads();
    store_tile<RowTile, kQueries, kHeadDim, kThreads>(row_pointer<T>(p.out, b, h, row_in_memory), p.out.row_stride,
                                                      shared.q, rows, static_cast<int>(p.head_dim_v));
  }
};

template <class T, int kHeadDim, int kShared>
__global__ void __launch_bounds__(LargeForward<T, kHeadDim, kShared>::kThreads, 1)
    large_forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ TileOrder order,
                         const __grid_constant__ ScoreRule<float, PlainProducts<true>> score) {
  if constexpr (kRunsHere<kShared>) {
    extern __shared__ __align__(16) unsigned char shared[];
    using Kernel = LargeForward<T, kHeadDim, kShared>;
    Kernel(p, score, *reinterpret_cast<SharedOf<Kernel>*>(shared)).run(order);
  } else {
    __trap();
  }
}

template <class T, int kHeadDim, int kShared>
void launch_forward_large(const AttnParams& p) {
  using Kernel = LargeForward<T, kHeadDim, kShared>;
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries);
  launch(large_forward_kernel<T, kHeadDim, kShared>, "forward", p, blocks * p.batch * p.heads_q, Kernel::kThreads,
         kSharedBytesOf<Kernel>, forward_order(p, blocks, sizeof(T)), ScoreRule<float, PlainProducts<true>>::of(p));
}

template <class T, int kHeadDim>
void forward_large(const AttnParams& p) {
  with_shared_memory(most_shared_memory(),
                     [&](auto size) { launch_forward_large<T, kHeadDim, decltype(size)::value>(p); });
}

}  // namespace flashattn_ext::sm80
