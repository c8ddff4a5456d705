// Forward on Hopper: a thread block computes tiles of queries of one head, 64 rows in each of two or three warpgroups,
// while one more warp loads queries, keys and values by TMA (Shah et al. 2024, "FlashAttention-3"). Key tiles come in
// descending order. The step of key tile n issues the product for its scores, then that for the values of n + 1: the
// softmax of n runs under the second one. Warpgroups take turns at issuing products, so that the softmax of one also
// runs under the products of another. docs/sm90_forward.md says what was measured.
#pragma once

#include "../common/device.h"
#include "../common/general_scores.cuh"
#include "../common/intervals.cuh"
#include "../common/isolation.cuh"
#include "../common/launch.cuh"
#include "../common/ring.cuh"
#include "../common/scores.cuh"
#include "../common/store_row.cuh"
#include "../common/tensor_map.h"
#include "../common/tile_order.cuh"
#include "pair.cuh"
#include "products.cuh"
#include "tiles.h"

namespace flashattn_ext::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v;
};

template <class T, int kHeadDim, Kind kKind>
struct Forward {
  static constexpr bool kGeneral = kKind == Kind::kGeneral, kScored = can_score(kKind);
  using Score = std::conditional_t<can_score(kKind), GeneralScore, PlainScore<float, true>>;
  static constexpr bool kDropout = can_drop(kKind), kMasks = can_mask(kKind);
  static constexpr ForwardTile kTile = forward_tile<kHeadDim, kKind>();
  static constexpr RegisterBudget kRegisters = register_budget(kTile.groups);
  static constexpr int kGroups = kTile.groups, kQueries = kTile.queries(), kKeys = kTile.keys;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads, kWarps = kGroups * 4;
  static constexpr bool kPaired = is_paired(kHeadDim);                            // pair.cuh
  static constexpr int kBlocks = kPaired ? 2 : 1, kColumns = kHeadDim / kBlocks;  // of a thread block
  static constexpr int kPanels = panels(kColumns);
  static constexpr int kScoreTiles = kKeys / 8, kOutTiles = kColumns / 8, kSteps = kKeys / 16;
  // What is added to the scores of a warp. Without a dense bias nothing is read for each score.
  using Bias = std::conditional_t<kGeneral, TileBias<T, false, 1, kScoreTiles>, DistanceBias<false, 1, kScoreTiles>>;

  // One tile of queries, as the loading warp hands it to the warpgroups. Numbers count from the start of a sequence.
  struct alignas(16) Work {
    int b, h, row0;                       // first query of the tile; work without one ends the kernel
    int first, last;                      // key tiles that queries of the tile see, with a Mask not all between them
    int query_start, length_q, length_k;  // of the sequence; query_start in the rows of its batch entry

    __device__ bool exists() const { return row0 < length_q; }
    __device__ bool sees_keys() const { return first <= last; }
    __device__ Mask32 mask(const AttnParams& p) const { return Mask32(p, length_q, length_k); }
  };

  // With a Mask the loading warp finds the key tiles to visit, and says with the keys which tile they are and who sees
  // it; the intervals of its keys come with its values when not all rows see all keys.
  struct FoundTile {
    int n;
    IntervalExtremes extremes;
  };
  struct alignas(8) KeyTile {
    static constexpr int kSeen = 16, kRun = 20, kLast = 31;
    static constexpr uint32_t kRunBits = 31u << kRun, kPlain = (1u << kRun) - 1;
    int n;
    // Below kSeen: for each warp, whether all of its rows see all keys as far as the Mask is concerned. From kSeen on:
    // for each warpgroup, whether rows of it see keys. kLast: whether no tile comes after this one. From kRun on, a
    // number: how many tiles come next that are neighbours, each before the other, for which all of the former bits
    // are set and kLast is not: whoever computes need not look at these.
    uint32_t bits;
    __device__ __forceinline__ bool has(int bit) const { return bits >> bit & 1; }
    __device__ __forceinline__ int run() const { return static_cast<int>((bits & kRunBits) >> kRun); }
  };

  // The values of a key tile, for the warps that inspect them: with a Mask, values in a tile of which it hides a part
  // become zeros where they are not finite, and rows that see them become NaNs after the product (isolation.cuh).
  enum class Values { kWhole, kPartial, kEnd };  // kEnd: there are no more
  static constexpr int kInspectors = 3;          // warps, beside the one that loads
  struct Inspection {
    Values values;
    int key0, row0, length_q, length_k;  // the first key of the tile, and the query tile: Work
    bool is_isolated[kKeys];             // whether values were isolated; set where the warp of a key has isolated any
  };

