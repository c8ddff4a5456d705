// The producer warpgroup of the forward (forward.cuh) with a Mask. Of its four warps, one finds the key tiles that
// rows of a query tile see, one loads them, and two inspect the values of partial tiles, in which the Mask hides some
// keys from some row. Each passes its results to the next through shared memory. At the end is the policy of visibility
// that runs it (IntervalVisibility).
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/score/intervals.cuh"
#include "cuda/score/isolation.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// A key tile that rows of a query tile of kGroups warpgroups see.
template <int kGroups>
struct alignas(8) KeyTile {
  static constexpr int kWarps = 4 * kGroups;
  static constexpr int kSeen = 16, kRun = 20, kSlot = 25, kSlotParity = 27, kLast = 31;
  static constexpr uint32_t kWhole = (1u << kWarps) - 1, kSeenByAll = ((1u << kGroups) - 1) << kSeen;
  static constexpr uint32_t kHidesNothing = kWhole | kSeenByAll;
  static_assert(kWarps <= kSeen && kSeen + kGroups <= kRun);

  int n;  // its number
  // Below kSeen: for each warp, whether all of its rows see all keys as far as the Mask is concerned. From kSeen on:
  // for each warpgroup, whether rows of it see keys. From kRun on, a number: how many of the following tiles are
  // contiguous, in descending order, and hide nothing, so that the consumers need not read their KeyTile. From kSlot
  // on, for a partial tile: the slot of its PartialTile, and the parity of the slot. kLast: whether this is the last
  // tile.
  uint32_t bits;

  __device__ __forceinline__ bool has(int bit) const { return bits >> bit & 1; }
  __device__ __forceinline__ bool is_whole() const { return (bits & kWhole) == kWhole; }
  __device__ __forceinline__ bool hides_nothing() const { return (bits & kHidesNothing) == kHidesNothing; }
  __device__ __forceinline__ int run() const { return static_cast<int>(bits >> kRun & 31); }
  __device__ __forceinline__ int slot() const { return static_cast<int>(bits >> kSlot & 3); }
  __device__ __forceinline__ uint32_t slot_parity() const { return bits >> kSlotParity & 1; }
};

// Key tiles of one query tile, from the finding warp to the loading warp.
template <class Work, class KeyTile>
struct KeyBatch {
  static constexpr int kTiles = 32;
  Work work;
  int key_start;    // start of the sequence, in the rows of its batch entry
  int count;        // number of tiles; 0 ends the kernel
  bool begins;      // whether these are the first ones of the query tile
  int work_parity;  // parity of the query tile, an index into Shared::poisoned
  KeyTile tiles[kTiles];
};
// In a ring of three: one is being loaded, one is complete except that it is not known whether another one follows, and
// one is being found.
constexpr int kKeyBatches = 3;

// A thread block takes its next query tile when this many key tiles of the current one are left to load: early enough
// to hide the search for the tile's keys, late enough that a busy block takes no tile that an idle one could start.
constexpr int kKeyTilesAhead = 8;

// The description of a partial tile, in a ring with as many slots as there are stages of values: for the inspecting
// warps; the consumer warps read the intervals.
template <int kKeys>
struct PartialTile {
  alignas(16) int2 pairs[kKeys];       // intervals of the keys
  int stage;                           // stage of the values; negative: there are no more tiles
  int key0, row0, length_q, length_k;  // its first key; of the query tile: Work
  int work_parity;                     // as in KeyBatch
};

// The number of warps that inspect values. Each of them arrives at v_full.
constexpr int kValueInspectors = 2;

// --- the finding warp ----------------------------------------------------------------------------------------------

// All lanes of the warp take part.
template <class Kernel>
struct KeyFinder {
  using Work = ForwardWork;
  using KeyTile = typename Kernel::KeyTile;
  static constexpr int kKeys = Kernel::kKeys, kQueries = Kernel::kQueries;

  SharedOf<Kernel>& shared;
  const AttnParams& p;
  RingPosition<kKeyBatches> at;
  uint32_t work_parity = 0, end_parity = 0;

  __device__ void find_all(const TileGrid& grid) {
    Kernel::each_work(
        p, grid, [&](int) { return uniform(lane() == 0 ? grid.take() : 0); },
        [&](Work& work, int key_start) { find_tiles(work, key_start); });
    publish(Work{});
    send_end();
  }

