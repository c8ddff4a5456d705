// Policies of the Hopper forward (forward.cuh) for visibility: which tiles of keys a warpgroup computes, and which of
// their scores are masked besides causal and window. All members are static; all lanes of a warp call the consumer's
// functions, and their branches are uniform for the warpgroup. Kernel: Forward or Jvp.
//   Walk                  a warpgroup's position among the key tiles of a query tile; n: the tile
//   kTakesLate            as in each_forward_work
//   kResumes              a query tile may be left and entered again, so that `out` need not be zero at the first step
//   kUniformShared        the address of shared memory is moved to a uniform register
//   init_stage(shared, i), init(shared)
//                         one thread: barriers of a stage, other barriers
//   clear(shared)         all threads, before the first __syncthreads
//   load<Derived>(...)    the producer warpgroup. Derived: Kernel, or the kernel derived from it that runs
//   compute_tile(...)     the consumers: calls compute_steps and skip_step of the kernel for all key tiles
//   await_keys(kernel)    before the product for the scores
//   begin(kernel, work, walk)
//                         while that product runs
//   is_last(walk)         whether no later step of the kernel reads the queries of this tile
//   has_next(kernel, walk), advance(walk)
//                         whether the next step computes another key tile; moves to it. With intervals has_next moves
//   hide(...)             masks scores beside causal and window
//   take_poisoned(...)    whether rows g and g + 8 of the result are NaN
#pragma once

#include "cuda/sm90/forward/forward_blocks.cuh"
#include "cuda/sm90/forward/forward_mask.cuh"
#include "cuda/sm90/fp8/value_transposer.cuh"

namespace flashattn_ext::sm90 {

// Causal and window alone: visible tiles are contiguous.
template <class Kernel>
struct ArithmeticVisibility {
  struct Walk {
    int n;
    int last;  // the tile to end with
  };
  static constexpr bool kTakesLate = false, kResumes = false, kUniformShared = false;
  static constexpr int kValueArrivals = 1;

  template <class Shared>
  static __device__ __forceinline__ void init_stage(Shared&, int) {}
  template <class Shared>
  static __device__ __forceinline__ void init(Shared&) {}
  template <class Shared>
  static __device__ __forceinline__ void clear(Shared&) {}

  template <class Derived, class Maps>
  static __device__ __forceinline__ void load(typename Derived::Shared& shared, const AttnParams& p, const Maps& maps,
                                              const TileGrid& grid) {
    if (threadIdx.x == 0) typename Derived::Loader{shared, p, maps}.load_tiles(grid);
    if constexpr (Derived::kTransposers) {
      const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
      if (warp > 0) ValueTransposer<Derived>{shared, warp - 1}.transpose_tiles();
    }
  }

  template <class Work, class Generator>
  static __device__ __forceinline__ void compute_tile(Kernel& kernel, const Work& work, const Generator& generator) {
    // Other warpgroups may see more.
    const Limits own = work.template tiles_of<Kernel::kKeys>(kernel.p, work.row0 + kernel.group * 64);
    Walk walk{own.end - 1, own.begin};
    int n = work.last;
    for (; n >= own.end; --n) kernel.skip_step(work, n);
    ptx::barrier_wait(&kernel.shared.q_full, kernel.q_parity);
    n >= own.begin ? kernel.compute_steps(work, walk, generator) : kernel.end_queries();
    for (n = min(n, own.begin - 1); n >= work.first; --n) kernel.skip_step(work, n);
  }
  static __device__ __forceinline__ void await_keys(Kernel& kernel) {
    ptx::barrier_wait(&kernel.shared.k_full[kernel.k.stage], kernel.k.parity);
  }
  template <class Work>
  static __device__ __forceinline__ void begin(Kernel&, const Work&, const Walk&) {}
  static __device__ __forceinline__ bool is_last(const Walk& walk) { return walk.n == walk.last; }
  static __device__ __forceinline__ bool has_next(Kernel&, Walk& walk) { return walk.n > walk.last; }
  static __device__ __forceinline__ void advance(Walk& walk) { --walk.n; }
  static __device__ __forceinline__ void hide(Kernel&, const Walk&, int) {}
  static __device__ __forceinline__ void take_poisoned(Kernel&, bool (&)[2]) {}
};

// Shared::poisoned, of the kernels that inspect values (inspect_values in forward_mask.cuh).
template <class Kernel, class Shared>
__device__ __forceinline__ void clear_poisoned(Shared& shared) {
  for (int row = threadIdx.x; row < 2 * Kernel::kQueries; row += Kernel::kThreads) shared.poisoned[0][row] = false;
}
// It also resets that for the query tile after the next.
template <class Kernel>
__device__ __forceinline__ void take_poisoned_rows(Kernel& kernel, bool (&poisoned)[2]) {
  bool* const rows = &kernel.shared.poisoned[kernel.work_parity ^ 1][kernel.warp_row + g()];
#pragma unroll
  for (int r = 0; r < 2; ++r) poisoned[r] = rows[8 * r];
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r) rows[8 * r] = false;
  __syncwarp();
}