  // Tiles are as in common/panels.cuh. A barrier `full` says that a stage has arrived, `empty` that it may be
  // overwritten.
  struct Shared {
    T q[kPanels][kQueries][kPanelColumns];
    T k[kStages][kPanels][kKeys][kPanelColumns];
    T v[kStages][kPanels][kKeys][kPanelColumns];
    ptx::Barrier q_full, q_empty;
    ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    ptx::Barrier work_full, work_empty, tail_cleared;
    Work work;
    ptx::Barrier pairs_full[kMasks ? kStages : 0];  // with the stages of values
    KeyTile key_tiles[kMasks ? kStages : 0];        // with the stages of keys
    alignas(16) int2 pairs[kMasks ? kStages : 0][kKeys];
    ptx::Barrier v_inspected[kMasks ? kStages : 0];
    alignas(
        8) bool v_isolated[kMasks ? kStages : 0][8];  // for each inspecting warp, whether it has isolated any values
    Inspection inspections[kMasks ? kStages : 0];
    FoundTile found[kMasks ? 32 : 0];  // what the loading warp has found and not yet loaded
    OtherPart<kScoreTiles> parts[kPaired ? kGroups : 0];
  };
  static_assert(sizeof(Shared) <= kSharedLimit);
  static_assert(kStages >= 2);  // the next keys are loaded before these values

  // Named barriers: each warpgroup has one that it waits at for its turn, the first of them with this number.
  static constexpr int kTurnBarrier = 1;

  // --- the warp that loads ----------------------------------------------------------------------------------------

  struct Loader {
    Shared& shared;
    const AttnParams& p;
    const ForwardMaps& maps;
    RingPosition<kStages> k, v;
    uint32_t q_parity = 0, work_parity = 0;
    int key_start = 0;
    // With a Mask: how many tiles are in shared.found, which to look at after them, and which of those found can be in
    // a run (KeyTile), one bit each.
    int found = 0, next = 0;
    uint32_t in_run = 0;

    // One thread loads; with a Mask it needs its whole warp, whose lanes find key tiles and copy intervals.
    static constexpr int kThreads = kMasks ? 32 : 1;
    static __device__ __forceinline__ bool leads() { return !kMasks || threadIdx.x == 0; }

    __device__ void load_tiles(const TileGrid& grid) {
      const int heads = static_cast<int>(p.heads_q), all_heads = heads * static_cast<int>(p.batch);
      for (int tile = blockIdx.x / kBlocks; tile < grid.tiles;) {
        const int following = next_tile(grid, tile);
        const auto [head, block] = grid.index(tile, all_heads);
        // The longest tiles of causal heads come first. A sequence may be longer than the host was told: then a tile
        // number stands for later tiles too.
        int m = grid.blocks - 1 - block;
        for (Work work = start_head(head / heads, head % heads); m * kQueries < work.length_q; m += grid.blocks) {
          find_keys(work, m * kQueries);
          publish(work);
          if (work.sees_keys()) kMasks ? load_found_tiles(work) : load_tile(work);
        }
        tile = following;
      }
      publish(Work{});
      if constexpr (kMasks) end_inspections();
    }

    // Both blocks of a pair have to come to the same tiles: these are not handed out.
    __device__ __forceinline__ int next_tile(const TileGrid& grid, int tile) const {
      if (kPaired) return tile + static_cast<int>(gridDim.x) / kBlocks;
      return kMasks ? uniform(leads() ? grid.take() : 0) : grid.take();
    }
    static __device__ __forceinline__ int column() { return half_of_columns<kPaired>() * kColumns; }

    __device__ Work start_head(int b, int h) {
      const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
      key_start = static_cast<int>(keys.start);
      Work work{b, h};
      work.query_start = static_cast<int>(queries.start);
      work.length_q = static_cast<int>(queries.length);
      work.length_k = static_cast<int>(keys.length);
      return work;
    }
    __device__ void find_keys(Work& work, int row0) {
      work.row0 = row0;
      const Limits visible = work.mask(p).keys_of(row0, min(row0 + kQueries, work.length_q));
      work.first = visible.begin / kKeys;
      work.last = visible.end > visible.begin ? (visible.end - 1) / kKeys : work.first - 1;
      if constexpr (kMasks) {
        next = work.last;
        find_more(work);
        if (found == 0) work.last = work.first - 1;
      }
    }
    __device__ void publish(const Work& work) {
      ptx::barrier_wait(&shared.work_empty, work_parity ^ 1);
      if (leads()) {
        shared.work = work;
        ptx::barrier_arrive(&shared.work_full);
      }
      work_parity ^= 1;
    }

