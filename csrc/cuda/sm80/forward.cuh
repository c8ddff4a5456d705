// Forward: one thread block computes one tile of queries of one head, walking over the key tiles that it sees, with an
// online softmax (Dao 2023, "FlashAttention-2", Algorithm 1). K(n - 1) is on its way while V(n) is used, and V(n) while
// K(n) is.
#pragma once

#include "../common/launch.cuh"
#include "../common/scores.cuh"
#include "../common/tile.cuh"
#include "../common/tile_order.cuh"
#include "tiles.h"

namespace flashattn_ext::sm80 {

template <class T, int kHeadDim, bool kDropout>
struct Forward {
  using Core = TensorCore<T>;
  using Score = PlainScore<float, true>;
  static constexpr ForwardTile kTile = forward_tile<sizeof(T), kHeadDim, kDropout>();
  static constexpr int kThreads = kTile.warps * 32, kM = kTile.queries(), kN = step_keys<kHeadDim, kDropout>(kTile),
                       kRowTiles = kTile.row_tiles;
  static constexpr int kStride = kTileStride<T, kHeadDim>;
  static constexpr int kStages = kTile.stages;
  static constexpr int kSharedBytes = (kM + 2 * kStages * kN) * kStride * static_cast<int>(sizeof(T));
  static constexpr int kScoreTiles = kN / 8, kOutTiles = kHeadDim / 8, kSteps = kN / Core::kK;
  static_assert(kSharedBytes <= kSmallShared);

  // What a step needs beside its tiles lies in the padding of the first rows of queries, or in registers where there
  // are enough: chosen so that no kernel of head_dim 64 or 128 spills.
  struct Sequences {
    int b, h, length_q, length_k;
  };
  struct Keys {
    const T *k, *v;  // of the first key; in registers of those that are loaded next
  };
  static_assert(sizeof(Sequences) <= kVectorBytes && sizeof(Keys) <= kVectorBytes && sizeof(Dropout) <= kVectorBytes);
  static constexpr bool kSharedKeys = kHeadDim > 64 || sizeof(T) == 4;
  static constexpr bool kSharedLengths =
      sizeof(T) == 2 && (kHeadDim == 96 || kHeadDim == 144 || (kHeadDim == 128 && kDropout));

  const AttnParams& p;
  T *q_tile, *k_tile, *v_tile;
  const Score& score;
  int own_length_q, own_length_k;
  Keys own_keys;
  int row0;  // first row of this tile
  float out[kRowTiles][kOutTiles][4];
  OnlineSoftmax rows[kRowTiles];

  __device__ Forward(const AttnParams& params, const Score& score, T* shared)
      : p(params),
        score(score),
        q_tile(shared),
        k_tile(q_tile + kM * kStride),
        v_tile(k_tile + kStages * kN * kStride) {}

  static __device__ int g() { return threadIdx.x % 32 / 4; }
  static __device__ int t() { return threadIdx.x % 4; }
  // First of the 16 rows of tile i of this warp, within the block's tile.
  static __device__ int tile_row(int i) { return (threadIdx.x / 32 * kRowTiles + i) * 16; }

  // Keys or values of tile n; tiles come in falling order.
  __device__ void load_keys(T* tile, const T* Keys::* which, int64_t row_stride, int n, int columns) {
    const T* from;
    if constexpr (kSharedKeys) {
      from = shared_by_all<Keys>(2)->*which + n * kN * row_stride;
    } else {
      from = own_keys.*which;
      own_keys.*which -= kN * row_stride;
    }
    load_tile<T, kN, kHeadDim, kThreads>(tile, from, row_stride, min(kN, length_k() - n * kN), columns);
    ptx::cp_async_commit();
  }

  __device__ void run(const TileOrder& order) {
    const int heads = static_cast<int>(p.heads_q);
    const auto [head, block] = order.index(blockIdx.x, heads * static_cast<int>(p.batch));
    start_head(head / heads, head % heads);
    // The longest tiles of a causal head start first. A sequence may be longer than the grid was told.
    for (row0 = (order.blocks - 1 - block) * kM; row0 < length_q(); row0 = ptx::opaque(row0) + order.blocks * kM) {
      start_softmax();
      walk_keys();
      finish();
      __syncthreads();
    }
  }

