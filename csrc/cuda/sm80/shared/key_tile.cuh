// Base of the kernels in which a thread block keeps one tile of keys and walks over the tiles of queries that see it:
// the backward (backward.cuh) and second derivatives (second.cuh). Scores are transposed, [keys][queries], and divided
// among the warps; the fp32 sums of dq are in the workspace.
//
// Kernel: the derived type. Its kTileBytes is the size of its tiles in shared memory, and Notes follow. It defines
//   load_keys(row, count)        starts copying `count` rows of keys, from `row` of the tensors on
//   load_queries(stage, tile)    starts copying a tile of queries into a stage
//   isolate_keys()               called before the first step: see the visibility policy (backward_visibility.cuh)
//   hold_values()                with kTile.holds_values: reads them into registers before the first queries come
//   compute_step(...)            one step of the walk, whose queries have arrived
//   end_head(h)                  called after the last query tile of a head
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/sm80/shared/tiles.h"
#include "cuda/stages/backward_finish.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn_ext::sm80 {

// How the warps of a thread block divide a tile and its sums. Sizes: kTile, the BackwardTile.
template <class T, int kHeadDimension, class Sizes>
struct KeyTileShape {
  using Element = T;
  using Core = TensorCore<T>;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr BackwardTile kTile = Sizes::kTile;
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32, kQueries = kTile.queries, kKeys = kTile.keys;
  static constexpr int kSplits = kTile.splits, kStages = kTile.stages, kTileRows = kQueries;
  static constexpr bool kHoldsValues = kTile.holds_values;
  static constexpr int kColumns = kHeadDim / kSplits;  // columns of dq, dk and dv that one thread block computes
  // Tiles of q, k, v and dout.
  using RowTile = OperandTile<T, kHeadDim, InputTile<T, kHeadDim>::kSwizzled || kTile.swizzles>;
  // One warp's part of the scores.
  static constexpr bool kInRegisters = kTile.score_key_warps == kWarps;
  using ScoreTile = OperandTile<T, kQueries, kTile.swizzles>;  // rows are keys, columns queries
  static_assert(sizeof(T) == 2 || (!kTile.swizzles && !kTile.holds_values));
  static constexpr int kScoreStride = ScoreTile::kStride;
  static constexpr int kKeyTiles = kKeys / kTile.score_key_warps / 16;
  // A warp that has all queries of its keys computes them in parts, whose scores registers have room for.
  static constexpr int kWarpQueries = kQueries / (kWarps / kTile.score_key_warps);
  static constexpr bool kFewScores = kHeadDim > 96 || (kHoldsValues && kHeadDim == 64);  // else registers spill
  static constexpr int kMostScoreTiles = (kFewScores ? 4 : kHeadDim > 32 ? 8 : 16) / kKeyTiles;
  static constexpr int kParts =
      kInRegisters && kWarpQueries > kMostScoreTiles * 8 ? kWarpQueries / (kMostScoreTiles * 8) : 1;
  static constexpr int kPartQueries = kQueries / kParts;
  static constexpr int kScoreTiles = kWarpQueries / kParts / 8;
  using Scores = float[kKeyTiles][kScoreTiles][4];
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

  // Which part of the columns of dq, dk and dv this thread block computes.
  static __device__ int split() { return blockIdx.x % kSplits; }

  // This warp's part of the scores, within the block's tiles.
  static __device__ int warp() { return threadIdx.x / 32; }
  static __device__ int score_key(int i) { return (warp() % kTile.score_key_warps * kKeyTiles + i) * 16; }
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
};

// Block-uniform values that little code uses are kept in shared memory; in registers they would be live everywhere.
struct KeyTileExtent {
  int length_q, length_k;            // lengths of the sequence
  int unmasked_begin, unmasked_end;  // queries that see all keys of this tile
};