    __device__ void load_tile(const Work& work) {
      const int batch = p.is_varlen() ? 0 : work.b, hk = work.h / static_cast<int>(p.group_size());
      auto load_keys = [&](int n) {
        ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
        load_panels(shared.k[k.stage], shared.k_full[k.stage], maps.k, key_start + n * kKeys, hk, batch, column());
        k.advance();
      };
      load_keys(work.last);
      ptx::barrier_wait(&shared.q_empty, q_parity ^ 1);
      load_panels(shared.q, shared.q_full, maps.q, work.query_start + work.row0, work.h, batch, column());
      q_parity ^= 1;
      for (int n = work.last; n >= work.first; --n) {
        if (n > work.first) load_keys(n - 1);
        ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
        load_panels(shared.v[v.stage], shared.v_full[v.stage], maps.v, key_start + n * kKeys, hk, batch, column());
        v.advance();
      }
    }

    // The same with a Mask, for the tiles in shared.found and what is found after them.
    __device__ void load_found_tiles(const Work& work) {
      const int batch = p.is_varlen() ? 0 : work.b, hk = work.h / static_cast<int>(p.group_size());
      int i = 0;
      KeyTile tile = take(work, &i);
      load_keys(tile, hk, batch);
      ptx::barrier_wait(&shared.q_empty, q_parity ^ 1);
      if (leads()) load_panels(shared.q, shared.q_full, maps.q, work.query_start + work.row0, work.h, batch);
      q_parity ^= 1;
      for (bool last = false; !last;) {
        const KeyTile now = tile;
        last = now.has(KeyTile::kLast);
        if (!last) {
          tile = take(work, &i);
          load_keys(tile, hk, batch);
        }
        load_values(work, now, hk, batch);
      }
    }
    static __device__ Limits rows_of(const Work& work) { return {work.row0, min(work.row0 + kQueries, work.length_q)}; }
    // The i-th tile that was found. Each lane finds out one of the bits.
    __device__ KeyTile take(const Work& work, int* i) {
      const FoundTile tile = shared.found[*i];
      const uint32_t after = in_run >> *i >> 1;
      const uint32_t run = __ffs(static_cast<int>(~after)) - 1;  // the last tile that was found is in no run
      if (++*i == found) {
        find_more(work);
        *i = 0;
      }
      const int lane = threadIdx.x, size = lane < KeyTile::kSeen ? 16 : 64;
      const int row = work.row0 + lane % KeyTile::kSeen * size;
      const Limits rows{row, min(row + size, work.length_q)};
      bool bit;
      if (lane < KeyTile::kSeen) {
        bit = sees_all(tile.extremes, rows);
      } else {
        const Limits keys = work.mask(p).keys_of(rows.begin, rows.end);
        bit = rows.begin < rows.end && sees_some(tile.extremes, rows) && keys.begin < (tile.n + 1) * kKeys &&
              keys.end > tile.n * kKeys;
      }
      if (lane == KeyTile::kLast) bit = found == 0;
      return {tile.n, (__ballot_sync(~0u, bit) & ~KeyTile::kRunBits) | run << KeyTile::kRun};
    }
    // Which of the found tiles all rows see whole, and come right after the one before. Each lane looks at one.
    __device__ uint32_t find_runs(const Work& work) const {
      const int i = threadIdx.x;
      bool plain = false;
      if (i > 0 && i < found - 1 && work.row0 + (kGroups - 1) * 64 < work.length_q) {
        const FoundTile tile = shared.found[i];
        plain = tile.n == shared.found[i - 1].n - 1 && sees_all(tile.extremes, rows_of(work));
#pragma unroll 1
        for (int row = work.row0; row < work.row0 + kQueries; row += 64) {
          const Limits keys = work.mask(p).keys_of(row, min(row + 64, work.length_q));
          plain = plain && keys.begin < (tile.n + 1) * kKeys && keys.end > tile.n * kKeys;
        }
      }
      return __ballot_sync(~0u, plain);
    }
    __device__ void find_more(const Work& work) {
      const KeyTileFinder<kKeys> finder{KeyExtremes(p, work.b, work.h, 1, key_start, work.length_k), rows_of(work),
                                        work.first};
      __syncwarp();
      found =
          finder.find(&next, [&](int i, int n, const IntervalExtremes& extremes) { shared.found[i] = {n, extremes}; });
      __syncwarp();
      in_run = find_runs(work);
    }
    __device__ void load_keys(const KeyTile& tile, int hk, int batch) {
      ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
      if (leads()) {
        shared.key_tiles[k.stage] = tile;
        load_panels(shared.k[k.stage], shared.k_full[k.stage], maps.k, key_start + tile.n * kKeys, hk, batch);
      }
      k.advance();
    }
    __device__ void load_values(const Work& work, const KeyTile& tile, int hk, int batch) {
      constexpr uint32_t kAllWarps = (1u << kWarps) - 1;
      const bool whole = (tile.bits & kAllWarps) == kAllWarps;
      ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
      if (leads()) {
        Inspection& inspection = shared.inspections[v.stage];
        inspection.values = whole ? Values::kWhole : Values::kPartial;
        inspection.key0 = tile.n * kKeys;
        inspection.row0 = work.row0;
        inspection.length_q = work.length_q;
        inspection.length_k = work.length_k;
        load_panels(shared.v[v.stage], shared.v_full[v.stage], maps.v, key_start + tile.n * kKeys, hk, batch);
      }
      if (!whole) {
        const int2* const pairs = IntervalPairs(p, work.b, hk, key_start).head(work.h);
#pragma unroll 1
        for (int i = threadIdx.x; i < kKeys; i += 32) {
          const int key = tile.n * kKeys + i;
          ptx::cp_async_8(&shared.pairs[v.stage][i], pairs + min(key, work.length_k - 1), key < work.length_k);
        }
      }
      ptx::barrier_arrive_copied(&shared.pairs_full[v.stage]);
      v.advance();
    }
    __device__ void end_inspections() {
      ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
      if (!leads()) return;
      shared.inspections[v.stage].values = Values::kEnd;
      ptx::barrier_arrive(&shared.v_full[v.stage]);
    }
  };

