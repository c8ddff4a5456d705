// Policies of the Hopper backward (backward.cuh, backward_wide.cuh) for visibility: which queries see a tile of keys.
// All members are static.
//   Work                     the description of a key tile
//   kHasIntervals            whether a call may have a Mask
//   kLists                   whether it has a BlockMask: backward_blocks.cuh, which has the functions for that
//   kKeyArrivals             at the barrier of a stage of keys
//   Loads<kStages>           more state of the loading warp
//   init<kInspectors>(shared)
//                            one thread: barriers
//   clip(p, work, rows, key, end)
//                            the producer warp: those of `rows`, which causal and window leave, that see any of the
//                            keys
//   describe<Packing, kKeys>(p, work, to)
//                            the producer warp: fills in what Work has besides BackwardWork
//   inspect(shared, p, warp) the other warps of the producer warpgroup
//   await(full, inspected, at)
//                            waits until a stage (keys, values, queries or output gradients) has arrived and has been
//                            inspected
//   unmasked(work, part, by_arithmetic)
//                            queries that see all of the part's 64 keys
//   whole(p, work), await_inspection<Packing, kQueries>(shared, queries, whole, m)
//                            steps at other queries must wait for their inspection; waits for that of query tile m
//   choose_order(p, &work)   the producer warp: chooses the order of the key tiles of a head
//   key_tiles_descend(work)  in a deterministic call: whether they add to dq in descending order, and are computed in
//                            that order
//   added_before<kKeys, kQueries>(p, shared, work, m, step), added_after(...)
//                            in a deterministic call: the values of the counter of query tile m (tile_order.cuh) before
//                            and after the key tile adds to it. step: counts the steps of the thread block
#pragma once

#include "cuda/score/isolation.cuh"
#include "cuda/sm90/shared/backward_work.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"

namespace flashattn_ext::sm90 {

// Causal and window alone.
struct ArithmeticQueries {
  using Work = BackwardWork;
  static constexpr bool kHasIntervals = false, kLists = false;
  static constexpr int kKeyArrivals = 1;
  template <int>
  using Loads = Nothing;

  template <int kInspectors, class Shared>
  static __device__ __forceinline__ void init(Shared&) {}
  static __device__ __forceinline__ Limits clip(const AttnParams&, const BackwardWork&, const Limits& rows, int, int) {
    return rows;
  }
  template <class Packing, int kKeys>
  static __device__ __forceinline__ void describe(const AttnParams&, const BackwardWork&, Work&) {}
  template <class Kernel, class Shared>
  static __device__ __forceinline__ void inspect(Shared&, const AttnGradParams&, int) {}

  template <class Inspected, int kStages>
  static __device__ __forceinline__ void await(ptx::Barrier* full, Inspected&, const RingPosition<kStages>& at) {
    ptx::barrier_wait(&full[at.stage], at.parity);
  }
  template <class Limit>
  static __device__ __forceinline__ Limits unmasked(const Work&, int, const Limit& by_arithmetic) {
    return by_arithmetic();
  }
  static __device__ __forceinline__ Limits whole(const AttnGradParams&, const Work&) { return {}; }
  template <class Packing, int kQueries, class Shared, class Ring>
  static __device__ __forceinline__ void await_inspection(Shared&, const Ring&, const Limits&, int) {}

