// What forward.cuh and jvp.cuh share: the policy of visibility without a Mask, and ForwardConsumer, a base class of the
// objects of consumer warpgroups.
#pragma once

#include "cuda/ptx/async.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/rows.cuh"

namespace flashattn_ext::sm90 {

// --- visibility ----------------------------------------------------------------------------------------------------
//
// A policy of visibility says which tiles of keys a warpgroup computes, and which of their scores are masked besides
// causal and window. All members are static; all lanes of a warp call the consumer's functions, and their branches are
// uniform for the warpgroup. k: the ring position of the keys to come.
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
// The policies of a Mask and of a BlockMask are in forward/forward_mask.cuh and forward_blocks.cuh.

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

  template <int kKeys, class Shared, class Ring, class Queries, class Work, class Skip, class Compute, class End>
  static __device__ __forceinline__ void compute_tile(Shared& shared, const AttnParams& p, const Ring&, int group,
                                                      const Queries& q, const Work& work, const Skip& skip,
                                                      const Compute& compute, const End& end) {
    // Other warpgroups may see more.
    const Limits own = work.template tiles_of<kKeys>(p, work.row0 + group * 64);
    Walk walk{own.end - 1, own.begin};
    int n = work.last;
    for (; n >= own.end; --n) skip(n);
    ptx::barrier_wait(&shared.q_full[q.stage], q.parity);
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

// --- consumer warpgroups -------------------------------------------------------------------------------------------
//
// Turns to issue products, and the steps of the queries and of the rings of keys and values. ForwardConsumer is a
// base class of the kernel's object, which has `shared`, `p`, `group`, tail_parity and its places `q`, `k` and `v` in
// the rings, and
//   kGroups, kKeys            of its tile
//   ping_pong()               the first of kGroups named barriers
//   kClearsTail               whether the rows behind a packed sequence have to be zeroed in tiles of values
//   kTailsOfCaches            whether other sequences have such rows too
//   clear_values(rows, thread, threads)
//                             zeroes the rows from `rows` on of the current stage of values
//   skip_more()               advances the other rings of a key tile that is skipped

template <class Kernel>
struct ForwardConsumer {
  // Ping-pong: warpgroups issue products one after another, and each one then signals the next.
  __device__ __forceinline__ void await_phase() const {
    ptx::named_barrier_sync(self().ping_pong() + self().group, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void pass_phase(int from) const {
    ptx::named_barrier_arrive(self().ping_pong() + (from + 1) % Kernel::kGroups, 2 * kGroupThreads);
  }

  // The key tiles of a query tile.
  template <class Work, class Generator>
  __device__ __forceinline__ void compute_tile(const Work& work, const Generator& generator) {
    Kernel& kernel = self();
    Kernel::Visibility::template compute_tile<Kernel::kKeys>(
        kernel.shared, kernel.p, kernel.k, kernel.group, kernel.q, work, [&](int n) { skip_step(work, n); },
        [&](auto& walk) { kernel.compute_steps(work, walk, generator); }, [&] { end_queries(); });
  }
  __device__ __forceinline__ void end_keys(bool last_of_tile) {
    Kernel& kernel = self();
    release(kernel.shared.k_empty[kernel.k.stage]);
    kernel.k.advance();
    if (last_of_tile) end_queries();
  }
  __device__ __forceinline__ void end_queries() {
    Kernel& kernel = self();
    release(kernel.shared.q_empty[kernel.q.stage]);
    kernel.q.advance();
  }

  // Skips a key tile that only other warpgroups see.
  __device__ __forceinline__ void skip_step(const ForwardWork& work, int n) {
    Kernel& kernel = self();
    await_phase();
    pass_phase(kernel.group);
    if (n == work.last) clear_tail_of_values(work);
    ptx::barrier_wait(&kernel.shared.k_full[kernel.k.stage], kernel.k.parity);
    ptx::barrier_wait(&kernel.shared.v_full[kernel.v.stage], kernel.v.parity);
    release(kernel.shared.k_empty[kernel.k.stage]);
    release(kernel.shared.v_empty[kernel.v.stage]);
    kernel.k.advance();
    kernel.v.advance();
    kernel.skip_more();
  }

  // The rows behind a packed sequence hold values of another one, and those behind the keys of a cache any values: even
  // with weights of 0 they would propagate a NaN.
  // The warpgroups zero these rows together.
  __device__ __forceinline__ void clear_tail_of_values(const ForwardWork& work) {
    Kernel& kernel = self();
    const int rows = work.length_k - work.last * Kernel::kKeys;
    if (!Kernel::kClearsTail || rows >= Kernel::kKeys) return;
    if (!Kernel::kTailsOfCaches && !kernel.p.is_varlen()) return;
    ptx::barrier_wait(&kernel.shared.v_full[kernel.v.stage], kernel.v.parity);
    kernel.clear_values(rows, static_cast<int>(threadIdx.x) - kGroupThreads, Kernel::kGroups * kGroupThreads);
    ptx::fence_async_shared();
    __syncwarp();
    release(kernel.shared.tail_cleared);
    ptx::barrier_wait(&kernel.shared.tail_cleared, kernel.tail_parity);
    kernel.tail_parity ^= 1;
  }

 private:
  __device__ __forceinline__ Kernel& self() { return static_cast<Kernel&>(*this); }
  __device__ __forceinline__ const Kernel& self() const { return static_cast<const Kernel&>(*this); }
};

}  // namespace flashattn_ext::sm90