  // --- the warps that inspect values ------------------------------------------------------------------------------

  static __device__ void inspect_values(Shared& shared, int warp) {
    for (RingPosition<kStages> v;; v.advance()) {
      Inspection& inspection = shared.inspections[v.stage];
      ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
      const Values values = inspection.values;
      if (values == Values::kEnd) return;
      bool found = false;
      if (values == Values::kPartial) {
        found = isolate_panel_rows<kInspectors>(shared.v[v.stage], warp,
                                                [&](int row, bool finite) { inspection.is_isolated[row] = !finite; });
        if (found) ptx::fence_async_shared();
      }
      if (threadIdx.x % 32 == 0) shared.v_isolated[v.stage][warp] = found;
      __syncwarp();
      release(shared.v_inspected[v.stage]);
    }
  }

  // --- the warpgroups that compute --------------------------------------------------------------------------------

  Shared& shared;
  const AttnParams& p;
  const int group, warp_row;  // first of this warp's 16 rows, within the tile
  const Score& score;
  uint32_t q_parity = 0, work_parity = 0, tail_parity = 0, parts_parity = 0;
  RingPosition<kStages> k, v;
  float scores[kScoreTiles][4], out[kOutTiles][4];
  uint32_t weights[kSteps][4];
  uint32_t signs[kDropout ? kSteps : 4][2];  // which weights dropout keeps: Dropout::packed_signs
  std::conditional_t<kGeneral, typename TileBias<T, false, 1, kScoreTiles>::Ahead, Nothing> bias_ahead;
  OnlineSoftmax softmax;
  float shrink[2];  // what `out` is to be multiplied with before the next values are added

  __device__ Forward(Shared& shared, const AttnParams& params, const Score& score, int group)
      : shared(shared),
        p(params),
        group(group),
        warp_row(uniform(static_cast<int>(threadIdx.x) / 32 - 4) * 16),
        score(score) {}

