// How dq leaves a thread block of backward.cuh. A warpgroup writes its part of dq of a step from registers to shared
// memory and goes on. One warp of the producer warpgroup adds it to the workspace, 4 KB with one instruction. In a
// deterministic call only this warp waits for the order of key tiles (tile_order.cuh).
#pragma once

#include "cuda/ptx/async.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/stages/tile_order.cuh"

namespace flashattn_ext::sm90 {

// A warpgroup's part of dq in a step, by warp, in the layout of the workspace (DqLayout).
template <int kTiles>
using DqPart = float[4][kTiles][128];

// Threads at kDqFull and kDqEmpty (tiles.h), one of each for each warpgroup. The warpgroup and the adder take
// part in both; the one that does not have to wait only arrives.
constexpr int kDqThreads = kGroupThreads + 32;

// Writes a warpgroup's part of dq to shared memory, after the adder has read the part of the step before. The part may
// have room for more columns than dq.
template <int kTiles, int kPartTiles>
__device__ __forceinline__ void stage_dq(float (&part)[4][kPartTiles][128], const float (&dq)[kTiles][4], int group) {
  static_assert(kTiles <= kPartTiles);
  float (&own)[kPartTiles][128] = part[threadIdx.x / 32 % 4];
  ptx::named_barrier_sync(kDqEmpty + group, kDqThreads);
#pragma unroll
  for (int c = 0; c < kTiles; ++c) ptx::store_fragment(own[c], dq[c]);
}
// Signals the adder. The fence waits until all writes are complete.
__device__ __forceinline__ void pass_dq(int group) {
  ptx::fence_async_shared();
  ptx::named_barrier_arrive(kDqFull + group, kDqThreads);
}

// The adder warp; its first lane issues the additions. The warpgroups pass it their parts half a step apart
// (ping-pong), or a third warpgroup passes both in turn (backward_apart.cuh). In a deterministic call the warp
// waits for the order before a step, and after it for the end of the additions: once for both parts, because each wait
// takes more than a third of a step.
template <class Kernel>
struct DqAdder {
  static constexpr int kQueries = Kernel::kQueries, kKeys = Kernel::kKeys;

  SharedOf<Kernel>& shared;
  const AttnGradParams& p;
  const BackwardWorkspace& workspace;
  RingPosition<Kernel::kWorkStages> works;
  int step = 0;  // steps of this thread block so far

  // The warp is one of several in kernels with a bias (backward_bias.cuh), which use the last two arguments.
  template <class Maps>
  __device__ DqAdder(SharedOf<Kernel>& shared, const AttnGradParams& p, const BackwardWorkspace& workspace, const Maps&,
                     int)
      : shared(shared), p(p), workspace(workspace) {}

  __device__ void add_tiles() {
    for (int part = 0; part < Kernel::kDqParts; ++part) ptx::named_barrier_arrive(kDqEmpty + part, kDqThreads);
    for_each_work(shared, works, [&](const BackwardWork& work) {
      if (uniform(work.tiles) > 0) add_tile(work);
      release(shared.work_empty[works.stage]);
    });
    ptx::bulk_wait<0>();  // pending additions read this thread block's shared memory
  }

 protected:
  using Walk = typename Kernel::Walk;

  __device__ __forceinline__ void add_tile(const BackwardWork& work) {
    if constexpr (Kernel::kLateDq) {  // on the first step of a key tile the buffers hold no dq yet
      pass(work, nullptr, 0);
      pass(work, nullptr, 1);
    }
    if constexpr (Kernel::Visibility::kLists) return add_listed_steps(work);
    bool may_add = false;  // whether the order is known to have come to this step
    for (Walk now(p, work, Kernel::Heads::in_walk(p)); now.left > 0; now.advance(), ++step) {
      if (p.deterministic && leads()) await_earlier_keys(work, now, may_add);
      __syncwarp();
      pass(work, &now, 0);
      if (Kernel::Layout::kPartsOverlap && p.deterministic && leads()) ptx::bulk_wait<0>();
      pass(work, &now, 1);
      if (p.deterministic && leads()) {
        may_add = may_add_next(work, now);
        admit_later_keys(work, now);
      }
      __syncwarp();
    }
  }

