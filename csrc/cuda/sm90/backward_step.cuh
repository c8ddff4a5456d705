// Common parts of the two backward kernels for Hopper (backward.cuh, backward_wide.cuh): the description of a key tile,
// the producer warp, and the epilogue that writes dk and dv.
#pragma once

#include "../../bias.h"
#include "../common/backward_finish.cuh"
#include "../common/bias_finish.cuh"
#include "../common/device.h"
#include "../common/dq_order.cuh"
#include "../common/intervals.cuh"
#include "../common/isolation.cuh"
#include "../common/ring.cuh"
#include "../common/scores.cuh"
#include "../common/store_row.cuh"
#include "../common/tensor_map.h"
#include "../common/tile_order.cuh"
#include "named_barriers.h"
#include "pair.cuh"
#include "products.cuh"
#include "tiles.h"

namespace flashattn_ext::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};
// The maps of calls with a 16-bit bias. dbias is unused unless its gradient is wanted.
struct BiasedBackwardMaps : BackwardMaps {
  CUtensorMap bias, dbias;
};

// The layout of dq in the workspace, which backward_finish.cuh reads: tiles of 16 rows, the rows of one warp, so that
// short sequences take little memory. With 128 keys a warpgroup computes 64 rows and 64 columns of a step. The two
// warpgroups of a thread block compute different rows when a step has 128 queries; otherwise they compute different
// columns, and half of the third panel each. With 64 keys one warpgroup computes all columns.
template <class T, int kHeadDimension, bool kWide>
struct DqLayout {
  using Element = T;
  static constexpr int kQueries = tile_of<kernel_table::kSm90Backward, T, kHeadDimension, Kind::kPlain>().queries,
                       kTileRows = 16;
  static constexpr int kParts = kWide ? 1 : 2, kThreads = kParts * kGroupThreads, kSplits = 1;
  // Columns of a warp in dq_finish_kernel.
  static constexpr int kPartColumns = !kWide && kHeadDimension > 128 ? kHeadDimension / 2 : 64;
  static constexpr int kHeadDim = kWide ? kHeadDimension : kParts * kPartColumns * 64 / kQueries;  // some may be unused
  static constexpr int kStride = kTileStride<T, kHeadDim>;
  static constexpr int kQueryRowTiles = 1, kQueryColumnTiles = (kWide ? kHeadDim : kPartColumns) / 8;
  static constexpr int64_t kTileFloats = kTileRows * kHeadDim;
  static constexpr int kOrderedParts =
      is_paired(kHeadDimension) ? 2 : 1;  // parts of a tile, each with its own counter (DqOrder)

  // First row and column of the part of a warp that computes dq.
  static __device__ __forceinline__ int row(int warp) { return (kQueries == 64 ? warp % 4 : warp) * 16; }
  static __device__ __forceinline__ int column(int warp) { return kQueries == 64 ? warp / 4 * 64 : 0; }
  // The address where accumulator tile c of that part is summed. tile: the first tile of the step.
  static __device__ __forceinline__ float* fragment(const BackwardWorkspace& workspace, int64_t tile, int warp, int c) {
    return at(workspace, tile, row(warp), column(warp) / 8 + c);
  }

  // The same for dq_finish_kernel, whose thread blocks have these warps only.
  static __device__ int query_row() { return row(threadIdx.x / 32); }
  static __device__ int query_column(int) {
    const int warp = threadIdx.x / 32;
    return kQueries == 64 ? warp / 4 * kPartColumns : 0;
  }
  static __device__ float* dq_fragment(const BackwardWorkspace& workspace, int64_t tile, int, int, int c) {
    return at(workspace, tile, query_row(), query_column(0) / 8 + c);
  }

 private:
  static __device__ __forceinline__ float* at(const BackwardWorkspace& workspace, int64_t tile, int row,
                                              int column_tile) {
    return workspace.dq + (tile + row / 16) * kTileFloats + column_tile * 128;
  }
};

// One tile of keys, as the producer warp describes it to the warpgroups. They read the description from shared memory
// until the tile is done, because registers are scarce. Numbers count from the start of a sequence.
struct alignas(16) BackwardWork {
  int b, hk, n, key0;  // n: number of the key tile, key0: its first key; no key tile ends the kernel
  int first, tiles;    // query tiles that see it, the same in every head of the group: the first, and how many
  int key_start, length_q, length_k;  // of the sequence; key_start in the rows of its batch entry
  int dq_tile;                        // first tile of the sequence in the workspace's dq
  int unused[2];