  static __device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }
  static __device__ __forceinline__ bool inspects(const AttnParams& p) {
    return kMasks && (!kGeneral || p.has_intervals());
  }
  __device__ __forceinline__ bool drops() const { return kDropout && (!kGeneral || p.has_dropout()); }

  __device__ __forceinline__ void compute_tiles() {
    Dropout dropout = drops() ? Dropout(p, 0) : Dropout();
    if constexpr (kDropout) dropout.key = {uniform(dropout.key.low), uniform(dropout.key.high)};
    if (group == 0) give_turn(kGroups - 1);
    for (Work work = receive(); work.exists(); work = receive()) {
      dropout.batch = Dropout::batch_of(p, work.b);
      start_tile(work.h);
      if (work.sees_keys()) compute_tile(work, dropout);
      finish_tile(work);
    }
  }

  __device__ __forceinline__ Work receive() {
    ptx::barrier_wait(&shared.work_full, work_parity);
    work_parity ^= 1;
    Work work{};
    if (threadIdx.x % 32 == 0) work = shared.work;
    release(shared.work_empty);
    for (int* field :
         {&work.b, &work.h, &work.row0, &work.first, &work.last, &work.query_start, &work.length_q, &work.length_k}) {
      *field = uniform(*field);
    }
    return work;
  }

  // Key tiles that rows of this warpgroup see; the other warpgroups of the block may see more.
  __device__ __forceinline__ Limits own_tiles(const Work& work) const {
    const int row = work.row0 + group * 64;
    const Limits none{work.first, work.first};
    if (row >= work.length_q) return none;
    const Limits keys = work.mask(p).keys_of(row, min(row + 64, work.length_q));
    return keys.begin < keys.end ? Limits{keys.begin / kKeys, (keys.end - 1) / kKeys + 1} : none;
  }

  // Where a warpgroup is among the key tiles of a query tile.
  struct KeyWalk {
    int n;     // the tile
    int last;  // the tile to end with, without a Mask
    // With a Mask:
    KeyTile tile;  // n and who sees it
    bool done;     // whether the last tile has been left
    int run;       // how many tiles come next that are known already
  };

  __device__ __forceinline__ void compute_tile(const Work& work, const Dropout& dropout) {
    if constexpr (kMasks) {
      KeyWalk walk;
      walk.run = 0;
      ptx::barrier_wait(&shared.q_full, q_parity);
      for (receive_keys(walk); !walk.done;) {
        if (walk.tile.has(KeyTile::kSeen + group)) {
          compute_steps(work, walk, dropout);
        } else {
          skip_step(work, walk.n);
          if (walk.tile.has(KeyTile::kLast)) end_queries();
          goes_on(walk);
        }
      }
    } else {
      const Limits own = own_tiles(work);
      KeyWalk walk{own.end - 1, own.begin};
      int n = work.last;
      for (; n >= own.end; --n) skip_step(work, n);
      ptx::barrier_wait(&shared.q_full, q_parity);
      n >= own.begin ? compute_steps(work, walk, dropout) : end_queries();
      for (n = min(n, own.begin - 1); n >= work.first; --n) skip_step(work, n);
    }
  }

  // Waits for the next keys, and finds out which they are.
  __device__ __forceinline__ void receive_keys(KeyWalk& walk) {
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
    walk.done = false;
    if (walk.run > 0) {
      --walk.run;
      --walk.n;
      walk.tile.bits = KeyTile::kPlain;
      return;
    }
    const KeyTile tile = shared.key_tiles[k.stage];
    walk.tile = {uniform(tile.n), uniform(tile.bits)};
    walk.n = walk.tile.n;
    walk.run = walk.tile.run();
  }
  // Whether there is another key tile and it is computed in the next step. With a Mask the walk is there already.
  __device__ __forceinline__ bool goes_on(KeyWalk& walk) {
    if constexpr (kMasks) {
      walk.done = walk.tile.has(KeyTile::kLast);
      if (walk.done) return false;
      receive_keys(walk);
      return walk.tile.has(KeyTile::kSeen + group);
    } else {
      return walk.n > walk.last;
    }
  }

  static __device__ __forceinline__ void go_on(KeyWalk& walk) {
    if (!kMasks) --walk.n;
  }

  __device__ __forceinline__ void compute_steps(const Work& work, KeyWalk& walk, const Dropout& dropout) {
    const int& n = walk.n;
    const Mask32 mask = work.mask(p);
    const int row = work.row0 + warp_row;
    // Keys that every row of the warp sees: other tiles have a mask.
    const Limits unmasked{mask.keys_of(row + 15, row + 16).begin, mask.keys_of(row, row + 1).end};
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
    take_turn();
    score_product<kColumns, uint64_t>(scores, shared.q, group * 64, shared.k[k.stage]);
    give_turn(group);
    if (!kGeneral) draw_signs(work, n, dropout);
    const auto biases = begin_biases(work, n);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    if constexpr (kPaired) shared.parts[group].exchange(scores, &parts_parity);
    end_keys(kMasks ? walk.tile.has(KeyTile::kLast) : n == walk.last);
    weigh(work, walk, v, unmasked, biases);
    if (kGeneral) draw_signs(work, n, dropout);
    // Without a Mask nothing has been summed up before.
    if constexpr (kMasks) rescale(out, shrink);
    pack_weights();
    if (n == work.last) clear_tail_of_values(work);
    if (goes_on(walk)) {
      for (go_on(walk);; go_on(walk)) {
        ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
        take_turn();
        score_product<kColumns, uint64_t>(scores, shared.q, group * 64, shared.k[k.stage]);
        await_values();
        accumulate<32, uint64_t>(out, weights, shared.v[v.stage]);
        give_turn(group);
        if (!kGeneral) draw_signs(work, n, dropout);
        const auto biases = begin_biases(work, n);
        ptx::wgmma_wait<1>();
        ptx::hold(scores);
        if constexpr (kPaired) shared.parts[group].exchange(scores, &parts_parity);
        end_keys(kMasks ? walk.tile.has(KeyTile::kLast) : n == walk.last);
        weigh(work, walk, v.after(), unmasked, biases);
        if (kGeneral) draw_signs(work, n, dropout);
        ptx::hold(scores);
        // The loop ends here, before the wait in end_step: within one block of instructions the compiler would move the
        // wait to before the exponentials, and nothing would run under the product of the values.
        if (!goes_on(walk)) break;
        end_step();
      }
      end_step();
    }
    await_values();
    accumulate<32, uint64_t>(out, weights, shared.v[v.stage]);
    end_values();
  }

  __device__ __forceinline__ void end_keys(bool last_of_tile) {
    release(shared.k_empty[k.stage]);
    k.advance();
    if (last_of_tile) end_queries();
  }
  __device__ __forceinline__ void end_queries() {
    release(shared.q_empty);
    q_parity ^= 1;
  }

  // A key tile that only other warpgroups see.
  __device__ __forceinline__ void skip_step(const Work& work, int n) {
    take_turn();
    give_turn(group);
    if (n == work.last) clear_tail_of_values(work);
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
    await_values();
    release(shared.k_empty[k.stage]);
    release(shared.v_empty[v.stage]);
    k.advance();
    v.advance();
  }

  // Warpgroups issue their products one after another: each hands the turn to the next one.
  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + group, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void give_turn(int from) const {
    ptx::named_barrier_arrive(kTurnBarrier + (from + 1) % kGroups, 2 * kGroupThreads);
  }

  __device__ __forceinline__ void start_tile(int h) {
    const float sink = head_sink(p, h);
    set_zero(out);
    softmax.start(sink);
  }

  __device__ __forceinline__ void pack_weights() {
    pack_scores<T>(weights, scores);
    if constexpr (kDropout) {
      if (drops()) Dropout::drop_packed(weights, signs);
    }
  }

  // Called while products are under way: the compiler spreads the generator over their issue, which costs less than
  // drawing afterwards. General kernels draw afterwards: the registers hold a bias until then.
  __device__ __forceinline__ void draw_signs(const Work& work, int n, const Dropout& dropout) {
    if constexpr (kDropout) {
      if (!drops()) return;
      dropout.packed_signs(signs, p.origin, work.h, work.row0 + warp_row, n * kKeys);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) asm volatile("" : "+r"(signs[step][0]), "+r"(signs[step][1]));
    }
  }

  // The bias of this warp's scores against key tile n.
  __device__ __forceinline__ Bias bias(const Work& work, int n) const {
    return Bias(p, work.b, work.h, work.mask(p), work.row0 + warp_row, n * kKeys);
  }
  // Reads what is to be added to the scores before their product is waited for. General kernels find the rest again
  // rather than keep it in registers.
  __device__ __forceinline__ auto begin_biases(const Work& work, int n) {
    if constexpr (kGeneral) bias(work, n).load_ahead(bias_ahead);
    if constexpr (kKind == Kind::kScores) {
      return bias(work, n);
    } else {
      return Nothing{};
    }
  }

  // After the last row of a packed sequence come values of another one: weights of 0 would still carry over a NaN. The
  // warpgroups zero these rows together.
  __device__ __forceinline__ void clear_tail_of_values(const Work& work) {
    const int rows = work.length_k - work.last * kKeys;
    if (rows >= kKeys || !p.is_varlen()) return;
    await_values();
    clear_rows(shared.v[v.stage], rows, threadIdx.x - kGroupThreads, kGroups * kGroupThreads);
    ptx::fence_async_shared();
    __syncwarp();
    release(shared.tail_cleared);
    ptx::barrier_wait(&shared.tail_cleared, tail_parity);
    tail_parity ^= 1;
  }

  // Scores against a key tile become weights; values: where the tile's values are or will be. They are packed later, in
  // pack_weights: the registers of packed weights are operands of the product that is under way, which writes to `out`
  // as well.
  template <class Biases>
  __device__ __forceinline__ void weigh(const Work& work, const KeyWalk& walk, const RingPosition<kStages>& values,
                                        const Limits& unmasked, [[maybe_unused]] const Biases& biases) {
    auto& x = reinterpret_cast<float (&)[1][kScoreTiles][4]>(scores);
    const int row = work.row0 + warp_row + g(), key0 = walk.n * kKeys, key = key0 + 2 * t();
    [[maybe_unused]] float logit_factor = 1;  // of kScores
    if constexpr (kGeneral) {
      score.template make_logits<T>(x);
      bias(work, walk.n).add(x, bias_ahead);
    } else if constexpr (kKind == Kind::kScores) {
      score.template store<T>(x);
      logit_factor = biases.add(x, score.factor);
    } else {
      store_scores(x, score);
    }
    const bool before = key0<unmasked.begin, after = key0 + kKeys> unmasked.end;
    if (before || after) {  // one branch around both: with two, dropout's bits are not drawn under the products
      if (before) hide_keys<true, false>(x, work.mask(p), row, key);
      if (after) hide_keys<false, true>(x, work.mask(p), row, key);
    }
    if (kMasks && !walk.tile.has(warp_row / 16)) {
      ptx::barrier_wait(&shared.pairs_full[values.stage], values.parity);
      hide_keys_by_interval(x, row, [&](int tile) {
        return *reinterpret_cast<const int4*>(&shared.pairs[values.stage][tile * 8 + 2 * t()]);
      });
    }
    auto keep_shrink = [&](const float (&factors)[2]) {
      shrink[0] = factors[0];
      shrink[1] = factors[1];
    };
    if constexpr (kKind == Kind::kScores) {
      softmax.weigh(scores, ScaledLogit{logit_factor}, kTolerance, keep_shrink);
    } else {
      softmax.weigh(scores, stored_rule(score), kTolerance, keep_shrink);
    }
  }

  // Values in this stage are there, and have been inspected.
  __device__ __forceinline__ void await_values() const {
    ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
    if constexpr (kMasks) {
      if (inspects(p)) ptx::barrier_wait(&shared.v_inspected[v.stage], v.parity);
    }
  }
  // Rows that see a key whose values were isolated become NaNs.
  __device__ __forceinline__ void poison_rows_of_values() {
    const Inspection& inspection = shared.inspections[v.stage];
    const Mask32 mask(p, inspection.length_q, inspection.length_k);
    const int row = inspection.row0 + warp_row + g();
    bool sees[2] = {false, false};
    ptx::barrier_wait(&shared.pairs_full[v.stage], v.parity);
#pragma unroll 1
    for (int i = 0; i < kKeys; ++i) {
      if (!shared.v_isolated[v.stage][isolating_warp<kInspectors>(i)] || !inspection.is_isolated[i]) continue;
      const int2 pair = shared.pairs[v.stage][i];
      const Limits rows = mask.rows_of(inspection.key0 + i, inspection.key0 + i + 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sees[r] |= row + 8 * r >= max(rows.begin, pair.x) && row + 8 * r < min(rows.end, pair.y);
      }
    }
    poison_rows(out, sees);
  }

  __device__ __forceinline__ void end_step() {
    end_values();
    rescale(out, shrink);
    pack_weights();
  }
  __device__ __forceinline__ void end_values() {
    uint32_t found = 0;
    if constexpr (kMasks) {
      found = *reinterpret_cast<const uint32_t*>(shared.v_isolated[v.stage]) & 0xFFFFFF;  // kInspectors bytes
    }
    ptx::wgmma_wait<0>();
    ptx::hold(out);
    if constexpr (kMasks) {
      if (found && inspects(p)) poison_rows_of_values();
    }
    release(shared.v_empty[v.stage]);
    v.advance();
  }

  __device__ __forceinline__ void finish_tile(const Work& work) {
    const float keep_scale = 256.f / p.dropout_threshold;
    const int row = work.row0 + warp_row + g(), column = Loader::column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = softmax.total(r);
      const bool exists = row + 8 * r < work.length_q;
      const int64_t at = int64_t{work.query_start} + row + 8 * r;
      if (t() == 0 && exists && column == 0) *row_statistic(p.lse, work.b, work.h, at) = softmax.lse(r, sum);
      store_row(row_pointer<T>(p.out, work.b, work.h, at) + column, out, r, keep_scale / sum, sum == 0, exists,
                static_cast<int>(p.head_dim_v) - column);
      if constexpr (kScored) {
        if (p.out_residual.data == nullptr) continue;
        store_row<T, true>(row_pointer<T>(p.out_residual, work.b, work.h, at) + column, out, r, keep_scale / sum,
                           sum == 0, exists, static_cast<int>(p.head_dim_v) - column);
      }
    }
  }
};

