// Backward: one thread block keeps one tile of keys and walks over the queries that see it (Dao 2023, Algorithm 2).
// Each warp owns 16 keys and computes the transposed scores S^T = K Q^T, so that P^T and dS^T are in registers what the
// products for dv and dk need; dS^T alone goes through shared memory, for dq, whose fp32 sums lie in global memory.
#pragma once

#include "../common/keep.cuh"
#include "backward_finish.cuh"
#include "tiles.h"

namespace flashattn_ext::sm80 {

template <class T, int kHeadDim, bool kDropout, bool kLarge>
struct Backward {
  using Core = TensorCore<T>;
  static constexpr BackwardTile kTile = backward_tile<sizeof(T), kHeadDim, kLarge>();
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32, kM = kTile.queries, kN = kTile.keys();
  static constexpr int kColumns = kHeadDim / kTile.splits;  // of dq, dk and dv in this thread block
  static constexpr int kStride = kTileStride<T, kHeadDim>, kScoreStride = kTileStride<T, kM>;
  static constexpr int kStages = kTile.stages;
  // One stage: q and dout [kM][kStride], dS^T [kN][kScoreStride], lse and delta [kM].
  static constexpr int kStageBytes = (2 * kM * kStride + kN * kScoreStride) * static_cast<int>(sizeof(T)) + 2 * kM * 4;
  static constexpr int kSharedBytes = 2 * kN * kStride * static_cast<int>(sizeof(T)) + kStages * kStageBytes;
  static constexpr int kKeyTiles = kTile.key_tiles, kScoreTiles = kM / 8, kColumnTiles = kColumns / 8;
  // dq: a warp has 32 rows where that leaves it whole pairs of column tiles, and its share of the columns.
  static constexpr bool kTallRows = kM >= 32 && kM / 32 <= kWarps && kColumnTiles * (kM / 32) / kWarps % 2 == 0;
  static constexpr int kRowWarps = kTallRows ? kM / 32 : kM / 16 < kWarps ? kM / 16 : kWarps;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kQueryRowTiles = kM / 16 / kRowWarps, kQueryColumnTiles = kColumnTiles / kColumnWarps;
  static_assert(kQueryColumnTiles % 2 == 0 && kM / 16 % kRowWarps == 0);
  static_assert(kSharedBytes <= (kLarge ? kLargeShared : kSmallShared));

  const AttnGradParams& p;
  const BackwardShared& shared;
  T *k_tile, *v_tile;
  unsigned char* stages;
  T *q_tile, *dout_tile, *dscore_tile;  // of the stage in use
  float *lse, *delta;
  int b, hk;
  Sequence queries, keys;
  int key0, key_count, column0;
  int first_tile, tile_count;  // of queries, in one head
  float scale, keep_scale;
  float dk[kKeyTiles][kColumnTiles][4], dv[kKeyTiles][kColumnTiles][4];

  __device__ Backward(const AttnGradParams& params, const BackwardShared& s, T* memory)
      : p(params),
        shared(s),
        k_tile(memory),
        v_tile(k_tile + kN * kStride),
        stages(reinterpret_cast<unsigned char*>(v_tile + kN * kStride)) {
    scale = log2_scale(p.softmax_scale);
    keep_scale = static_cast<float>(1.0 / keep_probability(p.dropout_threshold));
  }

  static __device__ int g() { return threadIdx.x % 32 / 4; }
  static __device__ int t() { return threadIdx.x % 4; }
  // First of the 16 keys of tile i of this warp, within the block's tile.
  static __device__ int tile_row(int i) { return (threadIdx.x / 32 * kKeyTiles + i) * 16; }

  __device__ void run(int batch, int head_k, int split, int n, int step) {
    b = batch;
    hk = head_k;
    column0 = split * kColumns;
    queries = query_sequence(p, b);
    keys = key_sequence(p, b);
    for (; n * int64_t{kN} < keys.length; n += step) {
      key_tile(split, n);
      __syncthreads();
    }
  }

