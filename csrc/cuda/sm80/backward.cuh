// Backward on every GPU since Ampere: a thread block keeps one tile of keys and walks over the tiles of queries that
// see it (Dao 2023, "FlashAttention-2", Algorithm 2). Scores are transposed, S^T = K Q^T, and divided among the warps.
// If a warp has all queries of its keys, it holds P^T and dS^T in registers as operands of the products for dv and dk,
// and only dS^T goes through shared memory, for dq. Otherwise both go through shared memory, which allows warp tiles
// that are closer to squares and read less. The fp32 sums of dq are in the workspace.
#pragma once

#include "../common/backward_finish.cuh"
#include "../common/bias_finish.cuh"
#include "../common/device.h"
#include "../common/products.cuh"
#include "../common/tile_order.cuh"
#include "backward_policies.cuh"
#include "tiles.h"

namespace flashattn_ext::sm80 {

template <class T, int kHeadDimension, Options kOptions, bool kLarge>
struct Backward {
  using Element = T;
  using Core = TensorCore<T>;
  using Policies = BackwardPolicies<kOptions>;
  using Visibility = typename Policies::Visibility;
  using Dropping = typename Policies::Dropping;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr BackwardTile kTile = backward_tile<T, kHeadDim, kLarge>();
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32, kQueries = kTile.queries, kKeys = kTile.keys;
  static constexpr int kSplits = kTile.splits, kStages = kTile.stages, kTileRows = kQueries;
  static constexpr int kColumns = kHeadDim / kSplits;  // of dq, dk and dv that one thread block computes
  using RowTile = InputTile<T, kHeadDim>;              // of q, k, v and dout
  static constexpr int kScoreStride = kTileStride<T, kQueries>;
  // One warp's part of the scores.
  static constexpr bool kInRegisters = kTile.score_key_warps == kWarps;
  static constexpr int kKeyTiles = kKeys / kTile.score_key_warps / 16;
  static constexpr int kScoreTiles = kQueries / (kWarps / kTile.score_key_warps) / 8;
  using Scores = float[kKeyTiles][kScoreTiles][4];
  using Gradients = typename Policies::template Gradients<T, kKeyTiles, kScoreTiles>;
  using Workspace = typename Gradients::Workspace;
  static_assert(kScoreTiles % 2 == 0 && kKeys % (kTile.score_key_warps * 16) == 0);
  // One warp's part of dk and dv.
  static constexpr int kGradKeyTiles = kKeys / kTile.grad_key_warps / 16;
  static constexpr int kGradColumnTiles = kColumns / (kWarps / kTile.grad_key_warps) / 8;
  using KeySums = float[kGradKeyTiles][kGradColumnTiles][4];
  static_assert(kGradColumnTiles % 2 == 0 && kKeys % (kTile.grad_key_warps * 16) == 0);
  static_assert(!kInRegisters || kTile.grad_key_warps == kWarps);
  // One warp's part of dq: 32 rows, if that leaves the warp whole pairs of column tiles.
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr bool kTallRows =
      kQueries >= 32 && kQueries / 32 <= kWarps && kColumnTiles * (kQueries / 32) / kWarps % 2 == 0;
  static constexpr int kRowWarps = kTallRows ? kQueries / 32 : kQueries / 16 < kWarps ? kQueries / 16 : kWarps;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kQueryRowTiles = kQueries / 16 / kRowWarps, kQueryColumnTiles = kColumnTiles / kColumnWarps;
  static_assert(kQueryColumnTiles % 2 == 0 && kColumnTiles % kColumnWarps == 0 && kQueries / 16 % kRowWarps == 0);
  // Shared memory has k and v [kKeys][kHeadDim]; stages of q and dout [kQueries][kHeadDim], lse, delta and what
  // Gradients::load_row adds [kQueries]; buffers of scores [kKeys][kScoreStride]; and Notes. Scores are
  // dS^T of kStages steps when P^T stays in registers, otherwise dS^T and P^T of one step.
  static constexpr int kBytes = sizeof(T), kScoreBytes = kKeys * kScoreStride * kBytes;
  static constexpr int kStageBytes = 2 * kQueries * RowTile::kRowBytes + kQueries * (2 * 4 + Gradients::kRowBytes);
  static constexpr int kScoreBuffers = kInRegisters ? kStages : 2;
  static constexpr int kTileBytes =
      2 * kKeys * RowTile::kRowBytes + kStages * kStageBytes + kScoreBuffers * kScoreBytes;