template <class Kernel>
__device__ __forceinline__ void run_forward(const AttnParams& p, const ForwardMaps& maps, const TileGrid& grid,
                                            const typename Kernel::Score& score) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Kernel::Shared& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    ptx::barrier_init(&shared.q_full, 1);
    ptx::barrier_init(&shared.q_empty, Kernel::kWarps);
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::barrier_init(&shared.k_full[i], 1);
      ptx::barrier_init(&shared.k_empty[i], Kernel::kWarps);
      ptx::barrier_init(&shared.v_full[i], 1);
      ptx::barrier_init(&shared.v_empty[i], Kernel::kWarps);
      if (Kernel::kMasks) {
        ptx::barrier_init(&shared.pairs_full[i], 32);
        ptx::barrier_init(&shared.v_inspected[i], Kernel::kInspectors);
      }
    }
    ptx::barrier_init(&shared.work_full, 1);
    ptx::barrier_init(&shared.work_empty, Kernel::kWarps);
    ptx::barrier_init(&shared.tail_cleared, Kernel::kWarps);
    for (int i = 0; Kernel::kPaired && i < Kernel::kGroups; ++i) shared.parts[i].init();
    ptx::fence_barrier_init();
  }
  sync_pair_or_block<Kernel::kPaired>();
  // One warpgroup loads; it gives its registers to those that compute.
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<Kernel::kRegisters.producer>();
    if (threadIdx.x < Kernel::Loader::kThreads) typename Kernel::Loader{shared, p, maps}.load_tiles(grid);
    if constexpr (Kernel::kMasks) {
      const int inspector = uniform(static_cast<int>(threadIdx.x) / 32) - 1;
      if (inspector >= 0 && Kernel::inspects(p)) Kernel::inspect_values(shared, inspector);
    }
  } else {
    ptx::take_registers<Kernel::kRegisters.consumer>();
    Kernel(shared, p, score, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
  }
  if (Kernel::kPaired) sync_pair_or_block<true>();
#endif
}

