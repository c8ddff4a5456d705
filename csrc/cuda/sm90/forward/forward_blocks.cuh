// The producer warpgroup of the forward (forward.cuh) with a BlockMask (rules/mask.h). A query tile has the rows
// of one block, and a key tile the keys of one: its key tiles are the entries of a run, the last one first. One warp
// reads the run and loads, and two inspect the values of partial blocks. At the end is the policy of visibility that
// runs it (BlockVisibility).
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/score/block_mask.cuh"
#include "cuda/sm90/forward/forward_mask.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// The description of a partial block for the inspecting warps, in a ring with as many slots as there are stages of
// values.
struct PartialValues {
  int stage;        // stage of the values; negative: there are no more
  int n, row0;      // the key tile; of the query tile: Work
  int bits;         // MaskBlock::bits
  int work_parity;  // parity of the query tile, an index into Shared::poisoned
};

// What a lane sees of a tile of kKeys keys: rows g and g + 8 of its warp.
template <int kKeys>
struct SeenKeys {
  int bits = kWholeBlock;  // MaskBlock::bits, the same in all lanes
  RowBits<kKeys> rows[2];

  __device__ __forceinline__ bool is_whole() const { return bits == kWholeBlock; }
  // row, key: the lane's row g and the first key, in the block. The loads overlap with what follows.
  __device__ __forceinline__ void load(const AttnParams& p, int row, int key) {
    const PartialBlock block(p, bits);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = block.of_row<kKeys>(row + 8 * r, key);
  }
  // Hides what the rows do not see (hide_row_by_bits).
  __device__ __forceinline__ void hide(const AttnParams& p, float (&x)[kKeys / 8][4]) const {
    const bool exists = PartialBlock(p, bits).exists();
    const float hidden = hidden_score(exists);
#pragma unroll
    for (int r = 0; r < 2; ++r) hide_row_by_bits<kKeys>(x, r, rows[r], exists, hidden);
  }
};

// Loads the tiles of runs of blocks. All lanes of the warp call it; one starts the copies.
template <class Kernel, class Maps>
struct ListedKeyLoader {
  using Work = ForwardWork;
  static constexpr int kKeys = Kernel::kKeys, kTiles = kTilesOfBlock<kKeys>;
  static_assert(Kernel::kQueries == kBlockSide);

  SharedOf<Kernel>& shared;
  const AttnParams& p;
  const Maps& maps;
  const TileGrid& grid;
  const int team;
  RingPosition<Kernel::kStages> k, v, partial;
  QueryPosition<Kernel::kQueryStages> q;
  uint32_t work_parity = 0;
  int following = 0;  // in lane 0, once it is taken: the number of the tile to load next
  bool has_taken = false;

  __device__ void load_all() {
    Kernel::each_work(p, grid, [&](int) { return following_tile(); }, [&](Work& work, int) { load_tile(work); }, team);
    publish(Work{});
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    if (lane() != 0) return;
    shared.partial_tiles[partial.stage].stage = -1;
    ptx::barrier_arrive(&shared.v_arrived[partial.stage]);
  }

 private:
  // While the last tiles of a query tile are loaded, the atomic addition is under way.
  __device__ __forceinline__ void take() {
    if (lane() == 0) following = grid.take(static_cast<int>(gridDim.x) * Kernel::kTeams);
    has_taken = true;
  }
  __device__ __forceinline__ int following_tile() {
    if (!has_taken) take();
    has_taken = false;
    return uniform(following);
  }

  // work.first and work.last, key tiles that causal and window leave, become places of tiles along the run
  // (TilesOfRun).
  __device__ __forceinline__ void load_tile(Work& work) {
    const BlockRun run = HeadBlocks(p, work.b, work.h).of_rows(work.row0 / kBlockSide);
    const TilesOfRun<kKeys> tiles{run};
    const bool bounded = is_bounded(p);
    const int end = bounded ? tiles.template first_from<32>(work.last + 1) : run.end * kTiles;
    work.first = bounded ? tiles.template first_from<32>(work.first) : run.begin * kTiles;
    work.last = end - 1;
    publish(work);
    if (work.sees_keys()) load_run(work, run);
  }
  // The key tile at a place, as consumers get it: MaskBlock::block is its number. Nothing has checked that the block
  // exists.
  __device__ __forceinline__ MaskBlock tile_at(const BlockRun& run, int place) const {
    const MaskBlock block = run.at(place / kTiles);
    const int last = static_cast<int>(mask_blocks(p.seqlen_k)) - 1;
    return {max(min(block.block, last), 0) * kTiles + place % kTiles, block.bits};
  }
  __device__ __forceinline__ void load_run(const Work& work, const BlockRun& run) {
    const int hk = work.h / (static_cast<int>(p.heads_q) / static_cast<int>(p.heads_k));
    MaskBlock tile = tile_at(run, work.last), before{};
#pragma unroll 1
    for (int place = work.last; place >= work.first; --place) {
      const MaskBlock next = tile_at(run, max(place - 1, work.first));
      if (!has_taken && place - work.first < kKeyTilesAhead) take();
      load_keys(work, tile, hk);
      if (place == work.last) {
        load_queries(work);
      } else {
        load_values(work, before, hk);
      }
      before = tile;
      tile = next;
    }
    load_values(work, before, hk);
  }
  __device__ __forceinline__ void publish(const Work& work) {
    ptx::barrier_wait(&shared.work_empty, work_parity ^ 1);
    if (lane() == 0) {
      shared.work = work;
      ptx::barrier_arrive(&shared.work_full);
    }
    work_parity ^= 1;
  }
  __device__ __forceinline__ void load_queries(const Work& work) {
    ptx::barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
    if (lane() == 0) load_panels(shared.q[q.stage], shared.q_full[q.stage], maps.q, work.row0, work.h, work.b);
    q.advance();
  }
  __device__ __forceinline__ void load_keys(const Work& work, const MaskBlock& tile, int hk) {
    ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
    if (lane() == 0) {
      shared.key_tiles[k.stage] = tile;
      load_panels(shared.k[k.stage], shared.k_full[k.stage], maps.k, tile.block * kKeys, hk, work.b);
    }
    k.advance();
  }
  __device__ __forceinline__ void load_values(const Work& work, const MaskBlock& tile, int hk) {
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    const bool whole = tile.is_whole();
    if (lane() == 0) {
      if (!whole) {
        // The values of the partial block that had this slot before were released before those of this one.
        shared.partial_tiles[partial.stage] = {v.stage, tile.block, work.row0, tile.bits,
                                               static_cast<int>(work_parity ^ 1)};
      }
      // The values of a whole block are not inspected: this warp arrives in place of the inspecting warps.
      load_panels(shared.v[v.stage], whole ? shared.v_full[v.stage] : shared.v_arrived[partial.stage], maps.v,
                  tile.block * kKeys, hk, work.b);
      constexpr int kOthers = Kernel::Visibility::kValueArrivals - 1;
      if (kOthers > 0 && whole) ptx::barrier_arrive(&shared.v_full[v.stage], kOthers);
    }
    v.advance();
    if (!whole) partial.advance();
  }
};