  __device__ void key_tile(int split, int n) {
    key0 = n * kN;
    key_count = min(kN, static_cast<int>(keys.length) - key0);
    const TileMask mask(p, queries.length, keys.length);
    const Limits seen_by = mask.rows_of(key0, key0 + key_count);
    const int first = static_cast<int>(seen_by.begin / kM);
    const int last = seen_by.end > seen_by.begin ? static_cast<int>((seen_by.end - 1) / kM) : first - 1;
#pragma unroll
    for (int i = 0; i < kKeyTiles * kColumnTiles; ++i) {
      for (int e = 0; e < 4; ++e)
        dk[i / kColumnTiles][i % kColumnTiles][e] = dv[i / kColumnTiles][i % kColumnTiles][e] = 0;
    }
    first_tile = first;
    tile_count = last + 1 - first;
    const int steps = tile_count * static_cast<int>(p.group_size());
    if (steps > 0) {
      load_tile<T, kN, kHeadDim, kThreads>(k_tile, row_pointer<const T>(p.k, b, hk, keys.start + key0), p.k.row_stride,
                                           key_count, static_cast<int>(p.head_dim));
      load_tile<T, kN, kHeadDim, kThreads>(v_tile, row_pointer<const T>(p.v, b, hk, keys.start + key0), p.v.row_stride,
                                           key_count, static_cast<int>(p.head_dim_v));
      load_queries(0);
      if (kStages == 2) {
        load_queries(steps > 1 ? 1 : 0);
        ptx::cp_async_wait<1>();
        __syncthreads();
      }
      for (int step = 0; step < steps; ++step) query_tile(mask, split, n, step, steps);
      ptx::cp_async_wait<0>();
    }
    write(p.dk, dk, static_cast<int>(p.head_dim), static_cast<float>(p.softmax_scale));
    write(p.dv, dv, static_cast<int>(p.head_dim_v), keep_scale);
  }

  __device__ void use_stage(int step) {
    q_tile = reinterpret_cast<T*>(stages + step % kStages * kStageBytes);
    dout_tile = q_tile + kM * kStride;
    dscore_tile = dout_tile + kM * kStride;
    lse = reinterpret_cast<float*>(dscore_tile + kN * kScoreStride);
    delta = lse + kM;
  }

  // The query tile of a step: heads of the group one after the other.
  __device__ int head_of(int step) const { return hk * static_cast<int>(p.group_size()) + step / tile_count; }
  __device__ int tile_of(int step) const { return first_tile + step % tile_count; }

  __device__ void load_queries(int step) {
    const int h = head_of(step), m = tile_of(step);
    use_stage(step);
    const int64_t row = queries.start + m * kM;
    const int rows = min(kM, static_cast<int>(queries.length) - m * kM);
    load_tile<T, kM, kHeadDim, kThreads>(q_tile, row_pointer<const T>(p.q, b, h, row), p.q.row_stride, rows,
                                         static_cast<int>(p.head_dim));
    load_tile<T, kM, kHeadDim, kThreads>(dout_tile, row_pointer<const T>(p.dout, b, h, row), p.dout.row_stride, rows,
                                         static_cast<int>(p.head_dim_v));
    ptx::cp_async_commit();
    const int64_t index = h * shared.rows + BackwardShared::first_row(p, b, queries) + m * kM;
    for (int i = threadIdx.x; i < kM; i += kThreads) {
      lse[i] = i < rows ? shared.lse[index + i] : infinity();
      delta[i] = i < rows ? shared.delta[index + i] : 0.f;
    }
  }