  const AttnGradParams& p;
  const Workspace& workspace;
  T *k_tile, *v_tile;
  unsigned char* stages;
  T *q_tile, *dout_tile;  // of the stage in use
  float *lse, *delta;
  T *dscore_tile, *weight_tile;
  typename RowTile::Places places;
  int b, hk, n;  // n: number of the key tile in its sequence
  KeySums dk, dv;
  Gradients gradients;

  __device__ Backward(const AttnGradParams& params, const Workspace& workspace, T* shared)
      : p(params),
        workspace(workspace),
        k_tile(shared),
        v_tile(k_tile + kKeys * RowTile::kStride),
        stages(reinterpret_cast<unsigned char*>(v_tile + kKeys * RowTile::kStride)) {}

  // Which part of the columns of dq, dk and dv this thread block computes.
  static __device__ int split() { return blockIdx.x % kSplits; }

  // This warp's part of the scores, within the block's tiles.
  static __device__ int warp() { return threadIdx.x / 32; }
  static __device__ int score_key(int i) { return (warp() % kTile.score_key_warps * kKeyTiles + i) * 16; }
  __device__ int first_score_key() const { return n * kKeys + score_key(0); }  // within the sequence
  static __device__ int score_query() { return warp() / kTile.score_key_warps * kScoreTiles * 8; }
  // This warp's part of dk and dv.
  static __device__ int grad_key(int i) { return (warp() % kTile.grad_key_warps * kGradKeyTiles + i) * 16; }
  static __device__ int grad_column() {
    return split() * kColumns + warp() / kTile.grad_key_warps * kGradColumnTiles * 8;
  }
  // This warp's part of dq.
  static __device__ int query_row() { return warp() % kRowWarps * kQueryRowTiles * 16; }
  static __device__ int query_column(int split) {
    return split * kColumns + warp() / kRowWarps * kQueryColumnTiles * 8;
  }
  // Where accumulators (i, c) of that part are summed up, in tile `tile` of the workspace's dq.
  static __device__ float* dq_fragment(const BackwardWorkspace& workspace, int64_t tile, int split, int i, int c) {
    const int index = ((split * kWarps + warp()) * kQueryRowTiles + i) * kQueryColumnTiles + c;
    return workspace.dq + tile * (kQueries * kHeadDim) + index * 128;
  }

