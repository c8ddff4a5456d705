// Backward: one thread block keeps one tile of keys and walks over the queries that see it (Dao 2023, Algorithm 2).
// Each warp computes a part of the transposed scores S^T = K Q^T. A warp that has all queries of its keys holds in P^T
// and dS^T, as they stand in registers, what the products for dv and dk need, and only dS^T goes through shared memory,
// for dq; otherwise both do, which allows squarer parts. The fp32 sums of dq lie in global memory.
#pragma once

#include "../common/backward_finish.cuh"
#include "../common/dq_order.cuh"
#include "../common/scores.cuh"
#include "../common/tile_order.cuh"
#include "tiles.h"

namespace flashattn_ext::sm80 {

template <class T, int kHeadDimension, bool kDropout, bool kLarge>
struct Backward {
  using Element = T;
  using Core = TensorCore<T>;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr BackwardTile kTile = backward_tile<sizeof(T), kHeadDim, kLarge>();
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32, kM = kTile.queries, kN = kTile.keys;
  static constexpr int kSplits = kTile.splits, kStages = kTile.stages, kTileRows = kM;
  static constexpr int kColumns = kHeadDim / kSplits;  // of dq, dk and dv in this thread block
  static constexpr int kStride = kTileStride<T, kHeadDim>, kScoreStride = kTileStride<T, kM>;
  // One warp's part of the scores.
  static constexpr bool kInRegisters = kTile.score_key_warps == kWarps;
  static constexpr int kKeyTiles = kN / kTile.score_key_warps / 16;
  static constexpr int kScoreTiles = kM / (kWarps / kTile.score_key_warps) / 8;
  static_assert(kScoreTiles % 2 == 0 && kN % (kTile.score_key_warps * 16) == 0);
  // One warp's part of dk and dv.
  static constexpr int kGradKeyTiles = kN / kTile.grad_key_warps / 16;
  static constexpr int kGradColumnTiles = kColumns / (kWarps / kTile.grad_key_warps) / 8;
  static_assert(kGradColumnTiles % 2 == 0 && kN % (kTile.grad_key_warps * 16) == 0);
  static_assert(!kInRegisters || kTile.grad_key_warps == kWarps);
  // One warp's part of dq: 32 rows where that leaves it whole pairs of column tiles.
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr bool kTallRows = kM >= 32 && kM / 32 <= kWarps && kColumnTiles * (kM / 32) / kWarps % 2 == 0;
  static constexpr int kRowWarps = kTallRows ? kM / 32 : kM / 16 < kWarps ? kM / 16 : kWarps;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kQueryRowTiles = kM / 16 / kRowWarps, kQueryColumnTiles = kColumnTiles / kColumnWarps;
  static_assert(kQueryColumnTiles % 2 == 0 && kColumnTiles % kColumnWarps == 0 && kM / 16 % kRowWarps == 0);
  // One stage: q and dout [kM][kStride], lse and delta [kM]. dS^T, of which two steps are in use when P^T stays in
  // registers, and P^T: [kN][kScoreStride].
  static constexpr int kBytes = sizeof(T), kScoreBytes = kN * kScoreStride * kBytes;
  static constexpr int kStageBytes = 2 * kM * kStride * kBytes + 2 * kM * 4;
  static constexpr int kScoreBuffers = kInRegisters ? kStages : 2;
  static constexpr int kSharedBytes = 2 * kN * kStride * kBytes + kStages * kStageBytes + kScoreBuffers * kScoreBytes;
  static_assert(kSharedBytes <= (kLarge ? kLargeShared : kSmallShared));

  const AttnGradParams& p;
  const BackwardWorkspace& workspace;
  T *k_tile, *v_tile;
  unsigned char* stages;
  T *q_tile, *dout_tile;  // of the stage in use
  float *lse, *delta;
  T *dscore_tile, *weight_tile;
  int b, hk, n;  // n: of the key tile
  float dk[kGradKeyTiles][kGradColumnTiles][4], dv[kGradKeyTiles][kGradColumnTiles][4];

  __device__ Backward(const AttnGradParams& params, const BackwardWorkspace& workspace, T* memory)
      : p(params),
        workspace(workspace),
        k_tile(memory),
        v_tile(k_tile + kN * kStride),
        stages(reinterpret_cast<unsigned char*>(v_tile + kN * kStride)) {}