// A Mask: intervals of rows for each key. The producer warps find and describe the tiles (forward_mask.cuh).
template <class Kernel, int kGroups>
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
  static __device__ __forceinline__ void clear(Shared& shared) {
    clear_poisoned<Kernel>(shared);
  }

  template <class Derived, class Maps>
  static __device__ __forceinline__ void load(typename Derived::Shared& shared, const AttnParams& p, const Maps& maps,
                                              const TileGrid& grid) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp == 0) {
      FoundKeyLoader<Derived, Maps>{shared, p, maps}.load_all();
    } else if (warp == 1) {
      KeyFinder<Derived>{shared, p}.find_all(grid);
    } else {
      inspect_masked_values<Derived>(shared, p, warp - 2);
    }
  }

  template <class Work, class Generator>
  static __device__ __forceinline__ void compute_tile(Kernel& kernel, const Work& work, const Generator& generator) {
    Walk walk;
    walk.run = 0;
    ptx::barrier_wait(&kernel.shared.q_full, kernel.q_parity);
    for (receive_keys(kernel, walk); !walk.done;) {
      if (walk.tile.has(KeyTile::kSeen + kernel.group)) {
        kernel.compute_steps(work, walk, generator);
      } else {
        kernel.skip_step(work, walk.n);
        if (walk.tile.has(KeyTile::kLast)) kernel.end_queries();
        has_next(kernel, walk);
      }
    }
  }
  static __device__ __forceinline__ void await_keys(Kernel&) {}
  template <class Work>
  static __device__ __forceinline__ void begin(Kernel&, const Work&, const Walk&) {}
  static __device__ __forceinline__ bool is_last(const Walk& walk) { return walk.tile.has(KeyTile::kLast); }
  static __device__ __forceinline__ bool has_next(Kernel& kernel, Walk& walk) {
    if (walk.run > 0) {  // all rows see all of the next tile, which is not the last one
      ptx::barrier_wait(&kernel.shared.k_full[kernel.k.stage], kernel.k.parity);
      --walk.run;
      --walk.n;
      walk.tile.bits = KeyTile::kPlain;
      return true;
    }
    walk.done = walk.tile.has(KeyTile::kLast);
    if (walk.done) return false;
    receive_keys(kernel, walk);
    return walk.tile.has(KeyTile::kSeen + kernel.group);
  }
  static __device__ __forceinline__ void advance(Walk&) {}

  // row: of this lane's first score.
  static __device__ __forceinline__ void hide(Kernel& kernel, const Walk& walk, int row) {
    if (walk.tile.has(kernel.warp_row / 16)) return;
    const int slot = walk.tile.slot();
    ptx::barrier_wait(&kernel.shared.pairs_full[slot], walk.tile.slot_parity());
    hide_keys_by_interval(kernel.score_tile(), row, [&](int tile) {
      return *reinterpret_cast<const int4*>(&kernel.shared.partial_tiles[slot].pairs[tile * 8 + 2 * t()]);
    });
  }
  static __device__ __forceinline__ void take_poisoned(Kernel& kernel, bool (&poisoned)[2]) {
    take_poisoned_rows(kernel, poisoned);
  }

 private:
  // Waits for the next keys and reads their KeyTile.
  static __device__ __forceinline__ void receive_keys(Kernel& kernel, Walk& walk) {
    ptx::barrier_wait(&kernel.shared.k_full[kernel.k.stage], kernel.k.parity);
    walk.done = false;
    // One lane reads, and the shuffles move the values to uniform registers. If all lanes read them, ptxas drops the
    // shuffles, and the values that depend on the walk (stages and operands of products) are not in uniform registers.
    KeyTile tile{};
    if (threadIdx.x % 32 == 0) tile = kernel.shared.key_tiles[kernel.k.stage];
    walk.tile = {uniform(tile.n), uniform(tile.bits)};
    walk.n = walk.tile.n;
    walk.run = walk.tile.run();
  }
};