  // With two stages a step has one barrier: behind it dS of this step is there for all, the next step's queries have
  // arrived, and those of this step may be overwritten by the step after the next.
  __device__ void query_tile(const TileMask& mask, int split, int n, int step, int steps) {
    const int h = head_of(step), m = tile_of(step);
    if (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    use_stage(step);
    float weights[kKeyTiles][kScoreTiles][4], dscores[kKeyTiles][kScoreTiles][4];
    product(weights, k_tile, q_tile);
    product(dscores, v_tile, dout_tile);
    const int row0 = m * kM, row_end = min(row0 + kM, mask.seqlen_q);
    const bool full = mask.sees_all(row0, row_end, key0, key0 + kN);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      full ? gradients<false>(mask, h, row0, tile_row(i), weights[i], dscores[i])
           : gradients<true>(mask, h, row0, tile_row(i), weights[i], dscores[i]);
    }
    accumulate(dv, weights, dout_tile);
    accumulate(dk, dscores, q_tile);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        T* at = dscore_tile + (tile_row(i) + g()) * kScoreStride + n * 8 + 2 * t();
        Core::store_pair(at, dscores[i][n][0], dscores[i][n][1]);
        Core::store_pair(at + 8 * kScoreStride, dscores[i][n][2], dscores[i][n][3]);
      }
    }
    if (kStages == 2) ptx::cp_async_wait<0>();
    __syncthreads();
    if (step + kStages < steps) load_queries(step + kStages);
    query_gradient(mask, split, n, h, m);
  }

  // [keys of this warp][kM queries] = rows of `a` times rows of `b`
  __device__ static void product(float (&c)[kKeyTiles][kScoreTiles][4], const T* a_tile, const T* b_tile) {
#pragma unroll
    for (int i = 0; i < kKeyTiles * kScoreTiles; ++i) {
      for (int e = 0; e < 4; ++e) c[i / kScoreTiles][i % kScoreTiles][e] = 0;
    }
#pragma unroll
    for (int d = 0; d < kHeadDim; d += Core::kK) {
      typename Core::A a[kKeyTiles];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) a[i] = Core::load_a(a_tile, kStride, tile_row(i), d);
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        typename Core::B pair[2];
        Core::load_b(pair, b_tile, kStride, n * 8, d);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          Core::mma(c[i][n], a[i], pair[0]);
          Core::mma(c[i][n + 1], a[i], pair[1]);
        }
      }
    }
  }

  // weights: S^T becomes P^T with dropout applied; dscores: dP^T becomes dS^T.
  template <bool kMasked>
  __device__ void gradients(const TileMask& mask, int h, int row0, int key_row, float (&weights)[kScoreTiles][4],
                            float (&dscores)[kScoreTiles][4]) const {
    const float signed_scale = p.softmax_scale < 0 ? -scale : scale;
    uint32_t keep[(kScoreTiles + 7) / 8];
    if (kDropout) {
      const Dropout dropout(p, b);
#pragma unroll
      for (int i = 0; i < kScoreTiles; i += 8) {
        keep[i / 8] = dropout.transposed_bits<(kScoreTiles < 8 ? kScoreTiles : 8)>(h, key0 + key_row, row0 + i * 8);
      }
    }
    Limits limits[2];
    for (int half = 0; kMasked && half < 2; ++half) {
      limits[half] = rows_that_see(mask, key0 + key_row + g() + 8 * half);
      limits[half].begin -= row0 + 2 * t();
      limits[half].end -= row0 + 2 * t();
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + n * 8 + 2 * t());
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + n * 8 + 2 * t());
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int odd = e % 2, half = e / 2, row = n * 8 + odd;
        const float x = ptx::ex2(fmaf(weights[n][e], signed_scale, odd ? -row_lse.y : -row_lse.x));
        float dp = dscores[n][e];
        weights[n][e] = x;
        if (kDropout) {
          const bool kept = keep[n / 8] >> (n % 8 * 4 + e) & 1;
          weights[n][e] = kept ? x : 0.f;
          dp = kept ? dp * keep_scale : 0.f;
        }
        dscores[n][e] = x * (dp - (odd ? row_delta.y : row_delta.x));
        if (kMasked) {  // a masked score has no gradient, also when dP is not finite
          const bool visible = row >= limits[half].begin && row < limits[half].end;
          weights[n][e] = visible ? weights[n][e] : 0.f;
          dscores[n][e] = visible ? dscores[n][e] : 0.f;
        }
      }
    }
  }

  // [keys of this warp][columns] += (a as [keys][queries]) * rows of the tile
  __device__ void accumulate(float (&sum)[kKeyTiles][kColumnTiles][4], const float (&a)[kKeyTiles][kScoreTiles][4],
                             const T* tile) const {
#pragma unroll
    for (int step = 0; step < kM / Core::kK; ++step) {
      typename Core::A operand[kKeyTiles];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) operand[i] = Core::from_accumulators(a[i], step);
#pragma unroll
      for (int c = 0; c < kColumnTiles; c += 2) {
        typename Core::B pair[2];
        Core::load_b_transposed(pair, tile, kStride, step * Core::kK, column0 + c * 8);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          Core::mma(sum[i][c], operand[i], pair[0]);
          Core::mma(sum[i][c + 1], operand[i], pair[1]);
        }
      }
    }
  }

  // dq += dS K, into global memory.
  __device__ void query_gradient(const TileMask& mask, int split, int n, int h, int m) const {
    const int warp = threadIdx.x / 32, row = warp % kRowWarps * kQueryRowTiles * 16;
    const int column = column0 + warp / kRowWarps * kQueryColumnTiles * 8;
    const int64_t first_row = BackwardShared::first_row(p, b, queries);
    const int row_end = static_cast<int>(queries.length) - m * kM;
    int* turn = nullptr;
    int my_turn = 0;
    if (p.deterministic) {
      turn = shared.turns + (h * shared.turn_tiles + first_row / kM + b + m) * kTile.splits + split;
      const int64_t end = m * int64_t{kM} + min(kM, row_end);
      my_turn = n - static_cast<int>(mask.keys_of(m * kM, end).begin / kN);
      if (threadIdx.x == 0) {
        while (ptx::load_acquire(turn) != my_turn) __nanosleep(64);
      }
      __syncthreads();
    }
    float sum[kQueryRowTiles][kQueryColumnTiles][4] = {};
#pragma unroll
    for (int key = 0; key < kN; key += Core::kK) {
      typename Core::A a[kQueryRowTiles];
#pragma unroll
      for (int i = 0; i < kQueryRowTiles; ++i) {
        a[i] = Core::load_a_transposed(dscore_tile, kScoreStride, key, row + i * 16);
      }
#pragma unroll
      for (int c = 0; c < kQueryColumnTiles; c += 2) {
        typename Core::B pair[2];
        Core::load_b_transposed(pair, k_tile, kStride, key, column + c * 8);
#pragma unroll
        for (int i = 0; i < kQueryRowTiles; ++i) {
          Core::mma(sum[i][c], a[i], pair[0]);
          Core::mma(sum[i][c + 1], a[i], pair[1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kQueryRowTiles; ++i) {
      const int r = row + i * 8 + g();
      if (r >= row_end) continue;
      float* to = shared.dq + (h * shared.rows + first_row + m * kM + r) * shared.columns + column + 2 * t();
#pragma unroll
      for (int c = 0; c < kQueryColumnTiles; ++c) {
        ptx::add_pair(to + c * 8, sum[i / 2][c][i % 2 * 2], sum[i / 2][c][i % 2 * 2 + 1]);
      }
    }
    if (p.deterministic) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) ptx::store_release(turn, my_turn + 1);
    }
  }

  __device__ void write(const TensorView& view, const float (&sum)[kKeyTiles][kColumnTiles][4], int columns,
                        float factor) const {
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      const int key = tile_row(0) + i * 8 + g();
      if (key >= key_count) continue;
      T* to = row_pointer<T>(view, b, hk, keys.start + key0 + key);
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        const int column = column0 + c * 8 + 2 * t();
        const float x = sum[i / 2][c][i % 2 * 2] * factor, y = sum[i / 2][c][i % 2 * 2 + 1] * factor;
        if (columns % 2 == 0) {  // dk and dv are contiguous: pairs are aligned
          if (column < columns) Core::store_pair(to + column, x, y);
        } else {
          if (column < columns) narrow(x, to + column);
          if (column + 1 < columns) narrow(y, to + column + 1);
        }
      }
    }
  }
};