  __device__ void start_head(int b, int h) {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const int64_t hk = h / p.group_size();
    own_length_q = static_cast<int>(queries.length);
    own_length_k = static_cast<int>(keys.length);
    if (threadIdx.x == 0) {
      *now() = {b, h, own_length_q, own_length_k};
      *shared_by_all<Keys>(2) = {row_pointer<const T>(p.k, b, hk, keys.start),
                                 row_pointer<const T>(p.v, b, hk, keys.start)};
      if (kDropout) *dropout() = Dropout(p, b);
      // A sink is the first maximum. If keys may stay above it, weights near 1 are not exact, and dS loses digits.
      *tolerance() = head_sink(p, h) > -infinity() ? 0.f : kTolerance;
    }
    __syncthreads();
  }
  template <class X>
  __device__ X* shared_by_all(int row) const {
    return reinterpret_cast<X*>(q_tile + row * kStride + kHeadDim);
  }
  __device__ Sequences* now() const { return shared_by_all<Sequences>(0); }
  __device__ float* tolerance() const { return shared_by_all<float>(3); }
  __device__ Dropout* dropout() const { return shared_by_all<Dropout>(1); }
  __device__ int length_q() const { return kSharedLengths ? now()->length_q : own_length_q; }
  __device__ int length_k() const { return kSharedLengths ? now()->length_k : own_length_k; }
  __device__ TileMask mask() const { return TileMask(p, length_q(), length_k()); }

  __device__ void walk_keys() {
    const int b = now()->b, h = now()->h, row_end = min(row0 + kM, length_q());
    const Limits visible = mask().keys_of(row0, row_end), full = mask().keys_of_all(row0, row_end);
    const int first = visible.begin / kN, last = (visible.end - 1) / kN;
    const int first_full = (full.begin + kN - 1) / kN, end_full = full.end / kN;  // tiles that need no mask
    if (visible.end == visible.begin) return;
    const int columns = static_cast<int>(p.head_dim), columns_v = static_cast<int>(p.head_dim_v);
    const T* q = row_pointer<const T>(p.q, b, h, query_sequence(p, b).start + row0);
    load_tile<T, kM, kHeadDim, kThreads>(q_tile, q, p.q.row_stride, row_end - row0, columns);
    if constexpr (!kSharedKeys) {
      const int64_t hk = h / p.group_size(), key = key_sequence(p, b).start + last * kN;
      own_keys = {row_pointer<const T>(p.k, b, hk, key), row_pointer<const T>(p.v, b, hk, key)};
    }
    load_keys(k_tile, &Keys::k, p.k.row_stride, last, columns);
    if (kStages == 2) load_keys(v_tile, &Keys::v, p.v.row_stride, last, columns_v);
    int stage = 0;
    for (int n = last; n >= first; --n) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (kStages == 1) {
        load_keys(v_tile, &Keys::v, p.v.row_stride, n, columns_v);
      } else if (n > first) {
        load_keys(k_tile + (kN * kStride - stage), &Keys::k, p.k.row_stride, n - 1, columns);
        load_keys(v_tile + (kN * kStride - stage), &Keys::v, p.v.row_stride, n - 1, columns_v);
      }
      float scores[kRowTiles][kScoreTiles][4];
      score_product(scores, k_tile + stage);
      if (kStages == 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (n > first) load_keys(k_tile, &Keys::k, p.k.row_stride, n - 1, columns);
      }
      typename Core::A weights[kRowTiles][kSteps];
      weigh(weights, scores, n, n < first_full || n >= end_full);
      __syncwarp();  // keeps the compiler from loading so much of V ahead that registers run out
      value_product(weights, v_tile + stage);
      if (kStages == 2) stage = kN * kStride - stage;
    }
  }

  __device__ void weigh(typename Core::A (&weights)[kRowTiles][kSteps], float (&scores)[kRowTiles][kScoreTiles][4],
                        int n, bool masked) {
    constexpr bool kDropEarly = sizeof(T) == 4 || kHeadDim == 144;  // fewer registers
    auto drop = [&](int i) {
      if (kDropout) dropout()->template drop<Core>(weights[i], now()->h, row0 + tile_row(i), n * kN);
    };
    store_scores(scores, score);
    if (masked) hide_keys<true, true>(scores, mask(), ptx::opaque(row0) + tile_row(0) + g(), n * kN + 2 * t());
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      softmax(i, scores[i]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) weights[i][step] = Core::from_accumulators(scores[i], step);
      if (kDropEarly) drop(i);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (!kDropEarly) drop(i);
    }
  }

  __device__ void start_softmax() {
    const float sink = head_sink(p, now()->h);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        for (int e = 0; e < 4; ++e) out[i][n][e] = 0;
      }
      rows[i].start(sink);
    }
  }

  // S = Q K^T
  __device__ void score_product(float (&scores)[kRowTiles][kScoreTiles][4], const T* k_tile) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        for (int e = 0; e < 4; ++e) scores[i][n][e] = 0;
      }
    }