// What the arithmetic of a warp's scores reads besides their products, in a step or a part of one.
template <class Params, class Workspace, class Mask>
struct KeyTileStep {
  const Params& p;
  const Workspace& workspace;
  const KeyTileExtent* extent;
  int b, h;
  int row0, query;                      // the first query of the tile; of the warp, within the tile
  int key;                              // the first key of the warp, within the sequence
  bool is_first_split;                  // whether the block has the first split of the columns
  const float *lse, *log2_sum, *delta;  // statistics of the tile of queries, in shared memory
  const float* more;                    // behind delta: what the policy keeps for each query

  __device__ Mask mask() const { return Mask(p, extent->length_q, extent->length_k); }
};

// Shape: the KeyTileShape. Params: of the call. Workspace: BackwardWorkspace, or derived from it.
template <class Kernel, class Shape, class Params, class Workspace, class Visibility>
struct KeyTileKernel : Shape {
  using typename Shape::Core, typename Shape::Element, typename Shape::KeySums, typename Shape::RowTile;
  using typename Shape::Scores, typename Shape::ScoreTile;
  using T = typename Shape::Element;
  using Shape::kKeys, Shape::kQueries, Shape::kSplits, Shape::kStages, Shape::kScoreStride, Shape::kHeadDim;
  using Shape::kKeyTiles, Shape::kScoreTiles, Shape::kGradKeyTiles, Shape::kGradColumnTiles;
  using Shape::kQueryRowTiles, Shape::kQueryColumnTiles;
  using Shape::query_row, Shape::query_column, Shape::dq_fragment;
  using Shape::split, Shape::score_key, Shape::grad_key, Shape::grad_column;

  const Params& p;
  const Workspace& workspace;
  T* k_tile;  // the first tile in shared memory
  typename RowTile::Places places;
  typename ScoreTile::Places score_places;
  int b, hk, n;        // n: number of the key tile in its sequence
  int part_query = 0;  // the first query of the part of a query tile (kParts)
  KeySums dk, dv;

  __device__ KeyTileKernel(const Params& params, const Workspace& workspace, T* shared)
      : p(params), workspace(workspace), k_tile(shared) {}

  struct Starts {
    int query, key;  // first rows of the sequence
    int dq_tile;     // first tile of the sequence in the workspace's dq
    int query_tile;  // first query tile that sees keys of this tile
  };
  struct Notes {
    KeyTileExtent extent;
    Starts starts;
    typename Visibility::Notes visibility;
  };
  __device__ const Kernel& kernel() const { return static_cast<const Kernel&>(*this); }
  __device__ Kernel& kernel() { return static_cast<Kernel&>(*this); }
  __device__ Notes* notes() const {
    return reinterpret_cast<Notes*>(reinterpret_cast<char*>(k_tile) + Kernel::kTileBytes);
  }
  __device__ KeyTileExtent* extent() const { return &notes()->extent; }
  __device__ Starts* starts() const { return &notes()->starts; }
  __device__ int score_query() const { return Shape::score_query() + part_query; }
  using Mask = typename Visibility::Mask;
  __device__ int first_score_key() const { return n * kKeys + score_key(0); }  // within the sequence
  __device__ Mask mask() const { return Mask(p, extent()->length_q, extent()->length_k); }

  __device__ auto step_of(int h, int row0, const float* lse, const float* log2_sum, const float* delta) const {
    return KeyTileStep<Params, Workspace, Mask>{
        p,        workspace, extent(),        b, h, row0, score_query(), first_score_key(), split() == 0, lse,
        log2_sum, delta,     delta + kQueries};
  }

  // Ends a head for a policy of gradients. The first split of the columns does it for all.
  template <class Gradients>
  __device__ void end_head(Gradients& gradients, int h) const {
    if (split() == 0) gradients.end_head(p, workspace, b, h, n, Shape::warp(), first_score_key(), extent()->length_k);
  }