template <class T, int kHeadDim, bool kDropout, bool kLarge>
__global__ void __launch_bounds__(Backward<T, kHeadDim, kDropout, kLarge>::kThreads)
    backward_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardShared shared,
                    int blocks) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Kernel = Backward<T, kHeadDim, kDropout, kLarge>;
  Kernel tile(p, shared, reinterpret_cast<T*>(memory));
  constexpr int kSplits = Kernel::kTile.splits;
  const int index = blockIdx.x / blocks, head = index / kSplits, heads = static_cast<int>(p.heads_k);
  tile.run(head / heads, head % heads, index % kSplits, blockIdx.x % blocks, blocks);
}

template <class T, int kHeadDim, bool kLarge>
BackwardShared backward_shared(const AttnGradParams& p) {
  constexpr BackwardTile kTile = backward_tile<sizeof(T), kHeadDim, kLarge>();
  return BackwardShared(p, kHeadDim, kTile.queries, kTile.splits);
}

template <class T, int kHeadDim, bool kDropout, bool kLarge>
void launch_main(const AttnGradParams& p, const BackwardShared& shared) {
  using Kernel = Backward<T, kHeadDim, kDropout, kLarge>;
  const int64_t blocks = tiles(p.seqlen_k, Kernel::kN);
  launch(backward_kernel<T, kHeadDim, kDropout, kLarge>, "backward", p,
         blocks * p.batch * p.heads_k * Kernel::kTile.splits, Kernel::kThreads, Kernel::kSharedBytes, shared,
         static_cast<int>(blocks));
}

