// The visibility policy of the Hopper backward with a BlockMask (rules/mask.h): the query tiles of a key tile,
// which has the keys of one block, are those of the entries of a run, in each query head. Only the loading warp reads
// the lists. It describes each step in shared memory, and the other warps count steps.
//
// Inspector warps replace non-finite values by zeros, as with a Mask (backward_visibility.cuh), but only those of
// partial blocks. The copies of such a step, or of the keys and values of such a key tile, arrive at a barrier of their
// own. When the inspectors are done, they arrive at the barrier of the stage, in place of the copies.
#pragma once

#include "cuda/score/block_mask.cuh"
#include "cuda/score/isolation.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/sm90/shared/backward_visibility.cuh"
#include "cuda/tile/ring.cuh"

namespace flashattn_ext::sm90 {

// A step of the walk of a key tile.
struct alignas(16) ListedStep {
  int h, m;    // its query head and query tile
  int bits;    // MaskBlock::bits of the block that has the query tile
  int before;  // in a deterministic call: how many key tiles add to the query tile before this one
};

// What Shared::has_marks says of a step, as bits.
enum StepMarks : int {
  kMarkedRows = 1,   // rows have marks (cuda/score/large_rows.cuh)
  kHiddenPairs = 2,  // causal, the window or the BlockMask may hide pairs
};

// A stage that the inspectors inspect.
struct Inspection {
  enum What : int { kKeys, kQueries, kEnd } what;
  int stage;
};

// What Shared has for the policy.
template <int kStages, int kSteps>
struct ListedSteps {
  ListedStep steps[kStages];  // the step of each stage of queries
  ListedStep added[kSteps];   // the last steps of the thread block, for the warp that adds dq
  Inspection inspections[kStages];
  ptx::Barrier arrived[kStages], inspected[kStages];
};

// The walk of the warps that count steps.
struct ListedWalk {
  static constexpr int h = 0, m = 0;  // those of a step are in ListedStep
  int left;                           // steps left, including this one

  __device__ __forceinline__ ListedWalk(const AttnGradParams&, const BackwardWork& work, int) : left(steps(work, 1)) {}
  static __device__ __forceinline__ int steps(const BackwardWork& work, int) { return uniform(work.tiles); }
  __device__ __forceinline__ void advance() { --left; }
};

// The loading warp's part of the state of BackwardLoader.
template <int kStages>
struct ListedLoads {
  RingPosition<kStages> inspections;
  bool inspects = false;  // whether the keys of the tile are inspected
  int step = 0;           // steps of this thread block so far
};

template <class Kernel>
struct ListedInspector {
  SharedOf<Kernel>& shared;
  const int warp;  // index among the inspectors
  RingPosition<Kernel::kStages> at;

  __device__ void inspect_all() {
    for (;; at.advance()) {
      auto& listed = shared.listed[0];
      ptx::barrier_wait(&listed.arrived[at.stage], at.parity);
      // Lane 0 alone reads the slot, because it also arrives for the warp when the slot may be written again.
      Inspection now{};
      if (lane() == 0) now = listed.inspections[at.stage];
      const int what = uniform(static_cast<int>(now.what)), stage = uniform(now.stage);
      if (what == Inspection::kEnd) return;
      const bool found = what == Inspection::kKeys ? inspect_keys(stage) : inspect_queries(stage);
      if (found) ptx::fence_async_shared();
      __syncwarp();
      if (lane() == 0) {
        // Both inspectors together arrive as often as the copies and the loading warp would.
        if (what == Inspection::kKeys) {
          ptx::barrier_arrive(&shared.k_full[stage]);
        } else {
          ptx::barrier_arrive(&shared.q_full[stage], warp == 0 ? kQueryArrivals<Kernel::Gradients::kCopies> - 1 : 1);
        }
        ptx::barrier_arrive(&listed.inspected[at.stage]);
      }
    }
  }

 private:
  // Keys that are not finite get values of NaN, which make their visible dS NaN.
  __device__ __forceinline__ bool inspect_keys(int stage) {
    return isolate_panel_rows<Kernel::Visibility::kInspectors>(shared.k[stage], warp, [&](int row, bool finite) {
      if (finite) return;
      constexpr uint32_t kNaN = ~0u;
#pragma unroll 1
      for (int i = 0; i < Kernel::kValuePanels * 8; ++i) {
        reinterpret_cast<uint4*>(shared.v[stage][i / 8][row])[i % 8] = make_uint4(kNaN, kNaN, kNaN, kNaN);
      }
    });
  }
  // Rows that are not finite get a log-sum-exp of NaN, which makes their visible weights NaN.
  __device__ __forceinline__ bool inspect_queries(int stage) {
    const auto poison = [&](int row, bool finite) {
      if (!finite) shared.lse[stage][row] = not_a_number();
    };
    bool found = isolate_panel_rows<Kernel::Visibility::kInspectors>(shared.q[stage], warp, poison);
    found |= isolate_panel_rows<Kernel::Visibility::kInspectors>(shared.dout[stage], warp, poison);
    return found;
  }
};

// The policy (backward_visibility.cuh).
struct BlockQueries : ArithmeticQueries {
  static constexpr bool kLists = true;
  template <int kStages>
  using Loads = ListedLoads<kStages>;
  static constexpr int kInspectors = 2;             // the last warps of the producer warpgroup
  static constexpr int kKeyArrivals = kInspectors;  // at k_full of a stage
  static constexpr int kCopiedArrivals = 2 + 32;    // at ListedSteps::arrived: two copies, and the loading warp