#pragma unroll
    for (int d = 0; d < kHeadDim; d += Core::kK) {
      typename Core::A a[kRowTiles];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) a[i] = Core::load_a(q_tile, kStride, tile_row(i), d);
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        typename Core::B pair[2];
        Core::load_b(pair, k_tile, kStride, n * 8, d);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          Core::mma(scores[i][n], a[i], pair[0]);
          Core::mma(scores[i][n + 1], a[i], pair[1]);
        }
      }
    }
  }

  // Scores of row tile i become exp(score - max); what was summed up under a smaller maximum is scaled down.
  __device__ void softmax(int i, float (&scores)[kScoreTiles][4]) {
    rows[i].weigh(scores, score, *tolerance(), [&](const float (&shrink)[2]) {
      if (!__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][n][e] *= shrink[e / 2];
      }
    });
  }

  // out += P V
  __device__ void value_product(const typename Core::A (&weights)[kRowTiles][kSteps], const T* v_tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (sizeof(T) == 4) __syncwarp();  // as above: V, split in two, needs twice the registers
#pragma unroll
      for (int n = 0; n < kOutTiles; n += 2) {
        typename Core::B pair[2];
        Core::load_b_transposed(pair, v_tile, kStride, step * Core::kK, n * 8);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          Core::mma(out[i][n], weights[i][step], pair[0]);
          Core::mma(out[i][n + 1], weights[i][step], pair[1]);
        }
      }
    }
  }

  __device__ void finish() {
    const float keep = kDropout ? 1 / static_cast<float>(keep_probability(p.dropout_threshold)) : 1.f;
    const int b = now()->b, h = now()->h, count = length_q() - row0;
    const int64_t start = query_sequence(p, b).start + row0;
    T* tile = q_tile;  // every warp reads and writes its own rows of it alone
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float total = quad_sum(rows[i].sum[r]);
        const bool empty = total == 0;
        const float factor = keep / total;
        const int row = tile_row(i) + g() + 8 * r;
        if (t() == 0 && row < count) {
          *row_statistic(p.lse, b, h, start + row) =
              empty ? -infinity() : (finite_max(rows[i].max[r]) + log2f(total)) * kLn2<float>;
        }
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          const float x = empty ? 0.f : out[i][n][2 * r] * factor, y = empty ? 0.f : out[i][n][2 * r + 1] * factor;
          Core::store_pair(tile + row * kStride + n * 8 + 2 * t(), x, y);
        }
      }
    }
    __syncthreads();
    store_tile<T, kM, kHeadDim, kThreads>(row_pointer<T>(p.out, b, h, start), p.out.row_stride, tile, min(count, kM),
                                          static_cast<int>(p.head_dim_v));
  }
};

template <class T, int kHeadDim, bool kDropout>
__global__ void __launch_bounds__(Forward<T, kHeadDim, kDropout>::kThreads,
                                  Forward<T, kHeadDim, kDropout>::kTile.blocks)
    forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ TileOrder order,
                   const __grid_constant__ PlainScore<float, true> score) {
  extern __shared__ __align__(16) unsigned char shared[];
  Forward<T, kHeadDim, kDropout>(p, score, reinterpret_cast<T*>(shared)).run(order);
}

template <class T, int kHeadDim, bool kDropout>
void launch_forward(const AttnParams& p) {
  using Kernel = Forward<T, kHeadDim, kDropout>;
  if (p.batch * p.heads_q == 0) return;
  const int64_t blocks = tiles(p.seqlen_q, Kernel::kM);
  launch(forward_kernel<T, kHeadDim, kDropout>, "forward", p, blocks * p.batch * p.heads_q, Kernel::kThreads,
         Kernel::kSharedBytes, forward_order(p, blocks, sizeof(T)), Kernel::Score::of(p));
}

template <class T, int kHeadDim>
void forward(const AttnParams& p) {
  p.has_dropout() ? launch_forward<T, kHeadDim, true>(p) : launch_forward<T, kHeadDim, false>(p);
}

}  // namespace flashattn_ext::sm80