// The inspecting warps.
template <class Operands, int kInspectors, int kStages, int kKeys, class Shared>
__device__ __forceinline__ void inspect_listed_values(Shared& shared, const AttnParams& p, int warp) {
  inspect_values<Operands, kInspectors, kStages>(
      shared, warp, [&](const PartialValues& tile, const auto&, int i, const auto& visit) {
        const PartialBlock block(p, tile.bits);
        const int key = tile.n * kKeys + i, column = place_in_block<kKeys>(tile.n) + i;
        const Limits rows = Mask32(p, p.seqlen_q, p.seqlen_k).rows_of(key, key + 1);
        const int end = min(rows.end - tile.row0, kBlockSide);
#pragma unroll 1
        for (int row = max(rows.begin - tile.row0, 0); row < end; ++row) {
          if (block.sees(row, column)) visit(row);
        }
      });
}

// --- the policy of visibility --------------------------------------------------------------------------------------

// A BlockMask: the key tiles of a query tile are those of a run of blocks.
template <int kKeysOfTile, int kTeams>
struct BlockVisibility : InspectedVisibility {
  struct Walk {
    int n = 0;  // known from `begin` on
    int left;   // tiles after this one
    SeenKeys<kKeysOfTile> seen;
  };
  static constexpr bool kResumes = false, kUniformShared = false;
  static constexpr int kValueArrivals = kValueInspectors / kTeams;

  template <class Shared>
  static __device__ __forceinline__ void init(Shared&) {}

  template <class Kernel, class Shared, class Maps>
  static __device__ __forceinline__ void load(Shared& shared, const AttnParams& p, const Maps& maps,
                                              const TileGrid& grid) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp < kTeams) {
      ListedKeyLoader<Kernel, Maps>{shared, p, maps, grid, warp}.load_all();
    } else if (warp > 1) {
      inspect_listed_values<typename Kernel::Operands, kValueArrivals, Kernel::kStages, kKeysOfTile>(
          shared, p, (warp - 2) / kTeams);
    }
  }

  template <int kKeys, class Shared, class Ring, class Queries, class Work, class Skip, class Compute, class End>
  static __device__ __forceinline__ void compute_tile(Shared& shared, const AttnParams&, const Ring&, int,
                                                      const Queries& q, const Work& work, const Skip&,
                                                      const Compute& compute, const End&) {
    Walk walk;
    walk.left = work.last - work.first;
    ptx::barrier_wait(&shared.q_full[q.stage], q.parity);
    compute(walk);
  }
  template <class Shared, class Ring>
  static __device__ __forceinline__ void await_keys(Shared& shared, const Ring& k) {
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
  }
  // Which tile it is matters only once its scores are known.
  template <class Shared, class Ring>
  static __device__ __forceinline__ void begin(Shared& shared, const AttnParams& p, const Ring& k, int warp_row,
                                               Walk& walk) {
    MaskBlock tile{};
    if (threadIdx.x % 32 == 0) tile = shared.key_tiles[k.stage];
    walk.n = uniform(tile.block);
    walk.seen.bits = uniform(tile.bits);
    if (walk.seen.is_whole()) return;
    walk.seen.load(p, warp_row + quad(), place_in_block<kKeysOfTile>(walk.n));
  }
  static __device__ __forceinline__ bool is_last(const Walk& walk) { return walk.left == 0; }
  template <class Shared, class Ring>
  static __device__ __forceinline__ bool has_next(Shared&, const Ring&, int, const Walk& walk) {
    return walk.left > 0;
  }
  static __device__ __forceinline__ void advance(Walk& walk) { --walk.left; }
  template <class Shared, class Scores>
  static __device__ __forceinline__ void hide(Shared&, const AttnParams& p, int, const Walk& walk, Scores& x, int) {
    if (!walk.seen.is_whole()) walk.seen.hide(p, x[0]);
  }
};

}  // namespace flashattn_ext::sm90