  // With a BlockMask (backward_blocks.cuh) it is known which step a part belongs to once the part has come. The warp
  // waits for the order then.
  __device__ __forceinline__ void add_listed_steps(const BackwardWork& work) {
    for (int left = uniform(work.tiles); left > 0; --left, step = (step + 1) % kStepsKept) {
      const auto& now = shared.listed[0].added[step];
#pragma unroll 1
      for (int group = 0; group < 2; ++group) {
        ptx::named_barrier_sync(kDqFull + group, kDqThreads);
        if (leads()) {
          if (group == 0 && p.deterministic) listed_order(work, now).await_earlier_keys();
          if (group == 0 && p.deterministic) ptx::fence_async_global();
          start(work, now, group);
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        __syncwarp();
        ptx::named_barrier_arrive(kDqEmpty + group, kDqThreads);
      }
      if (leads() && p.deterministic) {
        ptx::bulk_wait<0>();
        listed_order(work, now).admit_later_keys();
      }
      __syncwarp();
    }
  }
  template <class Step>
  __device__ __forceinline__ auto listed_order(const BackwardWork& work, const Step& now) const {
    return DqOrder{workspace.dq_added + tile(work, now), true, [&] { return now.before; },
                   [&] { return now.before + 1; }, [] {}};
  }

  // Waits for a warpgroup's part, starts adding it, and waits until it has been read and may be overwritten, which
  // takes much less than half a step. now: the step of that part; null if the buffer holds no dq yet.
  __device__ __forceinline__ void pass(const BackwardWork& work, const Walk* now, int group) {
    ptx::named_barrier_sync(kDqFull + group, kDqThreads);
    if (leads()) {
      if (now) start(work, *now, group);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    __syncwarp();
    // With one buffer for both warpgroups (ping-pong), the other one may write next.
    const int next = Kernel::kDqParts == 1 ? 1 - group : group;
    ptx::named_barrier_arrive(kDqEmpty + next, kDqThreads);
  }
  static __device__ __forceinline__ bool leads() { return threadIdx.x % 32 == 0; }

  // The first tile of a step in the workspace's dq. now: has a query head h and the number m of a query tile.
  template <class Step>
  __device__ __forceinline__ int64_t tile(const BackwardWork& work, const Step& now) const {
    return now.h * workspace.tiles + work.dq_tile + now.m * (kQueries / Kernel::Layout::kTileRows);
  }
  template <class Step>
  __device__ __forceinline__ void start(const BackwardWork& work, const Step& now, int group) const {
    const int64_t first = tile(work, now);
    float* const to = Kernel::Layout::fragment(workspace, first, group * 4, 0);
    const int rows = work.length_q - now.m * kQueries - Kernel::Layout::row(group * 4);
    constexpr int kTileRows = Kernel::Layout::kTileRows;
    // With 64 queries a step the second warpgroup has the columns from 64 on; of three panels, each has half of the
    // last.
    constexpr int kSharedTiles = Kernel::kDqTiles - 8;
    constexpr bool kSharesPanel = kSharedTiles > 0;
    constexpr int kSecondColumns =
        kQueries == 128 || kSharesPanel || Kernel::Layout::kPartsOverlap ? 64 : Kernel::kColumns - 64;
    auto& part = shared.part_of(group);
    const int bytes = kTileRows * 4 * (group == 0 ? 64 : kSecondColumns);
#pragma unroll 1
    for (int warp = 0; warp < 4; ++warp) {
      if (warp * kTileRows >= rows) break;  // rows after the last of the sequence have no tile in the workspace
      ptx::bulk_add(to + warp * Kernel::Layout::kTileFloats, part[warp][0], bytes);
      if constexpr (kSharesPanel) {
        float* const half = Kernel::Layout::fragment(workspace, first, 0, 16 + kSharedTiles * group);
        ptx::bulk_add(half + warp * Kernel::Layout::kTileFloats, part[warp][8], kTileRows * 4 * 8 * kSharedTiles);
      }
    }
  }

  template <class Step>
  __device__ __forceinline__ auto order(const BackwardWork& work, const Step& now, int ahead = 0) const {
    return DqOrder{
        workspace.dq_added + tile(work, now), true,
        [&, ahead] {
          return Kernel::Visibility::template added_before<kKeys, kQueries>(p, shared, work, now.m, step + ahead);
        },
        [&] { return Kernel::Visibility::template added_after<kKeys, kQueries>(p, shared, work, now.m, step); }, [] {}};
  }
  template <class Step>
  __device__ __forceinline__ void await_earlier_keys(const BackwardWork& work, const Step& now,
                                                     bool may_add = false) const {
    if (!may_add) order(work, now).await_earlier_keys();
    ptx::fence_async_global();
  }
  // Whether the order has already come to the step after `now`: the counter is read while the additions of `now` are
  // under way, and a wait for it would come after them. Only with short steps: with 128 queries a step the warp has
  // time for that wait. With a Mask the values of the counter are known one step ahead where dq of a step is computed
  // in the next one.
  __device__ __forceinline__ bool may_add_next(const BackwardWork& work, const Walk& now) const {
    constexpr bool kReadsAhead = kQueries <= 64 && (!Kernel::Visibility::kHasIntervals || Kernel::kLateDq);
    if (!kReadsAhead || now.left <= 1) return false;
    Walk next = now;
    next.advance();
    return order(work, next, 1).earlier_keys_have_added();
  }
  template <class Step>
  __device__ __forceinline__ void admit_later_keys(const BackwardWork& work, const Step& now) const {
    ptx::bulk_wait<0>();
    order(work, now).admit_later_keys();
  }
};

}  // namespace flashattn_ext::sm90