// A BlockMask: the key tiles of a query tile are those of a run of blocks (forward_blocks.cuh).
template <class Kernel>
struct BlockVisibility {
  struct Walk {
    int n = 0;  // known from `begin` on
    int left;   // tiles after this one
    SeenKeys<Kernel::kKeys> seen;
  };
  static constexpr bool kTakesLate = true, kResumes = false, kUniformShared = false;
  static constexpr int kValueArrivals = kValueInspectors / Kernel::kTeams;

  template <class Shared>
  static __device__ __forceinline__ void init_stage(Shared& shared, int i) {
    ptx::barrier_init(&shared.v_arrived[i], 1);
  }
  template <class Shared>
  static __device__ __forceinline__ void init(Shared&) {}
  template <class Shared>
  static __device__ __forceinline__ void clear(Shared& shared) {
    clear_poisoned<Kernel>(shared);
  }

  template <class Derived, class Maps>
  static __device__ __forceinline__ void load(typename Derived::Shared& shared, const AttnParams& p, const Maps& maps,
                                              const TileGrid& grid) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp < Kernel::kTeams) {
      ListedKeyLoader<Derived, Maps>{shared, p, maps, grid, warp}.load_all();
    } else if (warp > 1) {
      inspect_listed_values<Derived>(shared, p, (warp - 2) / Kernel::kTeams);
    }
  }

  template <class Work, class Generator>
  static __device__ __forceinline__ void compute_tile(Kernel& kernel, const Work& work, const Generator& generator) {
    Walk walk;
    walk.left = work.last - work.first;
    ptx::barrier_wait(&kernel.shared.q_full, kernel.q_parity);
    kernel.compute_steps(work, walk, generator);
  }
  static __device__ __forceinline__ void await_keys(Kernel& kernel) {
    ptx::barrier_wait(&kernel.shared.k_full[kernel.k.stage], kernel.k.parity);
  }
  // Which tile it is matters only once its scores are known.
  template <class Work>
  static __device__ __forceinline__ void begin(Kernel& kernel, const Work&, Walk& walk) {
    MaskBlock tile{};
    if (threadIdx.x % 32 == 0) tile = kernel.shared.key_tiles[kernel.k.stage];
    walk.n = uniform(tile.block);
    walk.seen.bits = uniform(tile.bits);
    if (walk.seen.is_whole()) return;
    walk.seen.load(kernel.p, kernel.warp_row + g(), place_in_block<Kernel::kKeys>(walk.n));
  }
  static __device__ __forceinline__ bool is_last(const Walk& walk) { return walk.left == 0; }
  static __device__ __forceinline__ bool has_next(Kernel&, const Walk& walk) { return walk.left > 0; }
  static __device__ __forceinline__ void advance(Walk& walk) { --walk.left; }
  static __device__ __forceinline__ void hide(Kernel& kernel, const Walk& walk, int) {
    if (!walk.seen.is_whole()) walk.seen.hide(kernel.p, kernel.scores);
  }
  static __device__ __forceinline__ void take_poisoned(Kernel& kernel, bool (&poisoned)[2]) {
    take_poisoned_rows(kernel, poisoned);
  }
};

}  // namespace flashattn_ext::sm90