  template <int kMaskInspectors, class Shared>
  static __device__ __forceinline__ void init(Shared& shared) {
    for (ptx::Barrier& barrier : shared.listed[0].arrived) ptx::barrier_init(&barrier, kCopiedArrivals);
    for (ptx::Barrier& barrier : shared.listed[0].inspected) ptx::barrier_init(&barrier, kInspectors);
  }
  template <class Kernel, class Shared>
  static __device__ __forceinline__ void inspect(Shared& shared, const AttnGradParams&, int warp) {
    const int inspector = warp - (4 - kInspectors);
    if (inspector >= 0) ListedInspector<Kernel>{shared, inspector}.inspect_all();
  }

  // --- the loading warp. Loader: BackwardLoader --------------------------------------------------------------------

  // Sets work->tiles to the steps of the walk in all heads. rows: those that causal and window leave.
  template <class Loader>
  static __device__ __forceinline__ void count_steps(Loader& loader, const Limits& rows, BackwardWork* work) {
    work->first = work->tiles = 0;
    loader.lists.inspects = false;
    if (rows.begin >= rows.end || loader.p.heads_q == 0) return;
    const int heads = Loader::Heads::in_walk(loader.p), first = Loader::Heads::first(*work, heads);
    const bool own = has_lists_of_query_heads(loader.p);
    bool has_partial = false;
    int steps = 0;
#pragma unroll 1
    for (int h = first; h < first + (own ? heads : 1); ++h) {
      const BlockRun run = run_of(loader.p, *work, h, rows);
#pragma unroll 1
      for (int i = run.begin + lane(); i < run.end; i += 32) {
        const MaskBlock entry = run.at(i);
        const int tiles = tiles_of<Loader::kQueries>(*work, entry.block);
        steps += tiles;
        has_partial |= tiles > 0 && !entry.is_whole();
      }
    }
    steps = __reduce_add_sync(~0u, steps);
    work->tiles = own ? steps : steps * heads;
    loader.lists.inspects = __any_sync(~0u, has_partial) != 0;
  }

  template <class Loader>
  static __device__ __forceinline__ void load_tile(Loader& loader, const BackwardWork& work) {
    load_keys(loader, work);
    const AttnGradParams& p = loader.p;
    const int heads = Loader::Heads::in_walk(p), first = Loader::Heads::first(work, heads);
    const bool descends = p.deterministic;  // as in QueryWalk
#pragma unroll 1
    for (int h = first; h < first + heads; ++h) {
      const BlockRun run = run_of(p, work, h, queries_of_tile<BlockQueries, Loader::kKeys>(p, work, work.n));
#pragma unroll 1
      for (int i = 0; i < run.end - run.begin; ++i) {
        const MaskBlock entry = run.at(descends ? run.end - 1 - i : run.begin + i);
        const int tiles = tiles_of<Loader::kQueries>(work, entry.block);
        const int before = p.deterministic && tiles > 0 ? key_tiles_before(p, work, h, entry.block) : 0;
#pragma unroll 1
        for (int j = 0; j < tiles; ++j) {
          const int m = entry.block * kTilesOfBlock<Loader::kQueries> + (descends ? tiles - 1 - j : j);
          load_step(loader, work, {h, m, entry.bits, before});
        }
      }
    }
  }

  // Ends the inspectors.
  template <class Loader>
  static __device__ __forceinline__ void end(Loader& loader) {
    auto& listed = loader.shared.listed[0];
    const auto& at = loader.lists.inspections;
    ptx::barrier_wait(&listed.inspected[at.stage], at.parity ^ 1);
    if (lane() == 0) {
      listed.inspections[at.stage].what = Inspection::kEnd;
      ptx::barrier_arrive(&listed.arrived[at.stage], kCopiedArrivals - 32);
    }
    ptx::barrier_arrive(&listed.arrived[at.stage]);
  }