  __device__ __forceinline__ bool exists() const { return key0 < length_k; }
  __device__ __forceinline__ Mask32 mask(const AttnParams& p) const { return Mask32(p, length_q, length_k); }
};

template <Kind kKind>
using WorkspaceOf = std::conditional_t<can_score(kKind), GeneralWorkspace, BackwardWorkspace>;

// The description in kernels that can read a Mask.
struct MaskedBackwardWork : BackwardWork {
  Limits unmasked[2];   // queries that see all of the first 64 keys, and of the second
  Limits whole;         // queries for which the Mask hides no key of the tile; causal and window may
  IntervalPairs pairs;  // of the sequence
};
template <Kind kKind>
using BackwardWorkOf = std::conditional_t<can_mask(kKind), MaskedBackwardWork, BackwardWork>;

__device__ __forceinline__ KeyExtremes key_extremes(const AttnParams& p, const BackwardWork& work) {
  const int group = static_cast<int>(p.group_size());
  // Recomputed for each key tile rather than kept in registers.
  return KeyExtremes(p, ptx::opaque(work.b), work.hk * group, group, work.key_start, work.length_k);
}

// The mask of a key tile in a query head.
__device__ __forceinline__ Mask32 visible(const AttnParams& p, const BackwardWork& work, int) { return work.mask(p); }
__device__ __forceinline__ IntervalMask visible(const AttnParams& p, const MaskedBackwardWork& work, int h) {
  return IntervalMask(work.mask(p), work.pairs.head(h));
}

// In a deterministic call: the values of the counter of query tile m (dq_order.cuh) before and after the key tile adds
// to it. In kernels that can read a Mask an inspector warp finds them, for the last kStepsKept steps of the thread
// block; `step` counts these steps.
constexpr int kStepsKept = 8;  // more than the stages of queries plus the two steps by which dq may lag
template <class Kernel>
__device__ __forceinline__ int added_before(const Kernel& kernel, const BackwardWork& work, int m, int step) {
  constexpr int kQueries = Kernel::kQueries;
  if constexpr (Kernel::kMasks) return kernel.shared.added_before[step % kStepsKept];
  return key_tiles_before(work.mask(kernel.p), work.n, Kernel::kKeys, m * kQueries, kQueries);
}
template <class Kernel>
__device__ __forceinline__ int added_after(const Kernel& kernel, const BackwardWork& work, int m, int step) {
  return Kernel::kMasks ? work.n + 1 : added_before(kernel, work, m, step) + 1;
}

// The loop over the query tiles of a key tile: all tiles of one head, then all tiles of the group's next head.
// kMayDescend: in a deterministic call the tiles of a head come in descending order. Key tiles add to a query tile in
// ascending order, and all causal key tiles of a head see its last query tiles. Thread blocks that start at those tiles
// at the same time follow each other closely. A thread block that started at the diagonal would wait there for all
// earlier key tiles, which start at earlier queries.
template <bool kMayDescend>
struct QueryWalk {
  const AttnGradParams& p;
  int h, m;         // current query head, current tile in its sequence
  int start, last;  // first and last tile of a head
  int left;         // steps left, including this one

  __device__ __forceinline__ QueryWalk(const AttnGradParams& p, const BackwardWork& work, int heads)
      : p(p), h(uniform(work.hk) * heads) {
    const int first = uniform(work.first), tiles = uniform(work.tiles);
    start = descends() ? first + tiles - 1 : first;
    last = descends() ? first : first + tiles - 1;
    m = start;
    left = tiles * heads;
  }
  __device__ __forceinline__ bool ends_head() const { return m == last; }
  __device__ __forceinline__ void advance() {
    --left;
    if (ends_head()) {
      m = start;
      ++h;
    } else {
      m += descends() ? -1 : 1;
    }
  }

 private:
  // Recomputed rather than kept in a register.
  __device__ __forceinline__ bool descends() const { return kMayDescend && ptx::opaque(p.deterministic) != 0; }
};

// Barriers count threads, not warps (`release` in ring.cuh), where threads themselves read or write shared memory. An
// arrival of the warp's first lane alone would rely on warp synchronisation, which race checkers do not see. q_full
// counts the copy of queries, the copy of a bias if there is one, and the 32 lanes that store lse and delta of the
// rows.
template <bool kBias>
constexpr int kQueryArrivals = kBias + 1 + 32;