  static __device__ int g() { return threadIdx.x % 32 / 4; }
  static __device__ int t() { return threadIdx.x % 4; }
  // Which part of the columns of dq, dk and dv this thread block computes.
  static __device__ int split() { return blockIdx.x % kSplits; }

  // This warp's parts, within the block's tiles: of the scores,
  static __device__ int warp() { return threadIdx.x / 32; }
  static __device__ int score_key(int i) { return (warp() % kTile.score_key_warps * kKeyTiles + i) * 16; }
  static __device__ int score_query() { return warp() / kTile.score_key_warps * kScoreTiles * 8; }
  // of dk and dv,
  static __device__ int grad_key(int i) { return (warp() % kTile.grad_key_warps * kGradKeyTiles + i) * 16; }
  static __device__ int grad_column() {
    return split() * kColumns + warp() / kTile.grad_key_warps * kGradColumnTiles * 8;
  }
  // of dq.
  static __device__ int query_row() { return warp() % kRowWarps * kQueryRowTiles * 16; }
  static __device__ int query_column(int split) {
    return split * kColumns + warp() / kRowWarps * kQueryColumnTiles * 8;
  }
  // Where its accumulators (i, c) are summed up; `tile` as in BackwardWorkspace.
  static __device__ float* dq_fragment(const BackwardWorkspace& workspace, int64_t tile, int split, int i, int c) {
    const int index = ((split * kWarps + warp()) * kQueryRowTiles + i) * kQueryColumnTiles + c;
    return workspace.dq + tile * (kM * kHeadDim) + index * 128;
  }

  // What all threads share and little code uses lies in the padding of the first rows of the key tile: it would need
  // registers everywhere.
  struct Walk {
    int length_q, length_k;            // of this sequence
    int first_full_row, end_full_row;  // rows that see all keys of this tile
  };
  struct Place {
    int query_start, key_start;  // first rows of this sequence
    int first_query_tile;        // of this sequence, in BackwardWorkspace
    int first;                   // the first query tile that sees keys of this tile
  };
  static_assert(sizeof(Walk) <= kVectorBytes && sizeof(Place) <= kVectorBytes);
  __device__ Walk* walk() const { return reinterpret_cast<Walk*>(k_tile + kHeadDim); }
  __device__ Place* place() const { return reinterpret_cast<Place*>(k_tile + kStride + kHeadDim); }
  __device__ TileMask mask() const { return TileMask(p, walk()->length_q, walk()->length_k); }

  __device__ void run(int batch, int head_k, int tile, int step) {
    b = batch;
    hk = head_k;
    for (n = tile; n * kN < key_sequence(p, b).length; n += step) {
      key_tile();
      __syncthreads();
    }
  }

  __device__ void key_tile() {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const TileMask mask(p, queries.length, keys.length);
    const int key0 = n * kN, key_count = min(kN, mask.seqlen_k - key0);
    const Limits seen_by = mask.rows_of(key0, key0 + key_count);
    const int first = seen_by.begin / kM, last = (seen_by.end - 1) / kM;
    if (threadIdx.x == 0) {
      const Limits all = mask.rows_of_all(key0, key0 + kN);
      // Rows beyond the last do no harm.
      *walk() = {mask.seqlen_q, mask.seqlen_k, all.begin, all.end == mask.seqlen_q ? all.end + kM : all.end};
      *place() = {static_cast<int>(queries.start), static_cast<int>(keys.start),
                  static_cast<int>(workspace.first_tile(p, b, queries)), first};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGradKeyTiles; ++i) {
#pragma unroll
      for (int c = 0; c < kGradColumnTiles; ++c) {
        for (int e = 0; e < 4; ++e) dk[i][c][e] = dv[i][c][e] = 0;
      }
    }
    if (seen_by.end > seen_by.begin && p.heads_q > 0) {
      const int64_t row = keys.start + key0;
      load_tile<T, kN, kHeadDim, kThreads>(k_tile, row_pointer<const T>(p.k, b, hk, row), p.k.row_stride, key_count,
                                           static_cast<int>(p.head_dim));
      load_tile<T, kN, kHeadDim, kThreads>(v_tile, row_pointer<const T>(p.v, b, hk, row), p.v.row_stride, key_count,
                                           static_cast<int>(p.head_dim_v));
      walk_queries(first, last);
    }
    write(p.dk, dk, static_cast<int>(p.head_dim), workspace.gradient_scale);
    write(p.dv, dv, static_cast<int>(p.head_dim_v), workspace.keep_scale);
  }