 private:
  // The blocks of rows that see the key tile in a query head. rows: those that causal and window leave.
  static __device__ __forceinline__ BlockRun run_of(const AttnParams& p, const BackwardWork& work, int h,
                                                    const Limits& rows) {
    const BlockRun run = HeadBlocks(p, work.b, h).of_keys(work.n);
    return is_bounded(p) ? clipped(run, rows.begin / kBlockSide, (rows.end - 1) / kBlockSide + 1) : run;
  }
  // How many query tiles with rows a block has. Nothing has checked its number.
  template <int kQueries>
  static __device__ __forceinline__ int tiles_of(const BackwardWork& work, int block) {
    constexpr int kTiles = kTilesOfBlock<kQueries>;
    const int all = (work.length_q + kQueries - 1) / kQueries;
    const bool exists = block >= 0 && block < (work.length_q + kBlockSide - 1) / kBlockSide;
    return exists ? min(kTiles, all - block * kTiles) : 0;
  }
  // How many key tiles add to the rows of a block before the tile of this walk, which they see: those of its run in the
  // other list that causal and window leave.
  static __device__ __forceinline__ int key_tiles_before(const AttnParams& p, const BackwardWork& work, int h,
                                                         int block) {
    const BlockRun run = HeadBlocks(p, work.b, h).of_rows(block);
    const int row = block * kBlockSide;
    const Limits keys = work.mask(p).keys_of(row, min(row + kBlockSide, work.length_q));
    const int first = is_bounded(p) ? run.first_from<32>(keys.begin / kBlockSide) : run.begin;
    return run.first_from<32>(work.n) - first;
  }

  // Waits for a free slot of the ring of inspections.
  template <class Loader>
  static __device__ __forceinline__ void await_slot(Loader& loader) {
    const auto& at = loader.lists.inspections;
    ptx::barrier_wait(&loader.shared.listed[0].inspected[at.stage], at.parity ^ 1);
  }

  template <class Loader>
  static __device__ __forceinline__ void load_keys(Loader& loader, const BackwardWork& work) {
    auto& shared = loader.shared;
    auto& listed = shared.listed[0];
    auto& at = loader.lists.inspections;
    const int stage = loader.keys.stage, slot = at.stage, key = work.key_start + work.key0;
    const bool inspects = loader.lists.inspects;
    ptx::barrier_wait(&shared.keys_empty[stage], loader.keys.parity ^ 1);
    if (inspects) await_slot(loader);
    if (lane() == 0) {
      load_panels(shared.k[stage], inspects ? listed.arrived[slot] : shared.k_full[stage], loader.maps.k, key, work.hk,
                  work.b);
      load_panels(shared.v[stage], inspects ? listed.arrived[slot] : shared.v_full[stage], loader.maps.v, key, work.hk,
                  work.b);
      if (inspects) listed.inspections[slot] = {Inspection::kKeys, stage};
      // In place of the copy, or of the inspectors. The warpgroups wait for the keys before they wait for the values.
      ptx::barrier_arrive(inspects ? &shared.v_full[stage] : &shared.k_full[stage]);
    }
    if (inspects) {
      ptx::barrier_arrive(&listed.arrived[slot]);
      at.advance();
    }
    loader.keys.advance();
  }

  template <class Loader>
  static __device__ __forceinline__ void load_step(Loader& loader, const BackwardWork& work, const ListedStep& step) {
    auto& shared = loader.shared;
    auto& listed = shared.listed[0];
    auto& at = loader.lists.inspections;
    const int stage = loader.queries.stage, slot = at.stage, row = step.m * Loader::kQueries;
    const bool inspects = step.bits != kWholeBlock;
    ptx::barrier_wait(&shared.queries_empty[stage], loader.queries.parity ^ 1);
    if (inspects) await_slot(loader);
    if (lane() == 0) {
      load_panels(shared.q[stage], inspects ? listed.arrived[slot] : shared.q_full[stage], loader.maps.q, row, step.h,
                  work.b);
      load_panels(shared.dout[stage], inspects ? listed.arrived[slot] : shared.dout_full[stage], loader.maps.dout, row,
                  step.h, work.b);
      if (inspects) {
        listed.inspections[slot] = {Inspection::kQueries, stage};
        ptx::barrier_arrive(&shared.dout_full[stage]);  // the warpgroups wait for the queries first
      }
      listed.steps[stage] = listed.added[loader.lists.step] = step;
    }
    loader.lists.step = (loader.lists.step + 1) % kStepsKept;
    using Packing = typename Loader::Packing;
    const Limits unmasked = Packing::unmasked_queries(loader.p, work.mask(loader.p), work.key0, Loader::kKeys);
    const bool hides = inspects || Packing::is_masked(unmasked, row);
    const bool has_mark = loader.load_statistics(work, step.h, step.m);
    publish_marks(shared.has_marks[stage], has_mark, hides ? kHiddenPairs : 0);
    ptx::barrier_arrive(inspects ? &listed.arrived[slot] : &shared.q_full[stage]);  // every lane, for its own writes
    if (inspects) at.advance();
    loader.queries.advance();
  }
};

}  // namespace flashattn_ext::sm90