// The queries that see any key of tile n of the sequence. All lanes of a warp call it together.
template <class Kernel>
__device__ __forceinline__ Limits queries_of_tile(const AttnParams& p, const BackwardWork& work, int n) {
  const int key = n * Kernel::kKeys, end = min(key + Kernel::kKeys, work.length_k);
  const Limits rows = work.mask(p).rows_of(key, end);
  if constexpr (Kernel::kMasks) return clipped(rows, key_extremes(p, work).template of_tile<32>(key, end));
  return rows;
}

// --- the producer warp --------------------------------------------------------------------------------------------

template <class Kernel>
struct BackwardLoader {
  using Work = typename Kernel::Work;
  using Walk = typename Kernel::Walk;
  static constexpr int kQueries = Kernel::kQueries, kKeys = Kernel::kKeys;

  typename Kernel::Shared& shared;
  const AttnGradParams& p;
  const BackwardWorkspace& workspace;
  const typename Kernel::Maps& maps;
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kStages> queries;
  RingPosition<Kernel::kDoutStages> douts;  // only with kDoutApart
  RingPosition<Kernel::kWorkStages> works;
  uint32_t next_parity = 0;  // of SharedTile
  int query_start = 0;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ void load_tiles(const TileGrid& grid) {
    const int heads = static_cast<int>(p.heads_k), all_heads = heads * static_cast<int>(p.batch);
    // A thread block takes its next tile after it has loaded the one before. In a deterministic call thread blocks then
    // keep, through all tiles, the distances between each other at which they settled in the first ones.
    for (int tile = blockIdx.x / Kernel::kBlocks; tile < grid.tiles; tile = next_tile(grid)) {
      // The first key tiles of causal heads have the most query tiles: they come first.
      const auto [head, block] = grid.index(tile, all_heads);
      // With a bias the batch entries of a head are adjacent, because they may read the same bias.
      const int batch = static_cast<int>(p.batch);
      BackwardWork work =
          Kernel::kBias ? start_head(head % batch, head / batch) : start_head(head / heads, head % heads);
      // A sequence may be longer than the host was told. Then the last tile number stands for all later tiles too, in
      // ascending order, which is the order in which a deterministic call adds to dq.
      for (start_tile(work, block); work.exists(); start_tile(work, work.n + 1)) {
        find_queries(work);
        const Work& published = publish(work);
        if (uniform(published.tiles) > 0) load_tile(published);
        if (block != grid.blocks - 1) break;
        work = published;
      }
    }
    publish_end();
  }

  __device__ __forceinline__ int next_tile(const TileGrid& grid) {
    auto take = [&] { return grid.take(static_cast<int>(gridDim.x) / Kernel::kBlocks); };
    if constexpr (Kernel::kPaired) {
      return uniform(lane() == 0 ? shared.next_tile[0].next(take, &next_parity) : 0);
    } else {
      return uniform(lane() == 0 ? take() : grid.tiles);
    }
  }
  static __device__ __forceinline__ int column() { return half_of_columns<Kernel::kPaired>() * Kernel::kColumns; }

  __device__ BackwardWork start_head(int b, int hk) {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    query_start = static_cast<int>(queries.start);
    BackwardWork work{b, hk};
    work.key_start = static_cast<int>(keys.start);
    work.length_q = static_cast<int>(queries.length);
    work.length_k = static_cast<int>(keys.length);
    work.dq_tile = static_cast<int>(workspace.first_tile(p, b, queries));
    return work;
  }
  static __device__ void start_tile(BackwardWork& work, int n) {
    work.n = n;
    work.key0 = n * kKeys;
  }
  __device__ void find_queries(BackwardWork& work) const {
    const Limits rows = queries_of_tile<Kernel>(p, work, work.n);
    work.first = rows.begin / kQueries;
    work.tiles = rows.end > rows.begin && p.heads_q > 0 ? (rows.end - 1) / kQueries + 1 - work.first : 0;
  }
  // Returns the description in shared memory, which stays unchanged while it is in use: registers are scarce here too.
  __device__ const Work& publish(const BackwardWork& work) {
    ptx::barrier_wait(&shared.work_empty[works.stage], works.parity ^ 1);
    Work& to = shared.work[works.stage];
    if constexpr (Kernel::kMasks) describe_mask(work, to);
    if (lane() == 0) {
      static_cast<BackwardWork&>(to) = work;
      ptx::barrier_arrive(&shared.work_full[works.stage]);
    }
    works.advance();
    __syncwarp();
    return to;
  }
  __device__ void publish_end() const {
    ptx::barrier_wait(&shared.work_empty[works.stage], works.parity ^ 1);
    if (lane() != 0) return;
    static_cast<BackwardWork&>(shared.work[works.stage]) = BackwardWork{};
    ptx::barrier_arrive(&shared.work_full[works.stage]);
  }