template <class T, int kHeadDim, bool kLarge>
void launch_backward(const AttnGradParams& p) {
  const BackwardShared shared = backward_shared<T, kHeadDim, kLarge>(p);
  const int64_t row_blocks = (p.heads_q * shared.rows + kPrepareWarps - 1) / kPrepareWarps;
  if (p.deterministic && shared.rows > 0) {
    const size_t bytes =
        p.heads_q * shared.turn_tiles * backward_tile<sizeof(T), kHeadDim, kLarge>().splits * sizeof(int);
    check_launch(cudaMemsetAsync(shared.turns, 0, bytes, static_cast<cudaStream_t>(p.stream)), "memset", p);
  }
  launch(backward_prepare_kernel<T>, "backward_prepare", p, row_blocks, kPrepareWarps * 32, 0, shared);
  p.has_dropout() ? launch_main<T, kHeadDim, true, kLarge>(p, shared)
                  : launch_main<T, kHeadDim, false, kLarge>(p, shared);
  launch(dq_finish_kernel<T>, "backward_finish", p, row_blocks, kPrepareWarps * 32, 0, shared);
  if (p.dsink) launch(dsink_kernel, "backward_finish (sink)", p, p.heads_q, kSinkThreads, 0, shared);
}

template <class T, int kHeadDim>
size_t backward_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(has_large_shared_memory() ? backward_shared<T, kHeadDim, true>(p).bytes
                                                       : backward_shared<T, kHeadDim, false>(p).bytes);
}

template <class T, int kHeadDim>
void backward(const AttnGradParams& p) {
  has_large_shared_memory() ? launch_backward<T, kHeadDim, true>(p) : launch_backward<T, kHeadDim, false>(p);
}

}  // namespace flashattn_ext::sm80