 private:
  // A batch is published once it is known whether its last tile is the last of the query tile. The query tile itself is
  // published before its first batch: so no values are loaded for it until the rows of the last but one query tile have
  // been stored.
  __device__ __forceinline__ void find_tiles(Work& work, int key_start) {
    int next = work.last;       // the tile to look at
    int before = 0, found = 0;  // the batch that is not published yet, and how many tiles it has
    for (bool begins = true;; begins = false) {
      const int more = find_batch(work, key_start, begins, &next);
      if (begins) {
        if (more == 0) work.last = work.first - 1;
        publish(work);
      } else {
        if (more == 0 && lane() == 0) shared.batches[before].tiles[found - 1].bits |= 1u << KeyTile::kLast;
        ptx::barrier_arrive(&shared.batch_full[before]);
      }
      if (more == 0) {
        if (!begins) await_end();
        return;
      }
      before = at.stage;
      found = more;
      at.advance();
    }
  }
  // Waits until all tiles of the query tile but the last kKeyTilesAhead have been loaded.
  __device__ __forceinline__ void await_end() {
    ptx::barrier_wait(&shared.tiles_end[0], end_parity);
    end_parity ^= 1;
  }
  __device__ void publish(const Work& work) {
    ptx::barrier_wait(&shared.work_empty, work_parity ^ 1);
    if (lane() == 0) {
      shared.work = work;
      ptx::barrier_arrive(&shared.work_full);
    }
    work_parity ^= 1;
  }
  __device__ void send_end() {
    ptx::barrier_wait(&shared.batch_empty[at.stage], at.parity ^ 1);
    if (lane() == 0) shared.batches[at.stage].count = 0;
    ptx::barrier_arrive(&shared.batch_full[at.stage]);
  }

  // Fills the batch `at`, from the tile `next` on, and returns how many tiles it has.
  __device__ __forceinline__ int find_batch(const Work& work, int key_start, bool begins, int* next) {
    const KeyTileFinder<kKeys> finder{KeyExtremes(p, work.b, work.h, 1, key_start, work.length_k),
                                      rows_of(work, 0, kQueries), work.first};
    ptx::barrier_wait(&shared.batch_empty[at.stage], at.parity ^ 1);
    auto& batch = shared.batches[at.stage];
    const int count = finder.find(next, [&](int i, int n, const IntervalExtremes& extremes) {
      batch.tiles[i] = {n, seen_by(work, n, extremes)};
    });
    if (lane() == 0) {
      batch.work = work;
      batch.key_start = key_start;
      batch.count = count;
      batch.begins = begins;
      batch.work_parity = static_cast<int>(begins ? work_parity : work_parity ^ 1);
    }
    __syncwarp();
    mark_runs(batch.tiles, count);
    return count;
  }
  static __device__ __forceinline__ Limits rows_of(const Work& work, int row, int count) {
    return {work.row0 + row, min(work.row0 + row + count, work.length_q)};
  }
  // The bits of a tile that say which warps and warpgroups see it.
  __device__ __forceinline__ uint32_t seen_by(const Work& work, int n, const IntervalExtremes& extremes) const {
    uint32_t bits = 0;
#pragma unroll
    for (int warp = 0; warp < KeyTile::kWarps; ++warp) {
      bits |= static_cast<uint32_t>(sees_all(extremes, rows_of(work, warp * 16, 16))) << warp;
    }
#pragma unroll 1
    for (int group = 0; group < Kernel::kGroups; ++group) {
      const Limits rows = rows_of(work, group * 64, 64);
      if (rows.begin >= rows.end || !sees_some(extremes, rows)) continue;
      const Limits keys = work.mask(p).keys_of(rows.begin, rows.end);
      const bool seen = keys.begin < (n + 1) * kKeys && keys.end > n * kKeys;
      bits |= static_cast<uint32_t>(seen) << (KeyTile::kSeen + group);
    }
    return bits;
  }
  // Each lane counts for one tile how many come after it in a run. The last one is in no run: it may be kLast.
  __device__ __forceinline__ void mark_runs(KeyTile (&tiles)[32], int count) const {
    const int i = lane();
    bool in_run = false;
    if (i > 0 && i < count - 1) in_run = tiles[i].hides_nothing() && tiles[i].n == tiles[i - 1].n - 1;
    const uint32_t after = __ballot_sync(~0u, in_run) >> i >> 1;
    if (i < count) tiles[i].bits |= static_cast<uint32_t>(__ffs(static_cast<int>(~after)) - 1) << KeyTile::kRun;
    __syncwarp();
  }
};