  // Writes the Mask's part of a description.
  __device__ void describe_mask(const BackwardWork& work, Work& to) const {
    if (lane() == 0) to.pairs = IntervalPairs(p, work.b, work.hk, work.key_start);
    const KeyExtremes extremes = key_extremes(p, work);
    Limits whole{0, INT32_MAX};
    // No branch around warp-collective code: otherwise the compiler gives up uniform registers in this warp. Keys after
    // the last of the sequence are masked for every row, whatever this computes.
#pragma unroll
    for (int i = 0; i < kKeys / 64; ++i) {
      const int key = work.key0 + i * 64, first = min(key, work.length_k - 1);
      const IntervalExtremes keys = extremes.of_granules<32>(first, min(key + 64, work.length_k));
      const Limits unmasked =
          clipped_to_all(Kernel::Scores::unmasked_queries(p, work.mask(p), key, 64), keys, work.length_q);
      whole = clipped_to_all(whole, keys, work.length_q);
      if (lane() == 0) to.unmasked[i] = unmasked;
    }
    if (lane() == 0) to.whole = whole;
  }

  __device__ void load_tile(const BackwardWork& work) {
    const int batch = p.is_varlen() ? 0 : work.b, group = static_cast<int>(p.group_size());
    const int key = work.key_start + work.key0;
    ptx::barrier_wait(&shared.keys_empty[keys.stage], keys.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.k[keys.stage], shared.k_full[keys.stage], maps.k, key, work.hk, batch, column());
      load_panels(shared.v[keys.stage], shared.v_full[keys.stage], maps.v, key, work.hk, batch, column());
    }
    keys.advance();
    for (Walk now(p, work, group); now.left > 0; now.advance()) load_queries(work, now, batch);
  }

  // Rows after the last of the sequence get an lse of +inf, which makes their weights 0 for any score.
  __device__ void load_queries(const BackwardWork& work, const Walk& now, int batch) {
    const int stage = queries.stage, row = query_start + now.m * kQueries;
    ptx::barrier_wait(&shared.queries_empty[stage], queries.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.q[stage], shared.q_full[stage], maps.q, row, now.h, batch, column());
      if (!Kernel::kDoutApart) load_panels(shared.dout[stage], shared.dout_full[stage], maps.dout, row, now.h, batch);
      if constexpr (Kernel::kBias) {
        load_panels(shared.bias[stage], shared.q_full[stage], maps.bias, row, now.h, batch, work.key0);
      }
    }
    const int rows = work.length_q - now.m * kQueries;
    const int64_t index = now.h * workspace.rows + (p.is_varlen() ? 0 : work.b * p.seqlen_q) + row;
    float lse[kQueries / 32], delta[kQueries / 32];
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      const bool exists = i * 32 + lane() < rows;
      lse[i] = exists ? workspace.lse[index + i * 32 + lane()] : infinity();
      delta[i] = exists ? workspace.delta[index + i * 32 + lane()] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      shared.lse[stage][i * 32 + lane()] = lse[i];
      shared.delta[stage][i * 32 + lane()] = delta[i];
    }
    if constexpr (Kernel::kScored) {
      // In this form it takes no registers from the consumer warps.
      const float* const from = static_cast<const float*>(p.centres.data) + batch * p.centres.batch_stride +
                                now.h * p.centres.head_stride + int64_t{row} * kCentres;
      const int known = p.centres.data ? rows : 0;
#pragma unroll 1
      for (int i = lane(); i < kQueries; i += 32) {
#pragma unroll
        for (int which = 0; which < kCentres; ++which) {
          shared.centres[stage][which][i] = i < known ? from[i * kCentres + which] : 0.f;
        }
      }
    }
    ptx::barrier_arrive(&shared.q_full[stage]);  // every lane, for its own writes
    queries.advance();
    if constexpr (Kernel::kDoutApart) {  // dout has stages of its own
      ptx::barrier_wait(&shared.dout_empty[douts.stage], douts.parity ^ 1);
      if (lane() == 0) {
        load_panels(shared.dout[douts.stage], shared.dout_full[douts.stage], maps.dout, row, now.h, batch, column());
      }
      douts.advance();
    }
  }
};