  // A query tile of one head; those of the heads of a group come one after the other.
  struct Position {
    int h, m;
  };
  __device__ void advance(Position* position, int last) const {
    if (++position->m > last) *position = {position->h + 1, place()->first};
  }

  __device__ void walk_queries(int first, int last) {
    const int group = static_cast<int>(p.group_size()), steps = (last + 1 - first) * group;
    Position now{hk * group, first}, ahead = now;
    load_queries(0, ahead);
    advance(&ahead, last);
    if (kStages == 2) {
      steps > 1 ? load_queries(1, ahead) : ptx::cp_async_commit();
      advance(&ahead, last);
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
    for (int step = 0; step < steps; ++step) {
      query_tile(step % kStages, now, steps - step > kStages, ahead);
      advance(&now, last);
      advance(&ahead, last);
    }
    ptx::cp_async_wait<0>();
  }

  __device__ void use_stage(int stage) {
    q_tile = reinterpret_cast<T*>(stages + stage * kStageBytes);
    dout_tile = q_tile + kM * kStride;
    lse = reinterpret_cast<float*>(dout_tile + kM * kStride);
    delta = lse + kM;
    unsigned char* const scores = stages + kStages * kStageBytes;
    dscore_tile = reinterpret_cast<T*>(scores + (kInRegisters ? stage * kScoreBytes : 0));
    weight_tile = reinterpret_cast<T*>(scores + kScoreBytes);
  }

  __device__ void load_queries(int stage, Position position) {
    const auto [h, m] = position;
    use_stage(stage);
    const int64_t row = place()->query_start + m * kM;
    const int rows = min(kM, walk()->length_q - m * kM);
    load_tile<T, kM, kHeadDim, kThreads>(q_tile, row_pointer<const T>(p.q, b, h, row), p.q.row_stride, rows,
                                         static_cast<int>(p.head_dim));
    load_tile<T, kM, kHeadDim, kThreads>(dout_tile, row_pointer<const T>(p.dout, b, h, row), p.dout.row_stride, rows,
                                         static_cast<int>(p.head_dim_v));
    ptx::cp_async_commit();
    const int64_t index = h * workspace.rows + (p.is_varlen() ? row : b * p.seqlen_q + row);
    for (int i = threadIdx.x; i < kM; i += kThreads) {
      lse[i] = i < rows ? workspace.lse[index + i] : infinity();
      delta[i] = i < rows ? workspace.delta[index + i] : 0.f;
    }
  }

  // The tile `now`, which lies in `stage`. When there is `more` the tile `ahead` follows it there.
  __device__ void query_tile(int stage, Position now, bool more, Position ahead) {
    const auto [h, m] = now;
    if (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    use_stage(stage);
    float weights[kKeyTiles][kScoreTiles][4], dscores[kKeyTiles][kScoreTiles][4];
    product(weights, k_tile, q_tile);
    product(dscores, v_tile, dout_tile);
    const int row0 = m * kM;
    const bool full = row0 >= walk()->first_full_row && row0 + kM <= walk()->end_full_row;
    full ? gradients<false>(h, row0, weights, dscores) : gradients<true>(h, row0, weights, dscores);
    store_scores(dscore_tile, dscores);
    if constexpr (kInRegisters) {
      // With two stages a step has one barrier: behind it dS of this step is there for all, the next step's queries
      // have arrived, and those of this step may be overwritten by the step after the next.
      accumulate(dv, Registers{weights}, dout_tile);
      accumulate(dk, Registers{dscores}, q_tile);
      if (kStages == 2) ptx::cp_async_wait<0>();
      __syncthreads();
      if (more) load_queries(stage, ahead);
      query_gradient(h, m);
    } else {
      store_scores(weight_tile, weights);
      __syncthreads();
      accumulate(dv, Memory{weight_tile}, dout_tile);
      accumulate(dk, Memory{dscore_tile}, q_tile);
      query_gradient(h, m);
      if (kStages == 2) ptx::cp_async_wait<0>();
      __syncthreads();
      if (more) load_queries(stage, ahead);
    }
  }

  __device__ void store_scores(T* tile, const float (&scores)[kKeyTiles][kScoreTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        T* at = tile + (score_key(i) + g()) * kScoreStride + score_query() + n * 8 + 2 * t();
        Core::store_pair(at, scores[i][n][0], scores[i][n][1]);
        Core::store_pair(at + 8 * kScoreStride, scores[i][n][2], scores[i][n][3]);
      }
    }
  }

  // This warp's part of the scores: rows of `a` times rows of `b`.
  __device__ static void product(float (&c)[kKeyTiles][kScoreTiles][4], const T* a_tile, const T* b_tile) {
#pragma unroll
    for (int i = 0; i < kKeyTiles * kScoreTiles; ++i) {
      for (int e = 0; e < 4; ++e) c[i / kScoreTiles][i % kScoreTiles][e] = 0;
    }
#pragma unroll
    for (int d = 0; d < kHeadDim; d += Core::kK) {
      typename Core::A a[kKeyTiles];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) a[i] = Core::load_a(a_tile, kStride, score_key(i), d);
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        typename Core::B pair[2];
        Core::load_b(pair, b_tile, kStride, score_query() + n * 8, d);
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
  __device__ void gradients(int h, int row0, float (&weights)[kKeyTiles][kScoreTiles][4],
                            float (&dscores)[kKeyTiles][kScoreTiles][4]) const {
    [[maybe_unused]] const Dropout dropout(p, b);
    const int key = n * kN + score_key(0), row = row0 + score_query();
    SeenBy<kKeyTiles> seen_by;
    if (kMasked) seen_by = SeenBy<kKeyTiles>(mask(), row + 2 * t(), key + g());
    weigh_and_differentiate<kMasked, kDropout>(
        weights, dscores, workspace.score, lse + score_query() + 2 * t(), delta + score_query() + 2 * t(), seen_by,
        [&](int n) { return dropout.template transposed<kKeyTiles>(h, key, row + n * 8); });
  }

  // Where the products for dk and dv find P^T and dS^T.
  struct Registers {
    const float (&scores)[kKeyTiles][kScoreTiles][4];
    __device__ typename Core::A operator()(int i, int step) const { return Core::from_accumulators(scores[i], step); }
  };
  struct Memory {
    const T* tile;
    __device__ typename Core::A operator()(int i, int step) const {
      return Core::load_a_paired(tile, kScoreStride, grad_key(i), step * Core::kK);
    }
  };

  // This warp's part of dk or dv += (scores as [keys][queries]) * rows of the tile
  template <class Scores>
  __device__ void accumulate(float (&sum)[kGradKeyTiles][kGradColumnTiles][4], const Scores& scores,
                             const T* tile) const {
#pragma unroll
    for (int step = 0; step < kM / Core::kK; ++step) {
      typename Core::A a[kGradKeyTiles];
#pragma unroll
      for (int i = 0; i < kGradKeyTiles; ++i) a[i] = scores(i, step);
#pragma unroll
      for (int c = 0; c < kGradColumnTiles; c += 2) {
        typename Core::B pair[2];
        Core::load_b_transposed(pair, tile, kStride, step * Core::kK, grad_column() + c * 8);
#pragma unroll
        for (int i = 0; i < kGradKeyTiles; ++i) {
          Core::mma(sum[i][c], a[i], pair[0]);
          Core::mma(sum[i][c + 1], a[i], pair[1]);
        }
      }
    }
  }

  // dq += dS K, into global memory.
  __device__ void query_gradient(int h, int m) const {
    const int64_t tile = h * workspace.tiles + place()->first_query_tile + m;
    const int before = p.deterministic ? key_tiles_before(mask(), n, kN, m * kM, kM) : 0;
    const DqOrder order{workspace.dq_added + tile * kSplits + split(), threadIdx.x == 0, [&] { return before; },
                        [] { __syncthreads(); }};
    if (p.deterministic) order.await_earlier_keys();
    float sum[kQueryRowTiles][kQueryColumnTiles][4] = {};
#pragma unroll
    for (int key = 0; key < kN; key += Core::kK) {
      typename Core::A a[kQueryRowTiles];
#pragma unroll
      for (int i = 0; i < kQueryRowTiles; ++i) {
        a[i] = Core::load_a_transposed(dscore_tile, kScoreStride, key, query_row() + i * 16);
      }
#pragma unroll
      for (int c = 0; c < kQueryColumnTiles; c += 2) {
        typename Core::B pair[2];
        Core::load_b_transposed(pair, k_tile, kStride, key, query_column(split()) + c * 8);
#pragma unroll
        for (int i = 0; i < kQueryRowTiles; ++i) {
          Core::mma(sum[i][c], a[i], pair[0]);
          Core::mma(sum[i][c + 1], a[i], pair[1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kQueryRowTiles; ++i) {
#pragma unroll
      for (int c = 0; c < kQueryColumnTiles; ++c) {
        ptx::add_fragment(dq_fragment(workspace, tile, split(), i, c), sum[i][c]);
      }
    }
    if (p.deterministic) order.admit_later_keys();
  }

  __device__ void write(const TensorView& view, const float (&sum)[kGradKeyTiles][kGradColumnTiles][4], int columns,
                        float factor) const {
#pragma unroll
    for (int i = 0; i < 2 * kGradKeyTiles; ++i) {
      const int key = grad_key(0) + i * 8 + g();
      if (n * kN + key >= walk()->length_k) continue;
      T* to = row_pointer<T>(view, b, hk, place()->key_start + n * kN + key);
#pragma unroll
      for (int c = 0; c < kGradColumnTiles; ++c) {
        const int column = grad_column() + c * 8 + 2 * t();
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
    backward_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardWorkspace workspace,
                    const __grid_constant__ TileOrder order) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Kernel = Backward<T, kHeadDim, kDropout, kLarge>;
  Kernel tile(p, workspace, reinterpret_cast<T*>(memory));
  const int heads = static_cast<int>(p.heads_k);
  const auto [head, block] = order.index(blockIdx.x / Kernel::kSplits, heads * static_cast<int>(p.batch));
  tile.run(head / heads, head % heads, block, order.blocks);
}

template <class T, int kHeadDim, bool kLarge>
BackwardWorkspace backward_workspace(const AttnGradParams& p) {
  constexpr BackwardTile kTile = backward_tile<sizeof(T), kHeadDim, kLarge>();
  return BackwardWorkspace(p, kTile.queries, int64_t{kTile.queries} * kHeadDim, kTile.splits);
}

template <class T, int kHeadDim, bool kDropout, bool kLarge>
void launch_main(const AttnGradParams& p, const BackwardWorkspace& workspace) {
  using Kernel = Backward<T, kHeadDim, kDropout, kLarge>;
  if (p.batch * p.heads_k == 0) return;
  const int64_t blocks = tiles(p.seqlen_k, Kernel::kN);
  launch(backward_kernel<T, kHeadDim, kDropout, kLarge>, "backward", p, blocks * p.batch * p.heads_k * Kernel::kSplits,
         Kernel::kThreads, Kernel::kSharedBytes, workspace, backward_order(p, blocks, sizeof(T)));
}

template <class T, int kHeadDim, bool kLarge>
void launch_backward(const AttnGradParams& p) {
  const BackwardWorkspace workspace = backward_workspace<T, kHeadDim, kLarge>(p);
  launch_prepare<T>(p, workspace);
  p.has_dropout() ? launch_main<T, kHeadDim, true, kLarge>(p, workspace)
                  : launch_main<T, kHeadDim, false, kLarge>(p, workspace);
  launch_finish<Backward<T, kHeadDim, false, kLarge>>(p, workspace);
}

template <class T, int kHeadDim>
size_t backward_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(has_large_shared_memory() ? backward_workspace<T, kHeadDim, true>(p).bytes
                                                       : backward_workspace<T, kHeadDim, false>(p).bytes);
}

template <class T, int kHeadDim>
void backward(const AttnGradParams& p) {
  has_large_shared_memory() ? launch_backward<T, kHeadDim, true>(p) : launch_backward<T, kHeadDim, false>(p);
}

}  // namespace flashattn_ext::sm80