// --- the loading warp ----------------------------------------------------------------------------------------------

// One lane starts the copies of whole tiles; all lanes copy intervals.
template <class Kernel, class Maps>
struct FoundKeyLoader {
  using KeyTile = typename Kernel::KeyTile;
  using Batch = typename Kernel::KeyBatch;
  static constexpr int kKeys = Kernel::kKeys;

  SharedOf<Kernel>& shared;
  const AttnParams& p;
  const Maps& maps;
  RingPosition<Kernel::kStages> k, v, partial;
  RingPosition<kKeyBatches> at;
  QueryPosition<Kernel::kQueryStages> q;
  KeyTile without_values{};  // values of a tile are loaded after the keys of the next one

  __device__ void load_all() {
    for (;; at.advance()) {
      const Batch& batch = shared.batches[at.stage];
      ptx::barrier_wait(&shared.batch_full[at.stage], at.parity);
      const int count = uniform(batch.count);
      if (count == 0) break;
      load_batch(batch, count);
      __syncwarp();
      release(shared.batch_empty[at.stage]);
    }
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    if (lane() != 0) return;
    shared.partial_tiles[partial.stage].stage = -1;
    ptx::barrier_arrive(&shared.v_arrived[partial.stage]);
  }

  __device__ __forceinline__ void load_batch(const Batch& batch, int count) {
    const int b = p.is_varlen() ? 0 : batch.work.b;
    const int hk = batch.work.h / (static_cast<int>(p.heads_q) / static_cast<int>(p.heads_k));
    const bool begins = batch.begins;
    const int ending = batch.tiles[count - 1].has(KeyTile::kLast) ? max(count - kKeyTilesAhead, 0) : count;
    for (int i = 0; i < count; ++i) {
      if (i == ending && lane() == 0) ptx::barrier_arrive(&shared.tiles_end[0]);
      KeyTile tile = batch.tiles[i];
      if (!tile.is_whole()) {
        // Consumers need not have waited for the intervals of the tile that had this slot before: they may still be in
        // flight.
        ptx::barrier_wait(&shared.pairs_full[partial.stage], partial.parity ^ 1);
        tile.bits |= partial.stage << KeyTile::kSlot | partial.parity << KeyTile::kSlotParity;
        partial.advance();
      }
      load_keys(batch, tile, hk, b);
      if (i > 0 || !begins) {
        load_values(batch, without_values, hk, b);
      } else {
        load_queries(batch, b);
      }
      without_values = tile;
    }
    if (without_values.has(KeyTile::kLast)) load_values(batch, without_values, hk, b);
  }
  __device__ __forceinline__ void load_queries(const Batch& batch, int b) {
    ptx::barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
    const auto& work = batch.work;
    if (lane() == 0)
      load_panels(shared.q[q.stage], shared.q_full[q.stage], maps.q, work.query_start + work.row0, work.h, b);
    q.advance();
  }
  __device__ __forceinline__ void load_keys(const Batch& batch, const KeyTile& tile, int hk, int b) {
    ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
    if (lane() == 0) {
      shared.key_tiles[k.stage] = tile;
      load_panels(shared.k[k.stage], shared.k_full[k.stage], maps.k, batch.key_start + tile.n * kKeys, hk, b);
    }
    k.advance();
  }
  __device__ __forceinline__ void load_values(const Batch& batch, const KeyTile& tile, int hk, int b) {
    const int slot = tile.slot();
    const auto at = Kernel::Operands::values_at(p, b, batch.work.b, hk, batch.key_start, tile.n);
    const bool whole = tile.is_whole();
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    if (!whole) load_intervals(batch, tile);
    if (lane() == 0) {
      // The values of a whole tile are not inspected: this warp arrives in place of the inspecting warps.
      load_panels(shared.v[v.stage], whole ? shared.v_full[v.stage] : shared.v_arrived[slot], maps.v, at.row, at.head,
                  at.batch);
      if (whole) ptx::barrier_arrive(&shared.v_full[v.stage], kValueInspectors - 1);
    }
    v.advance();
  }
  __device__ __forceinline__ void load_intervals(const Batch& batch, const KeyTile& tile) {
    auto& to = shared.partial_tiles[tile.slot()];
    const auto& work = batch.work;
    const int key0 = tile.n * kKeys;
    const int2* const pairs = reinterpret_cast<const int2*>(head_intervals(p, work.b, work.h, batch.key_start));
#pragma unroll 1
    for (int i = lane(); i < kKeys; i += 32) {
      const int key = key0 + i;
      ptx::cp_async_8(&to.pairs[i], pairs + min(key, work.length_k - 1), key < work.length_k);
    }
    ptx::barrier_arrive_copied(&shared.pairs_full[tile.slot()]);
    if (lane() == 0) {
      to.stage = v.stage;
      to.key0 = key0;
      to.row0 = work.row0;
      to.length_q = work.length_q;
      to.length_k = work.length_k;
      to.work_parity = batch.work_parity;
    }
  }
};