  static __device__ __forceinline__ void choose_order(const AttnGradParams&, BackwardWork*) {}
  static __device__ __forceinline__ bool key_tiles_descend(const BackwardWork&) { return false; }
  template <int kKeys, int kQueries, class Shared>
  static __device__ __forceinline__ int added_before(const AttnGradParams& p, const Shared&, const BackwardWork& work,
                                                     int m, int) {
    return key_tiles_before(work.mask(p), work.n, kKeys, m * kQueries, kQueries);
  }
  template <int kKeys, int kQueries, class Shared>
  static __device__ __forceinline__ int added_after(const AttnGradParams& p, const Shared& shared,
                                                    const BackwardWork& work, int m, int step) {
    return added_before<kKeys, kQueries>(p, shared, work, m, step) + 1;
  }
};

// With a Mask, inspector warps replace non-finite values by zeros (isolation.cuh): in queries and output gradients of
// steps that the Mask partly hides, and in keys that have such a step. Rows with such queries get a log-sum-exp of NaN,
// which makes their visible weights NaN. Such keys get values of NaN, which make their visible dS NaN. The inspectors
// are the last kInspectors warps of the producer warpgroup. They arrive for every step, even where there is nothing to
// inspect, and the producer warp waits for them too. No warp is therefore a full round of stages ahead of them, and a
// warp that does not need an inspection may skip the wait for it.
//
// In a deterministic call an inspector warp finds the values of the counters, for the last kStepsKept steps of the
// thread block.

// Whether the Mask hides a part of the step at query tile m. whole: MaskedBackwardWork.
template <class Packing, int kQueries>
__device__ __forceinline__ bool is_partial(const Limits& whole, int m) {
  return Packing::is_masked(whole, m * kQueries);
}

template <class Kernel>
struct BackwardInspector {
  SharedOf<Kernel>& shared;
  const AttnGradParams& p;
  const int warp;  // index among the inspectors
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kStages> queries;
  RingPosition<Kernel::kWorkStages> works;
  int step = 0;  // modulo kStepsKept: index into added_before

  __device__ void inspect_tiles() {
    for (;; works.advance()) {
      ptx::barrier_wait(&shared.work_full[works.stage], works.parity);
      const auto& work = shared.work[works.stage];
      if (!uniform(work.exists())) return;
      if (uniform(work.tiles) > 0) {
        const int first = work.first, last = first + work.tiles - 1;
        inspect_keys(uniform(is_partial(work, first) || is_partial(work, last)));
        if (p.deterministic && warp == 0) {
          const Limits walk{first * Kernel::kQueries, (last + 1) * Kernel::kQueries};
          const EarlierKeyTile before = key_tile_before<Kernel::kKeys>(
              key_extremes(p, work), work.mask(p), work.n, walk, Kernel::Visibility::key_tiles_descend(work));
          if (threadIdx.x % 32 == 0) *shared.before = before;
          __syncwarp();
        }
        for (typename Kernel::Walk now(p, work, static_cast<int>(p.group_size())); now.left > 0; now.advance()) {
          if (p.deterministic && warp == 0) find_key_tile_before(work, now.m);
          ++step;
          inspect_queries(uniform(is_partial(work, now.m)));
        }
      }
      release(shared.work_empty[works.stage]);
    }
  }

 private:
  static __device__ __forceinline__ bool is_partial(const MaskedBackwardWork& work, int m) {
    return sm90::is_partial<typename Kernel::Packing, Kernel::kQueries>(work.whole, m);
  }
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
    const int tile = key_tile_before<Kernel::kKeys>(key_extremes(p, work), work.mask(p), *shared.before, rows,
                                                    Kernel::Visibility::key_tiles_descend(work));
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

// A Mask as well: intervals of rows for each key.
struct IntervalQueries {
  using Work = MaskedBackwardWork;
  static constexpr bool kHasIntervals = true, kLists = false;
  static constexpr int kKeyArrivals = 1;
  template <int>
  using Loads = Nothing;