// --- the inspector warps --------------------------------------------------------------------------------------------

// With a Mask, inspector warps replace non-finite values by zeros (isolation.cuh): in queries and output gradients of
// steps that the Mask partly hides, and in keys that have such a step. Rows with such queries get a log-sum-exp of NaN,
// which makes their visible weights NaN. Such keys get values of NaN, which make their visible dS NaN. The inspectors
// are the last kInspectors warps of the producer warpgroup. They arrive for every step, even where there is nothing to
// inspect, and the producer warp waits for them too. No warp is therefore a full round of stages ahead of them, and a
// warp that does not need an inspection may skip the wait for it.

// Whether the Mask hides a part of the step at query tile m. whole: MaskedBackwardWork.
template <class Kernel>
__device__ __forceinline__ bool is_partial(const Limits& whole, int m) {
  return Kernel::Scores::is_masked(whole, m * Kernel::kQueries);
}

// Waits until a stage (keys, values, queries or output gradients) has arrived at `full` and has been inspected.
template <class Kernel, int kStages>
__device__ __forceinline__ void await(ptx::Barrier* full, ptx::Barrier* inspected, const RingPosition<kStages>& at) {
  ptx::barrier_wait(&full[at.stage], at.parity);
  if constexpr (Kernel::kMasks) ptx::barrier_wait(&inspected[at.stage], at.parity);
}

template <class Kernel>
struct BackwardInspector {
  typename Kernel::Shared& shared;
  const AttnGradParams& p;
  const int warp;  // index among the inspectors
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kStages> queries;
  RingPosition<Kernel::kWorkStages> works;
  int step = 0;  // modulo kStepsKept: index into added_before

  __device__ void inspect_tiles() {
    for (;; works.advance()) {
      ptx::barrier_wait(&shared.work_full[works.stage], works.parity);
      const typename Kernel::Work& work = shared.work[works.stage];
      if (!uniform(work.exists())) return;
      if (uniform(work.tiles) > 0) {
        const int first = work.first, last = first + work.tiles - 1;
        inspect_keys(uniform(is_partial<Kernel>(work.whole, first) || is_partial<Kernel>(work.whole, last)));
        if (p.deterministic && warp == 0) {
          const Limits walk{first * Kernel::kQueries, (last + 1) * Kernel::kQueries};
          const EarlierKeyTile before =
              key_tile_before<Kernel::kKeys>(key_extremes(p, work), work.mask(p), work.n, walk);
          if (threadIdx.x % 32 == 0) *shared.before = before;
          __syncwarp();
        }
        for (typename Kernel::Walk now(p, work, static_cast<int>(p.group_size())); now.left > 0; now.advance()) {
          if (p.deterministic && warp == 0) find_key_tile_before(work, now.m);
          ++step;
          inspect_queries(uniform(is_partial<Kernel>(work.whole, now.m)));
        }
      }
      release(shared.work_empty[works.stage]);
    }
  }

 private:
  __device__ void inspect_keys(bool partial) {
    const int stage = keys.stage;
    ptx::barrier_wait(&shared.k_full[stage], keys.parity);
    bool found = false;
    if (partial) {
      ptx::barrier_wait(&shared.v_full[stage], keys.parity);
      found = isolate_panel_rows<Kernel::kInspectors>(shared.k[stage], warp, [&](int row, bool finite) {
        if (finite) return;
        constexpr uint32_t kNaN = ~0u;
#pragma unroll 1
        for (int i = 0; i < Kernel::kPanels * 8; ++i) {
          reinterpret_cast<uint4*>(shared.v[stage][i / 8][row])[i % 8] = make_uint4(kNaN, kNaN, kNaN, kNaN);
        }
      });
    }
    end(found, shared.keys_inspected[stage]);
    keys.advance();
  }
  // In a deterministic call every warp waits for every inspection, including the warps that add to dq.
  __device__ void find_key_tile_before(const BackwardWork& work, int m) const {
    const Limits rows{m * Kernel::kQueries, (m + 1) * Kernel::kQueries};
    const int tile = key_tile_before<Kernel::kKeys>(key_extremes(p, work), work.mask(p), *shared.before, rows);
    if (threadIdx.x % 32 == 0) shared.added_before[step % kStepsKept] = tile + 1;
  }
  __device__ void inspect_queries(bool partial) {
    const int stage = queries.stage;
    auto poison = [&](int row, bool finite) {
      if (!finite) shared.lse[stage][row] = not_a_number();
    };
    ptx::barrier_wait(&shared.q_full[stage], queries.parity);
    bool found = false;
    if (partial) {
      ptx::barrier_wait(&shared.dout_full[stage], queries.parity);
      found = isolate_panel_rows<Kernel::kInspectors>(shared.q[stage], warp, poison);
      found |= isolate_panel_rows<Kernel::kInspectors>(shared.dout[stage], warp, poison);
    }
    end(found, shared.queries_inspected[stage]);
    release(shared.queries_empty[stage]);
    queries.advance();
  }
  __device__ void end(bool found, ptx::Barrier& inspected) {
    if (found) ptx::fence_async_shared();
    __syncwarp();
    release(inspected);
  }
};