  // Block-uniform values that little code uses are kept in shared memory; in registers they would be live everywhere.
  struct Extent {
    int length_q, length_k;            // of the sequence
    int unmasked_begin, unmasked_end;  // queries that see all keys of this tile
  };
  struct Starts {
    int query, key;  // first rows of the sequence
    int dq_tile;     // first tile of the sequence in the workspace's dq
    int query_tile;  // first query tile that sees keys of this tile
  };
  struct Notes {
    Extent extent;
    Starts starts;
    typename Visibility::Notes visibility;
  };
  static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Notes));
  static_assert(kSharedBytes <= (kLarge ? kLargeShared : least_shared<kBytes, kHeadDim>()));
  __device__ Notes* notes() const { return reinterpret_cast<Notes*>(reinterpret_cast<char*>(k_tile) + kTileBytes); }
  __device__ Extent* extent() const { return &notes()->extent; }
  __device__ Starts* starts() const { return &notes()->starts; }
  using Mask = typename Visibility::Mask;
  __device__ Mask mask() const { return Mask(p, extent()->length_q, extent()->length_k); }

  // Computes key tile `tile` of a head and every step-th after it: more than one only if the sequence is longer than
  // the grid was sized for.
  __device__ void run(int batch, int head_k, int tile, int step) {
    b = batch;
    hk = head_k;
    for (n = tile; n * kKeys < key_sequence(p, b).length; n += step) {
      key_tile();
      __syncthreads();
    }
  }

  __device__ void key_tile() {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const Mask mask(p, queries.length, keys.length);
    const int key_start = static_cast<int>(keys.start);
    const int key0 = n * kKeys, key_count = min(kKeys, mask.seqlen_k - key0);
    const Visibility visibility(*this, mask, key_start, key0, key0 + key_count);
    const Limits seen_by = visibility.some(mask.rows_of(key0, key0 + key_count));
    const int first = seen_by.begin / kQueries, last = (seen_by.end - 1) / kQueries;
    if (threadIdx.x == 0) {
      const Limits all = visibility.all(mask.rows_of_all(key0, key0 + kKeys), mask.seqlen_q);
      // Rows after the last query are zeros, and need no mask.
      *extent() = {mask.seqlen_q, mask.seqlen_k, all.begin, all.end == mask.seqlen_q ? all.end + kQueries : all.end};
      *starts() = {static_cast<int>(queries.start), key_start, static_cast<int>(workspace.first_tile(p, b, queries)),
                   first};
    }
    visibility.note(*this, mask, key_start, first, last);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGradKeyTiles; ++i) {
      set_zero(dk[i]);
      set_zero(dv[i]);
    }
    if (seen_by.end > seen_by.begin && p.heads_q > 0) {
      const int64_t row = keys.start + key0;
      load_tile<RowTile, kKeys, kThreads>(k_tile, row_pointer<const T>(p.k, b, hk, row), p.k.row_stride, key_count,
                                          static_cast<int>(p.head_dim));
      load_tile<RowTile, kKeys, kThreads>(v_tile, row_pointer<const T>(p.v, b, hk, row), p.v.row_stride, key_count,
                                          static_cast<int>(p.head_dim_v));
      walk_queries(first, last);
    }
    write(p.dk, dk, static_cast<int>(p.head_dim), workspace.gradient_scale);
    write(p.dv, dv, static_cast<int>(p.head_dim_v), workspace.keep_scale);
  }

  // The walk over query tiles: all tiles of one head, then all of the group's next head.
  struct QueryTile {
    int h, m;  // query head, number of the tile in its sequence
  };
  __device__ void advance(QueryTile* tile, int last) const {
    if (++tile->m > last) *tile = {tile->h + 1, starts()->query_tile};
  }

  __device__ void walk_queries(int first, int last) {
    const int group = static_cast<int>(p.group_size()), steps = (last + 1 - first) * group;
    QueryTile now{hk * group, first}, ahead = now;
    load_queries(0, ahead);
    advance(&ahead, last);
    if (kStages == 2) {
      steps > 1 ? load_queries(1, ahead) : ptx::cp_async_commit();
      advance(&ahead, last);
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
    Visibility::isolate_keys(*this);
    for (int step = 0; step < steps; ++step) {
      compute_step(step % kStages, now, steps - step > kStages, ahead);
      if (now.m == last) gradients.end_head(*this, now.h);
      advance(&now, last);
      advance(&ahead, last);
    }
    ptx::cp_async_wait<0>();
  }

  __device__ void use_stage(int stage) {
    q_tile = reinterpret_cast<T*>(stages + stage * kStageBytes);
    dout_tile = q_tile + kQueries * RowTile::kStride;
    lse = reinterpret_cast<float*>(dout_tile + kQueries * RowTile::kStride);
    delta = lse + kQueries;
    unsigned char* const scores = stages + kStages * kStageBytes;
    dscore_tile = reinterpret_cast<T*>(scores + (kInRegisters ? stage * kScoreBytes : 0));
    weight_tile = reinterpret_cast<T*>(scores + kScoreBytes);
  }

  __device__ void load_queries(int stage, QueryTile tile) {
    const auto [h, m] = tile;
    use_stage(stage);
    const int64_t row = starts()->query + m * kQueries;
    const int rows = min(kQueries, extent()->length_q - m * kQueries);
    load_tile<RowTile, kQueries, kThreads>(q_tile, row_pointer<const T>(p.q, b, h, row), p.q.row_stride, rows,
                                           static_cast<int>(p.head_dim));
    load_tile<RowTile, kQueries, kThreads>(dout_tile, row_pointer<const T>(p.dout, b, h, row), p.dout.row_stride, rows,
                                           static_cast<int>(p.head_dim_v));
    ptx::cp_async_commit();
    const int64_t index = h * workspace.rows + (p.is_varlen() ? row : b * p.seqlen_q + row);
    for (int i = threadIdx.x; i < kQueries; i += kThreads) {
      lse[i] = i < rows ? workspace.lse[index + i] : infinity();
      delta[i] = i < rows ? workspace.delta[index + i] : 0.f;
      gradients.load_row(*this, i, h, row + i, i < rows);
    }
  }

  // One step, with the query tile `now`, which is in `stage`. When there is `more`, the tile `ahead` is loaded there
  // next.
  __device__ void compute_step(int stage, QueryTile now, bool more, QueryTile ahead) {
    const auto [h, m] = now;
    if (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    use_stage(stage);
    if (kHeadDim > 64) places.recompute();
    Visibility::isolate_queries(*this, m * kQueries);
    Scores weights, dscores;
    score_product<RowTile>(weights, places, k_tile, score_key(0), q_tile, score_query());
    score_product<RowTile>(dscores, places, v_tile, score_key(0), dout_tile, score_query());
    const int row0 = m * kQueries;
    const bool unmasked = row0 >= extent()->unmasked_begin && row0 + kQueries <= extent()->unmasked_end;
    unmasked && !Gradients::kMasksAlways ? weigh_and_differentiate<false>(h, row0, weights, dscores)
                                         : weigh_and_differentiate<true>(h, row0, weights, dscores);
    store_scores(dscore_tile, dscores);
    if constexpr (kInRegisters) {
      // With two stages a step has one barrier. After it all warps have stored their dS, the next step's queries have
      // arrived, and the queries of the step after the next may overwrite this step's.
      accumulate_keys(dv, weights, dout_tile);
      accumulate_keys(dk, dscores, q_tile);
      if (kStages == 2) ptx::cp_async_wait<0>();
      __syncthreads();
      if (more) load_queries(stage, ahead);
      add_query_gradient(h, m);
    } else {
      store_scores(weight_tile, weights);
      __syncthreads();
      accumulate_keys(dv, weight_tile, dout_tile);
      accumulate_keys(dk, dscore_tile, q_tile);
      add_query_gradient(h, m);
      if (kStages == 2) ptx::cp_async_wait<0>();
      __syncthreads();
      if (more) load_queries(stage, ahead);
    }
  }

  __device__ void store_scores(T* tile, const Scores& scores) const {
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

  // weights: S^T becomes P^T with dropout applied; dscores: dP^T becomes dS^T.
  template <bool kMasked>
  __device__ void weigh_and_differentiate(int h, int row0, Scores& weights, Scores& dscores) {
    const int key = first_score_key(), row = row0 + score_query();
    typename Dropping::template Columns<kKeyTiles> dropping(p, b, h, key, row);
    SeenBy<kKeyTiles> seen_by;
    if constexpr (kMasked) seen_by = SeenBy<kKeyTiles>(Visibility::mask_of(*this, h), row + 2 * t(), key + g());
    gradients.template weigh_and_differentiate<kMasked>(*this, h, row0, weights, dscores, seen_by, dropping);
  }

  // This warp's part of dk or dv += scores * rows of the tile. The scores are [keys][queries], of this warp in
  // registers or of all warps in shared memory.
  __device__ void accumulate_keys(KeySums& sum, const Scores& scores, const T* tile) const {
    auto operand = [&](int i, int step) { return Core::from_accumulators(scores[i], step); };
    accumulate<RowTile, kQueries / Core::kK>(sum, places, operand, tile, grad_column());
  }
  __device__ void accumulate_keys(KeySums& sum, const T* scores, const T* tile) const {
    auto operand = [&](int i, int step) {
      return Core::load_a_paired(scores, kScoreStride, grad_key(i), step * Core::kK);
    };
    accumulate<RowTile, kQueries / Core::kK>(sum, places, operand, tile, grad_column());
  }

  // dq += dS K, in the workspace.
  __device__ void add_query_gradient(int h, int m) const {
    const int64_t tile = h * workspace.tiles + starts()->dq_tile + m;
    const int before = p.deterministic ? Visibility::added_before(*this, m) : 0;
    const DqOrder order{workspace.dq_added + tile * kSplits + split(), threadIdx.x == 0, [&] { return before; },
                        [&] { return Visibility::added_after(*this, before); }, [] { __syncthreads(); }};
    if (p.deterministic) order.await_earlier_keys();
    float sum[kQueryRowTiles][kQueryColumnTiles][4] = {};
    auto operand = [&](int i, int step) {
      return Core::load_a_transposed(dscore_tile, kScoreStride, step * Core::kK, query_row() + i * 16);
    };
    accumulate<RowTile, kKeys / Core::kK>(sum, places, operand, k_tile, query_column(split()));
#pragma unroll
    for (int i = 0; i < kQueryRowTiles; ++i) {
#pragma unroll
      for (int c = 0; c < kQueryColumnTiles; ++c) {
        ptx::add_fragment(dq_fragment(workspace, tile, split(), i, c), sum[i][c]);
      }
    }
    if (p.deterministic) order.admit_later_keys();
  }

  // This warp's part of dk or dv, times a factor, into the tensor.
  __device__ void write(const TensorView& view, const KeySums& sum, int columns, float factor) const {
#pragma unroll
    for (int i = 0; i < 2 * kGradKeyTiles; ++i) {
      const int key = grad_key(0) + i * 8 + g();
      if (n * kKeys + key >= extent()->length_k) continue;
      T* to = row_pointer<T>(view, b, hk, starts()->key + n * kKeys + key);
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

template <class T, int kHeadDim, Options kOptions, bool kLarge>
using WorkspaceOf = typename Backward<T, kHeadDim, kOptions, kLarge>::Workspace;

template <class T, int kHeadDim, Options kOptions, bool kLarge>
__global__ void __launch_bounds__(Backward<T, kHeadDim, kOptions, kLarge>::kThreads)
    backward_kernel(const __grid_constant__ AttnGradParams p,
                    const __grid_constant__ WorkspaceOf<T, kHeadDim, kOptions, kLarge> workspace,
                    const __grid_constant__ TileOrder order) {
  if constexpr (kRunsHere<(kLarge ? kLargeShared : kSmallShared)>) {
    extern __shared__ __align__(16) unsigned char shared[];
    using Kernel = Backward<T, kHeadDim, kOptions, kLarge>;
    Kernel kernel(p, workspace, reinterpret_cast<T*>(shared));
    const int heads = static_cast<int>(p.heads_k);
    const auto [head, block] = order.index(blockIdx.x / Kernel::kSplits, heads * static_cast<int>(p.batch));
    kernel.run(head / heads, head % heads, block, order.blocks);
  } else {
    __trap();
  }
}

template <class T, int kHeadDim, Options kOptions, bool kLarge>
WorkspaceOf<T, kHeadDim, kOptions, kLarge> backward_workspace(const AttnGradParams& p) {
  constexpr BackwardTile kTile = backward_tile<T, kHeadDim, kLarge>();
  const BackwardWorkspace base(p, kTile.queries, int64_t{kTile.queries} * kHeadDim, kTile.splits);
  return WorkspaceOf<T, kHeadDim, kOptions, kLarge>::complete(p, base, kTile.keys, kTile.warps);
}

template <class T, int kHeadDim, Options kOptions, bool kLarge>
void launch_main(const AttnGradParams& p, const WorkspaceOf<T, kHeadDim, kOptions, kLarge>& workspace) {
  using Kernel = Backward<T, kHeadDim, kOptions, kLarge>;
  if (p.batch * p.heads_k == 0) return;
  const int64_t blocks = tile_count(p.seqlen_k, Kernel::kKeys);
  launch(backward_kernel<T, kHeadDim, kOptions, kLarge>, "backward", p, blocks * p.batch * p.heads_k * Kernel::kSplits,
         Kernel::kThreads, Kernel::kSharedBytes, workspace,
         backward_order(p, blocks, sizeof(T), multiprocessors() / Kernel::kSplits));
}

template <class T, int kHeadDim, Options kOptions, bool kLarge>
void launch_backward(const AttnGradParams& p) {
  const auto workspace = backward_workspace<T, kHeadDim, kOptions, kLarge>(p);
  launch_prepare<T>(p, workspace);
  launch_main<T, kHeadDim, kOptions, kLarge>(p, workspace);
  launch_finish<Backward<T, kHeadDim, kPlain, kLarge>>(p, workspace);
  finish_biases(p, workspace);
}

template <class T, int kHeadDim, Options kOptions>
size_t backward_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(has_large_shared_memory() ? backward_workspace<T, kHeadDim, kOptions, true>(p).bytes
                                                       : backward_workspace<T, kHeadDim, kOptions, false>(p).bytes);
}

template <class T, int kHeadDim, Options kOptions>
void backward(const AttnGradParams& p) {
  has_large_shared_memory() ? launch_backward<T, kHeadDim, kOptions, true>(p)
                            : launch_backward<T, kHeadDim, kOptions, false>(p);
}

}  // namespace flashattn_ext::sm80