  template <int kInspectors, class Shared>
  static __device__ __forceinline__ void init(Shared& shared) {
    for (ptx::Barrier& barrier : shared.keys_inspected) ptx::barrier_init(&barrier, kInspectors);
    for (ptx::Barrier& barrier : shared.queries_inspected) ptx::barrier_init(&barrier, kInspectors);
  }
  static __device__ __forceinline__ Limits clip(const AttnParams& p, const BackwardWork& work, const Limits& rows,
                                                int key, int end) {
    return clipped(rows, key_extremes(p, work).template of_tile<32>(key, end));
  }
  template <class Packing, int kKeys>
  static __device__ __forceinline__ void describe(const AttnParams& p, const BackwardWork& work, Work& to) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) to.pairs = IntervalPairs(p, work.b, work.hk, work.key_start);
    const KeyExtremes extremes = key_extremes(p, work);
    Limits whole{0, INT32_MAX};
    // No branch around warp-collective code: otherwise the compiler gives up uniform registers in this warp. Keys after
    // the last of the sequence are masked for every row, whatever this computes.
#pragma unroll
    for (int i = 0; i < kKeys / 64; ++i) {
      const int key = work.key0 + i * 64, first = min(key, work.length_k - 1);
      const IntervalExtremes keys = extremes.of_granules<32>(first, min(key + 64, work.length_k));
      const Limits unmasked = clipped_to_all(Packing::unmasked_queries(p, work.mask(p), key, 64), keys, work.length_q);
      whole = clipped_to_all(whole, keys, work.length_q);
      if (lane == 0) to.unmasked[i] = unmasked;
    }
    if (lane == 0) to.whole = whole;
  }
  template <class Kernel, class Shared>
  static __device__ __forceinline__ void inspect(Shared& shared, const AttnGradParams& p, int warp) {
    const int inspector = warp - (4 - Kernel::kInspectors);
    if (inspector >= 0) BackwardInspector<Kernel>{shared, p, inspector}.inspect_tiles();
  }

  template <class Inspected, int kStages>
  static __device__ __forceinline__ void await(ptx::Barrier* full, Inspected& inspected,
                                               const RingPosition<kStages>& at) {
    ptx::barrier_wait(&full[at.stage], at.parity);
    ptx::barrier_wait(&inspected[at.stage], at.parity);
  }
  template <class Limit>
  static __device__ __forceinline__ Limits unmasked(const Work& work, int part, const Limit&) {
    return work.unmasked[part];
  }
  // In a deterministic call every warp waits for every inspection.
  static __device__ __forceinline__ Limits whole(const AttnGradParams& p, const Work& work) {
    return {uniform(work.whole.begin), p.deterministic ? 0 : uniform(work.whole.end)};
  }
  template <class Packing, int kQueries, class Shared, class Ring>
  static __device__ __forceinline__ void await_inspection(Shared& shared, const Ring& queries, const Limits& whole,
                                                          int m) {
    if (is_partial<Packing, kQueries>(whole, m))
      ptx::barrier_wait(&shared.queries_inspected[queries.stage], queries.parity);
  }

  // Descending with several query heads for each KV head, unless one document has half of the queries. The key tiles of
  // a document that begin at the same time then walk through its query tiles from their diagonals on, in every head of
  // the group. A later key tile has fewer query tiles, so it is always ahead. In ascending order each one would wait in
  // every head for the one before, and all of them would take as long as the first. In one long document, however, the
  // longest walks come last in descending order. A document with half of the queries has the middle key. Its interval
  // is the same in every call: a sequence has the same bits alone and packed.
  static __device__ __forceinline__ void choose_order(const AttnGradParams& p, BackwardWork* work) {
    work->descends = 0;
    if (!p.deterministic || p.heads_q == p.heads_k || !p.has_intervals() || work->length_k == 0) return;
    const int h = work->hk * static_cast<int>(p.group_size());
    const int2 rows = IntervalPairs(p, work->b, work->hk, work->key_start).head(h)[work->length_k / 2];
    work->descends = 2 * (int64_t{min(rows.y, work->length_q)} - max(rows.x, 0)) < work->length_q;
  }
  static __device__ __forceinline__ bool key_tiles_descend(const BackwardWork& work) {
    return uniform(work.descends) != 0;
  }
  template <int kKeys, int kQueries, class Shared>
  static __device__ __forceinline__ int added_before(const AttnGradParams&, const Shared& shared, const BackwardWork&,
                                                     int, int step) {
    return shared.added_before[step % kStepsKept];
  }
  template <int kKeys, int kQueries, class Shared>
  static __device__ __forceinline__ int added_after(const AttnGradParams&, const Shared&, const BackwardWork& work, int,
                                                    int) {
    return work.n + 1;
  }
};

}  // namespace flashattn_ext::sm90
