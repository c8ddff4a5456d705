// The policies of the Hopper forward (forward.cuh) for visibility with a Mask or a BlockMask. Their functions are
// described in shared/arithmetic_visibility.cuh.
#pragma once

#include "cuda/sm90/forward/forward_blocks.cuh"
#include "cuda/sm90/forward/forward_mask.cuh"

namespace flashattn_ext::sm90 {

// Shared::poisoned, of the kernels that inspect values (inspect_values in forward_mask.cuh).
template <class Shared>
__device__ __forceinline__ void clear_poisoned(Shared& shared, int threads) {
  constexpr int kRows = 2 * sizeof(shared.poisoned[0]);
  for (int row = threadIdx.x; row < kRows; row += threads) shared.poisoned[0][row] = false;
}
// It also resets that for the query tile after the next.
template <class Shared>
__device__ __forceinline__ void take_poisoned_rows(Shared& shared, int parity, int warp_row, bool (&poisoned)[2]) {
  bool* const rows = &shared.poisoned[parity][warp_row + g()];
#pragma unroll
  for (int r = 0; r < 2; ++r) poisoned[r] = rows[8 * r];
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r) rows[8 * r] = false;
  __syncwarp();
}

// A Mask: intervals of rows for each key. The producer warps find and describe the tiles (forward_mask.cuh).
template <int kGroups>
struct IntervalVisibility {
  using KeyTile = sm90::KeyTile<kGroups>;
  struct Walk {
    int n;
    KeyTile tile;  // n and the rows that see it; the keys of the tile have arrived
    bool done;     // whether the last tile has been left
    int run;       // how many of the following tiles are known already
  };
  static constexpr bool kTakesLate = true, kResumes = true, kUniformShared = true;
  static constexpr int kValueArrivals = kValueInspectors;

  template <class Shared>
  static __device__ __forceinline__ void init_stage(Shared& shared, int i) {
    ptx::barrier_init(&shared.pairs_full[i], 32);
    ptx::barrier_init(&shared.v_arrived[i], 1);
  }
  template <class Shared>
  static __device__ __forceinline__ void init(Shared& shared) {
    for (int i = 0; i < kKeyBatches; ++i) {
      ptx::barrier_init(&shared.batch_full[i], 1);
      ptx::barrier_init(&shared.batch_empty[i], 1);
    }
    ptx::barrier_init(&shared.tiles_end[0], 1);
  }
  template <class Shared>
  static __device__ __forceinline__ void clear(Shared& shared, int threads) {
    clear_poisoned(shared, threads);
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

  template <int kKeys, class Shared, class Ring, class Work, class Skip, class Compute, class End>
  static __device__ __forceinline__ void compute_tile(Shared& shared, const AttnParams&, const Ring& k, int group,
                                                      uint32_t q_parity, const Work&, const Skip& skip,
                                                      const Compute& compute, const End& end) {
    Walk walk;
    walk.run = 0;
    ptx::barrier_wait(&shared.q_full, q_parity);
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
      return *reinterpret_cast<const int4*>(&shared.partial_tiles[slot].pairs[tile * 8 + 2 * t()]);
    });
  }
  template <class Shared>
  static __device__ __forceinline__ void take_poisoned(Shared& shared, int parity, int warp_row, bool (&poisoned)[2]) {
    take_poisoned_rows(shared, parity, warp_row, poisoned);
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

// A BlockMask: the key tiles of a query tile are those of a run of blocks (forward_blocks.cuh).
template <int kKeysOfTile, int kTeams>
struct BlockVisibility {
  struct Walk {
    int n = 0;  // known from `begin` on
    int left;   // tiles after this one
    SeenKeys<kKeysOfTile> seen;
  };
  static constexpr bool kTakesLate = true, kResumes = false, kUniformShared = false;
  static constexpr int kValueArrivals = kValueInspectors / kTeams;

  template <class Shared>
  static __device__ __forceinline__ void init_stage(Shared& shared, int i) {
    ptx::barrier_init(&shared.v_arrived[i], 1);
  }
  template <class Shared>
  static __device__ __forceinline__ void init(Shared&) {}
  template <class Shared>
  static __device__ __forceinline__ void clear(Shared& shared, int threads) {
    clear_poisoned(shared, threads);
  }

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

  template <int kKeys, class Shared, class Ring, class Work, class Skip, class Compute, class End>
  static __device__ __forceinline__ void compute_tile(Shared& shared, const AttnParams&, const Ring&, int,
                                                      uint32_t q_parity, const Work& work, const Skip&,
                                                      const Compute& compute, const End&) {
    Walk walk;
    walk.left = work.last - work.first;
    ptx::barrier_wait(&shared.q_full, q_parity);
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
    walk.seen.load(p, warp_row + g(), place_in_block<kKeysOfTile>(walk.n));
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
  template <class Shared>
  static __device__ __forceinline__ void take_poisoned(Shared& shared, int parity, int warp_row, bool (&poisoned)[2]) {
    take_poisoned_rows(shared, parity, warp_row, poisoned);
  }
};

}  // namespace flashattn_ext::sm90