  // Computes key tile number `tile` of the `tiles` tiles of a head that the host knows and, if the sequence is longer
  // than that, every tiles-th tile after it. In a deterministic call a tile waits for the earlier tiles of its head,
  // which must therefore be under way: there the thread block of the last known tile computes all tiles after it.
  __device__ void run(int batch, int head_k, int tile, int tiles) {
    b = batch;
    hk = head_k;
    for (n = tile; n * kKeys < key_sequence(p, b).length; n += p.deterministic ? 1 : tiles) {
      key_tile();
      __syncthreads();
      if (p.deterministic && n < tiles - 1) break;
    }
  }

  __device__ void key_tile() {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const Mask mask(p, queries.length, keys.length);
    const int key_start = static_cast<int>(keys.start);
    const int key0 = n * kKeys, key_count = min(kKeys, mask.seqlen_k - key0);
    const Visibility visibility(kernel(), mask, key_start, key0, key0 + key_count);
    const Limits seen_by = visibility.some(mask.rows_of(key0, key0 + key_count));
    const int first = seen_by.begin / kQueries, last = (seen_by.end - 1) / kQueries;
    if (threadIdx.x == 0) {
      const Limits all = visibility.all(mask.rows_of_all(key0, key0 + kKeys), mask.seqlen_q);
      // Rows after the last query are zeros, and need no mask.
      *extent() = {mask.seqlen_q, mask.seqlen_k, all.begin, all.end == mask.seqlen_q ? all.end + kQueries : all.end};
      *starts() = {static_cast<int>(queries.start), key_start, static_cast<int>(workspace.first_tile(p, b, queries)),
                   first};
    }
    visibility.note(kernel(), mask, key_start, first, last);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kGradKeyTiles; ++i) {
      set_zero(dk[i]);
      set_zero(dv[i]);
    }
    if (seen_by.end > seen_by.begin && p.heads_q > 0) {
      kernel().load_keys(keys.start + key0, key_count);
      walk_queries(first, last);
    }
    store_gradient(p.dk, dk, static_cast<int>(p.head_dim), workspace.gradient_scale);
    store_gradient(p.dv, dv, static_cast<int>(p.head_dim_v), workspace.keep_scale);
  }

  using QueryTile = typename Visibility::QueryTile;
  using Walk = typename Visibility::Walk;
  __device__ void walk_queries(int first, int last) {
    Walk walk(kernel(), first, last);
    if (walk.is_empty()) {
      ptx::cp_async_commit();
      return ptx::cp_async_wait<0>();
    }
    if constexpr (Shape::kHoldsValues) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      kernel().isolate_keys();
      kernel().hold_values();
      __syncthreads();
    }
    kernel().load_queries(0, walk.next(kernel(), 0));
    walk.advance_ahead(kernel(), 1);
    if (kStages == 2) {
      walk.steps > 1 ? kernel().load_queries(1, walk.next(kernel(), 1)) : ptx::cp_async_commit();
      walk.advance_ahead(kernel(), 2);
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
    if constexpr (!Shape::kHoldsValues) kernel().isolate_keys();
    for (int step = 0; step < walk.steps; ++step) {
      if (kStages == 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();
      }
      const QueryTile& now = walk.now(kernel(), step);
      kernel().compute_step(step, now, walk.steps - step > kStages, walk);
      if (walk.ends_head(now)) kernel().end_head(now.h);
      walk.advance(kernel(), step + kStages + 1);
    }
    ptx::cp_async_wait<0>();
  }

  // Computes the places of a step again, which would be kept in registers from step to step.
  __device__ void recompute_places() {
    places.recompute();
    score_places.recompute();
  }

  __device__ void store_scores(T* tile, const Scores& scores) const {
    unrolled<kKeyTiles, kScoreTiles>([&](int i, int n) {
      T* at = tile + ScoreTile::offset(score_key(i) + quad(), score_query() + n * 8 + 2 * lane_in_quad());
      Core::store_pair(at, scores[i][n][0], scores[i][n][1]);
      Core::store_pair(at + 8 * kScoreStride, scores[i][n][2], scores[i][n][3]);
    });
  }

  // This warp's part of dk or dv += scores * rows of the tile. The scores are [keys][queries]: of this warp in
  // registers, for a part of the tile, or of all warps in shared memory.
  __device__ void accumulate_keys(KeySums& sum, const Scores& scores, const T* tile) const {
    auto operand = [&](int i, int step) { return Core::from_accumulators(scores[i], step); };
    accumulate<RowTile, Shape::kPartQueries / Core::kK>(sum, places, operand, tile + part_query * RowTile::kStride,
                                                        grad_column());
  }
  __device__ void accumulate_keys(KeySums& sum, const T* scores, const T* tile) const {
    auto operand = [&](int i, int step) {
      if constexpr (ScoreTile::kSwizzled) {
        return ScoreTile::load_a(scores + grad_key(i) * kScoreStride,
                                 ScoreTile::moved(score_places.a, step * Core::kK));
      } else {
        return Core::load_a_paired(scores, kScoreStride, grad_key(i), step * Core::kK);
      }
    };
    accumulate<RowTile, kQueries / Core::kK>(sum, places, operand, tile, grad_column());
  }

  // sum += scores^T * rows of a tile of keys, for this warp's part of dq. The scores are [keys][queries].
  using QuerySums = float[kQueryRowTiles][kQueryColumnTiles][4];
  __device__ void multiply_keys(QuerySums& sum, const T* scores, const T* tile) const {
    auto operand = [&](int i, int step) {
      if constexpr (ScoreTile::kSwizzled) {
        const int place = ScoreTile::moved(score_places.b, query_row());
        return ScoreTile::load_a_transposed(scores + step * Core::kK * kScoreStride, ScoreTile::moved(place, i * 16));
      } else {
        return Core::load_a_transposed(scores, kScoreStride, step * Core::kK, query_row() + i * 16);
      }
    };
    accumulate<RowTile, kKeys / Core::kK>(sum, places, operand, tile, query_column(split()));
  }

  // dq of a tile += the sum that multiply(sum) adds to zeros, in the workspace.
  template <class Multiply>
  __device__ void add_query_gradient(const QueryTile& now, const Multiply& multiply) const {
    const int64_t tile = now.h * workspace.tiles + starts()->dq_tile + now.m;
    const int before = p.deterministic ? Visibility::added_before(kernel(), now) : 0;
    const DqOrder order{workspace.dq_added + tile * kSplits + split(), threadIdx.x == 0, [&] { return before; },
                        [&] { return Visibility::added_after(kernel(), before); }, [] { __syncthreads(); }};
    if (p.deterministic) order.await_earlier_keys();
    QuerySums sum = {};
    multiply(sum);
    float* const place = ptx::opaque_place_in_fragment(dq_fragment(workspace, tile, split(), 0, 0));
    unrolled<kQueryRowTiles, kQueryColumnTiles>(
        [&](int i, int c) { ptx::add_fragment_at(place + (i * kQueryColumnTiles + c) * 128, sum[i][c]); });
    if (p.deterministic) order.admit_later_keys();
  }

  // Stores this warp's part of dk or dv, times a factor.
  __device__ void store_gradient(const TensorView& view, const KeySums& sum, int columns, float factor) const {
#pragma unroll
    for (int i = 0; i < 2 * kGradKeyTiles; ++i) {
      const int key = grad_key(0) + i * 8 + quad();
      if (n * kKeys + key >= extent()->length_k) continue;
      T* to = row_pointer<T>(view, b, hk, starts()->key + n * kKeys + key);
#pragma unroll
      for (int c = 0; c < kGradColumnTiles; ++c) {
        const int column = grad_column() + c * 8 + 2 * lane_in_quad();
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

}  // namespace flashattn_ext::sm80
