// Policies of the Hopper forward (forward.cuh, jvp.cuh) for visibility: which tiles of keys a warpgroup computes, and
// which of their scores are masked besides causal and window. All members are static; all lanes of a warp call the
// consumer's functions, and their branches are uniform for the warpgroup. k: the ring position of the keys to come.
//   Walk                  a warpgroup's position among the key tiles of a query tile; n: the tile
//   kTakesLate            as in each_forward_work
//   kResumes              a query tile may be left and entered again, so that `out` need not be zero at the first step
//   kUniformShared        the address of shared memory is moved to a uniform register
//   init_stage(shared, i), init(shared)
//                         one thread: barriers of a stage, other barriers
//   clear(shared, threads)
//                         all threads, before the first __syncthreads
//   load<Kernel>(...)     the producer warpgroup
//   compute_tile<kKeys>(..., skip, compute, end)
//                         the consumers, all key tiles of a query tile: compute(walk) computes those that follow one
//                         another, skip(n) skips one, and end() releases the queries without a step
//   await_keys(shared, k) before the product for the scores
//   begin(...)            while that product runs
//   is_last(walk)         whether no later step of the kernel reads the queries of this tile
//   has_next(shared, k, group, walk), advance(walk)
//                         whether the next step computes another key tile; moves to it. With intervals has_next moves
//   hide(..., x, row)     masks scores beside causal and window. row: of this lane's first score
//   take_poisoned(shared, parity, warp_row, poisoned)
//                         whether rows g and g + 8 of the result of the query tile are NaN
// The policies of a Mask and of a BlockMask are in forward/visibility_policy.cuh.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/rows.cuh"

namespace flashattn_ext::sm90 {

// Causal and window alone: visible tiles are contiguous.
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
  static __device__ __forceinline__ void clear(Shared&, int) {}

  template <class Kernel, class Shared, class Maps>
  static __device__ __forceinline__ void load(Shared& shared, const AttnParams& p, const Maps& maps,
                                              const TileGrid& grid) {
    if (threadIdx.x == 0) typename Kernel::Loader{shared, p, maps}.load_tiles(grid);
  }

  template <int kKeys, class Shared, class Ring, class Work, class Skip, class Compute, class End>
  static __device__ __forceinline__ void compute_tile(Shared& shared, const AttnParams& p, const Ring&, int group,
                                                      uint32_t q_parity, const Work& work, const Skip& skip,
                                                      const Compute& compute, const End& end) {
    // Other warpgroups may see more.
    const Limits own = work.template tiles_of<kKeys>(p, work.row0 + group * 64);
    Walk walk{own.end - 1, own.begin};
    int n = work.last;
    for (; n >= own.end; --n) skip(n);
    ptx::barrier_wait(&shared.q_full, q_parity);
    n >= own.begin ? compute(walk) : end();
    for (n = min(n, own.begin - 1); n >= work.first; --n) skip(n);
  }
  template <class Shared, class Ring>
  static __device__ __forceinline__ void await_keys(Shared& shared, const Ring& k) {
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
  }
  template <class Shared, class Ring>
  static __device__ __forceinline__ void begin(Shared&, const AttnParams&, const Ring&, int, const Walk&) {}
  static __device__ __forceinline__ bool is_last(const Walk& walk) { return walk.n == walk.last; }
  template <class Shared, class Ring>
  static __device__ __forceinline__ bool has_next(Shared&, const Ring&, int, Walk& walk) {
    return walk.n > walk.last;
  }
  static __device__ __forceinline__ void advance(Walk& walk) { --walk.n; }
  template <class Shared, class Scores>
  static __device__ __forceinline__ void hide(Shared&, const AttnParams&, int, const Walk&, Scores&, int) {}
  template <class Shared>
  static __device__ __forceinline__ void take_poisoned(Shared&, int, int, bool (&)[2]) {}
};

}  // namespace flashattn_ext::sm90