// --- the inspecting warps ------------------------------------------------------------------------------------------

// Rows of values of a partial tile that are not finite become zeros (isolation.cuh), and rows of `out` that see them
// are stored as NaN. warp: index among the inspecting warps. each_row(tile, at, i, visit): calls visit(row) with the
// rows of the query tile that see key i of the tile, which is at this place of the ring of partial tiles.
template <class Operands, int kInspectors, int kStages, class Shared, class EachRow>
__device__ __forceinline__ void inspect_values(Shared& shared, int warp, const EachRow& each_row) {
  for (RingPosition<kStages> at;; at.advance()) {
    const auto& tile = shared.partial_tiles[at.stage];
    ptx::barrier_wait(&shared.v_arrived[at.stage], at.parity);
    // Lane 0 alone reads the stage, because it also arrives for the warp when the slot may be written again.
    const int stage = uniform(lane() == 0 ? tile.stage : 0);
    if (stage < 0) return;
    const bool found = Operands::template isolate<kInspectors>(shared.v[stage], warp, [&](int i, bool finite) {
      if (finite) return;
      each_row(tile, at, i, [&](int row) { shared.poisoned[tile.work_parity][row] = true; });
    });
    if (found) ptx::fence_async_shared();
    __syncwarp();
    release(shared.v_full[stage]);
  }
}

// inspect_values with a Mask: rows see a key by its interval.
template <class Operands, int kStages, int kQueries, class Shared>
__device__ __forceinline__ void inspect_masked_values(Shared& shared, const AttnParams& p, int warp) {
  inspect_values<Operands, kValueInspectors, kStages>(
      shared, warp, [&](const auto& tile, const auto& at, int i, const auto& visit) {
        ptx::barrier_wait(&shared.pairs_full[at.stage], at.parity);
        const int2 pair = tile.pairs[i];
        const Limits rows = Mask32(p, tile.length_q, tile.length_k).rows_of(tile.key0 + i, tile.key0 + i + 1);
        const int end = min(min(rows.end, pair.y), tile.row0 + kQueries);
#pragma unroll 1
        for (int row = max(max(rows.begin, pair.x), tile.row0); row < end; ++row) visit(row - tile.row0);
      });
}

// --- the policy of visibility --------------------------------------------------------------------------------------

// What policies share whose producer warps inspect values (inspect_values).
struct InspectedVisibility {
  static constexpr bool kTakesLate = true;

  // Clears Shared::poisoned. All threads call it.
  template <class Shared>
  static __device__ __forceinline__ void clear(Shared& shared, int threads) {
    constexpr int kRows = 2 * sizeof(shared.poisoned[0]);
    for (int row = threadIdx.x; row < kRows; row += threads) shared.poisoned[0][row] = false;
  }
  // Whether the results of this lane's rows are NaN. Resets these flags for the query tile after the next.
  template <class Shared>
  static __device__ __forceinline__ void take_poisoned(Shared& shared, int parity, int warp_row, bool (&poisoned)[2]) {
    bool* const rows = &shared.poisoned[parity][warp_row + quad()];
#pragma unroll
    for (int r = 0; r < 2; ++r) poisoned[r] = rows[8 * r];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[8 * r] = false;
    __syncwarp();
  }
  template <class Shared>
  static __device__ __forceinline__ void init_stage(Shared& shared, int i) {
    ptx::barrier_init(&shared.v_arrived[i], 1);
  }
};

// A Mask: intervals of rows for each key. The producer warps find and describe the tiles.
template <int kGroups>
struct IntervalVisibility : InspectedVisibility {
  using KeyTile = sm90::KeyTile<kGroups>;
  struct Walk {
    int n;
    KeyTile tile;  // n and the rows that see it; the keys of the tile have arrived
    bool done;     // whether the last tile has been left
    int run;       // how many of the following tiles are known already
  };
  static constexpr bool kResumes = true, kUniformShared = true;
  static constexpr int kValueArrivals = kValueInspectors;