template <class T, int kHeadDim, Kind kKind>
__global__ void __launch_bounds__(Forward<T, kHeadDim, kKind>::kThreads, 1)
    forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ TileGrid grid,
                   const __grid_constant__ typename Forward<T, kHeadDim, kKind>::Score score) {
  run_forward<Forward<T, kHeadDim, kKind>>(p, maps, grid, score);
}
// The same in clusters of two thread blocks.
template <class T, int kHeadDim, Kind kKind>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Forward<T, kHeadDim, kKind>::kThreads, 1)
    paired_forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ ForwardMaps maps,
                          const __grid_constant__ TileGrid grid,
                          const __grid_constant__ typename Forward<T, kHeadDim, kKind>::Score score) {
  run_forward<Forward<T, kHeadDim, kKind>>(p, maps, grid, score);
}

template <class T, int kHeadDim, Kind kKind>
void forward(const AttnParams& p) {
  using Kernel = Forward<T, kHeadDim, kKind>;
  if (p.batch * p.heads_q == 0) return;
  const ForwardMaps maps{query_map(p, p.q, p.head_dim, Kernel::kQueries), key_map(p, p.k, p.head_dim, Kernel::kKeys),
                         key_map(p, p.v, p.head_dim_v, Kernel::kKeys)};
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries), heads = p.batch * p.heads_q, all = blocks * heads;
  int* const taken = static_cast<int*>(p.workspace);
  const TileGrid grid{forward_order(p, blocks, sizeof(T)), static_cast<int>(all), taken};
  const int64_t processors = multiprocessors() / Kernel::kBlocks;
  if (all > processors && !Kernel::kPaired) {
    check_launch(cudaMemsetAsync(taken, 0, sizeof(int), static_cast<cudaStream_t>(p.stream)), "memset", p);
  }
  auto launch_as = [&](auto* kernel) {
    launch(kernel, "sm90 forward", p, std::min(all, processors) * Kernel::kBlocks, Kernel::kThreads,
           static_cast<int>(sizeof(typename Kernel::Shared)), maps, grid, Kernel::Score::of(p));
  };
  if constexpr (Kernel::kPaired) {
    launch_as(paired_forward_kernel<T, kHeadDim, kKind>);
  } else {
    launch_as(forward_kernel<T, kHeadDim, kKind>);
  }
}

}  // namespace flashattn_ext::sm90