template <class Kernel>
__device__ __forceinline__ void init_inspections(typename Kernel::Shared& shared) {
  if constexpr (Kernel::kMasks) {
    for (ptx::Barrier& barrier : shared.keys_inspected) ptx::barrier_init(&barrier, Kernel::kInspectors);
    for (ptx::Barrier& barrier : shared.queries_inspected) ptx::barrier_init(&barrier, Kernel::kInspectors);
  }
}

// The producer warpgroup: the loads and, with a Mask, the inspection.
template <class Kernel>
__device__ __forceinline__ void load_or_inspect(typename Kernel::Shared& shared, const AttnGradParams& p,
                                                const typename Kernel::Workspace& workspace,
                                                const typename Kernel::Maps& maps, const TileGrid& grid) {
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp == 0) {
    BackwardLoader<Kernel>{shared, p, workspace, maps}.load_tiles(grid);
  } else if constexpr (Kernel::kMasks) {
    const int inspector = warp - (4 - Kernel::kInspectors);
    if (inspector >= 0) BackwardInspector<Kernel>{shared, p, inspector}.inspect_tiles();
  }
}

// Writes this warp's 16 rows of dk or dv, times a factor. key: the first row, in the sequence; column: the first
// column.
template <class T, int N>
__device__ __forceinline__ void store_keys(const TensorView& to, const BackwardWork& work, int key,
                                           const float (&sum)[N][4], float factor, int64_t columns, int column = 0) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = key + ptx::opaque(threadIdx.x) % 32 / 4 + 8 * r;  // recomputed rather than kept in a register
    store_row(row_pointer<T>(to, work.b, work.hk, int64_t{work.key_start} + row) + column, sum, r, factor, false,
              row < work.length_k, static_cast<int>(columns) - column);
  }
}

// --- on the host --------------------------------------------------------------------------------------------------

template <class Kernel, class Entry>
void launch_backward_main(Entry kernel, const AttnGradParams& p, const typename Kernel::Workspace& workspace) {
  const int64_t blocks = tile_count(p.seqlen_k, Kernel::kKeys), all = blocks * p.batch * p.heads_k;
  if (all == 0) return;
  typename Kernel::Maps maps;
  static_cast<BackwardMaps&>(maps) = {
      query_map(p, p.q, p.head_dim, Kernel::kQueries), key_map(p, p.k, p.head_dim, Kernel::kKeys),
      key_map(p, p.v, p.head_dim_v, Kernel::kKeys), query_map(p, p.dout, p.head_dim_v, Kernel::kQueries)};
  if constexpr (Kernel::kBias) {
    maps.bias = bias_map(p, p.bias, Kernel::kQueries);
    if (p.dbias.data) maps.dbias = bias_map(p, p.dbias, Kernel::kQueries);
  }
  const int64_t at_once = multiprocessors() / Kernel::kBlocks, teams = std::min(all, at_once);
  const TileGrid grid{backward_order(p, blocks, 2, at_once, Kernel::kSectionHeads), static_cast<int>(all),
                      workspace.key_tiles_taken};
  launch(kernel, "sm90 backward", p, teams * Kernel::kBlocks, Kernel::kThreads,
         static_cast<int>(sizeof(typename Kernel::Shared)), workspace, maps, grid);
}

}  // namespace flashattn_ext::sm90