  template <class Shared>
  static __device__ __forceinline__ void init_stage(Shared& shared, int i) {
    ptx::barrier_init(&shared.pairs_full[i], 32);
    InspectedVisibility::init_stage(shared, i);
  }
  template <class Shared>
  static __device__ __forceinline__ void init(Shared& shared) {
    for (int i = 0; i < kKeyBatches; ++i) {
      ptx::barrier_init(&shared.batch_full[i], 32);  // every lane of the finding warp has written to the batch
      ptx::barrier_init(&shared.batch_empty[i], 1);
    }
    ptx::barrier_init(&shared.tiles_end[0], 1);
  }
  template <class Kernel, class Shared, class Maps>
  static __device__ __forceinline__ void load(Shared& shared, const AttnParams& p, const Maps& maps,
                                              const TileGrid& grid) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp == 0) {
      FoundKeyLoader<Kernel, Maps>{shared, p, maps}.load_all();
    } else if (warp == 1) {
      KeyFinder<Kernel>{shared, p}.find_all(grid);
    } else {
      inspect_masked_values<typename Kernel::Operands, Kernel::kStages, Kernel::kQueries>(shared, p, warp - 2);
    }
  }

  template <int kKeys, class Shared, class Ring, class Queries, class Work, class Skip, class Compute, class End>
  static __device__ __forceinline__ void compute_tile(Shared& shared, const AttnParams&, const Ring& k, int group,
                                                      const Queries& q, const Work&, const Skip& skip,
                                                      const Compute& compute, const End& end) {
    Walk walk;
    walk.run = 0;
    ptx::barrier_wait(&shared.q_full[q.stage], q.parity);
    for (receive_keys(shared, k, walk); !walk.done;) {
      if (walk.tile.has(KeyTile::kSeen + group)) {
        compute(walk);
      } else {
        skip(walk.n);
        if (walk.tile.has(KeyTile::kLast)) end();
        has_next(shared, k, group, walk);
      }
    }
  }
  template <class Shared, class Ring>
  static __device__ __forceinline__ void await_keys(Shared&, const Ring&) {}
  template <class Shared, class Ring>
  static __device__ __forceinline__ void begin(Shared&, const AttnParams&, const Ring&, int, const Walk&) {}
  static __device__ __forceinline__ bool is_last(const Walk& walk) { return walk.tile.has(KeyTile::kLast); }
  template <class Shared, class Ring>
  static __device__ __forceinline__ bool has_next(Shared& shared, const Ring& k, int group, Walk& walk) {
    if (walk.run > 0) {  // all rows see all of the next tile, which is not the last one
      ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
      --walk.run;
      --walk.n;
      walk.tile.bits = KeyTile::kHidesNothing;
      return true;
    }
    walk.done = walk.tile.has(KeyTile::kLast);
    if (walk.done) return false;
    receive_keys(shared, k, walk);
    return walk.tile.has(KeyTile::kSeen + group);
  }
  static __device__ __forceinline__ void advance(Walk&) {}
  template <class Shared, class Scores>
  static __device__ __forceinline__ void hide(Shared& shared, const AttnParams&, int warp_row, const Walk& walk,
                                              Scores& x, int row) {
    if (walk.tile.has(warp_row / 16)) return;
    const int slot = walk.tile.slot();
    ptx::barrier_wait(&shared.pairs_full[slot], walk.tile.slot_parity());
    hide_keys_by_interval(x, row, [&](int tile) {
      return *reinterpret_cast<const int4*>(&shared.partial_tiles[slot].pairs[tile * 8 + 2 * lane_in_quad()]);
    });
  }

 private:
  // Waits for the next keys and reads their KeyTile.
  template <class Shared, class Ring>
  static __device__ __forceinline__ void receive_keys(Shared& shared, const Ring& k, Walk& walk) {
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
    walk.done = false;
    // One lane reads, and the shuffles move the values to uniform registers. If all lanes read them, ptxas drops the
    // shuffles, and the values that depend on the walk (stages and operands of products) are not in uniform registers.
    KeyTile tile{};
    if (threadIdx.x % 32 == 0) tile = shared.key_tiles[k.stage];
    walk.tile = {uniform(tile.n), uniform(tile.bits)};
    walk.n = walk.tile.n;
    walk.run = walk.tile.run();
  }
};

}  // namespace flashattn_ext::sm90
