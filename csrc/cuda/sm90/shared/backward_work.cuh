// What a thread block of the Hopper backward works on: the description of a key tile, the walk over its query tiles,
// and the layout of dq in the workspace.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/score/intervals.cuh"
#include "cuda/sm90/shared/pair.cuh"
#include "cuda/sm90/shared/products.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/stages/backward_workspace.h"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};
// The maps of calls with a 16-bit bias. dbias is unused unless its gradient is wanted.
struct BiasedBackwardMaps : BackwardMaps {
  CUtensorMap bias, dbias;
};

// The layout of dq in the workspace, which backward_finish.cuh reads: tiles of 16 rows, the rows of one warp, so that
// short sequences take little memory. With 128 keys a warpgroup computes 64 rows and 64 columns of a step. The two
// warpgroups of a thread block compute different rows when a step has 128 queries; otherwise they compute different
// columns, and half of the third panel each. With 64 keys one warpgroup computes all columns. Columns beyond the
// class of head dims are not stored.
template <class T, int kHeadDimension, int kStepQueries, bool kWide>
struct DqLayout {
  using Element = T;
  static constexpr bool kPartsOverlap = false;  // whether both warpgroups add to the same elements
  static constexpr int kQueries = kStepQueries, kTileRows = 16;
  static constexpr int kParts = kWide ? 1 : 2, kThreads = kParts * kGroupThreads, kSplits = 1;
  static constexpr int kHeadDim = kHeadDimension;
  // Columns of a warp in dq_finish_kernel.
  static constexpr int kPartColumns = !kWide && kQueries == 64 ? kHeadDim / 2 : kHeadDim;
  static constexpr int kStride = kTileStride<T, kHeadDim>;
  static constexpr int kQueryRowTiles = 1, kQueryColumnTiles = kPartColumns / 8;
  static constexpr int64_t kTileFloats = kTileRows * kHeadDim;

  // First row and column of the part of a warp that computes dq.
  static __device__ __forceinline__ int row(int warp) { return (kQueries == 64 ? warp % 4 : warp) * 16; }
  static __device__ __forceinline__ int column(int warp) { return kQueries == 64 ? warp / 4 * 64 : 0; }
  // The address where accumulator tile c of that part is summed. tile: the first tile of the step.
  static __device__ __forceinline__ float* fragment(const BackwardWorkspace& workspace, int64_t tile, int warp, int c) {
    return at(workspace, tile, row(warp), column(warp) / 8 + c);
  }

  // The part of this warp in dq_finish_kernel, whose thread blocks have these warps only.
  static __device__ int query_row() { return row(threadIdx.x / 32); }
  static __device__ int query_column(int) {
    const int warp = threadIdx.x / 32;
    return kQueries == 64 ? warp / 4 * kPartColumns : 0;
  }
  static __device__ float* dq_fragment(const BackwardWorkspace& workspace, int64_t tile, int, int, int c) {
    return at(workspace, tile, query_row(), query_column(0) / 8 + c);
  }

 private:
  static __device__ __forceinline__ float* at(const BackwardWorkspace& workspace, int64_t tile, int row,
                                              int column_tile) {
    return workspace.dq + (tile + row / 16) * kTileFloats + column_tile * 128;
  }
};

// One tile of keys, as the producer warp describes it to the warpgroups. They read the description from shared memory
// until the tile is done, because registers are scarce. Numbers count from the start of a sequence.
struct alignas(16) BackwardWork {
  int b, hk, n, key0;  // n: number of the key tile, key0: its first key; no key tile ends the kernel
  // Query tiles that see it, the same in every head of the group: the first, and how many. With a BlockMask 0, and how
  // many in all heads of the walk.
  int first, tiles;
  int key_start, length_q, length_k;  // the sequence's; key_start in the rows of its batch entry
  int dq_tile;                        // first tile of the sequence in the workspace's dq
  int descends;  // in a deterministic call with a Mask: whether the key tiles of the head add in descending order
  int hq;        // with QueryHeads the query head of the walk (backward_policies.cuh)

  __device__ __forceinline__ bool exists() const { return key0 < length_k; }
  __device__ __forceinline__ Mask32 mask(const AttnParams& p) const { return Mask32(p, length_q, length_k); }
};

// The description in kernels that can read a Mask.
struct MaskedBackwardWork : BackwardWork {
  Limits unmasked[2];   // queries that see all of the first 64 keys, and of the second
  Limits whole;         // queries for which the Mask hides no key of the tile; causal and window may
  IntervalPairs pairs;  // intervals of the sequence
};

// How many steps of a thread block are described at a time for the warp that adds dq, with a Mask or a BlockMask.
constexpr int kStepsKept = 8;  // more than the stages of queries plus the two steps by which dq may lag

__device__ __forceinline__ KeyExtremes key_extremes(const AttnParams& p, const BackwardWork& work) {
  const int group = static_cast<int>(p.group_size());
  // Recomputed for each key tile rather than kept in registers.
  return KeyExtremes(p, ptx::opaque(work.b), work.hk * group, group, work.key_start, work.length_k);
}

// The mask of a key tile in a query head.
__device__ __forceinline__ Mask32 visible(const AttnParams& p, const BackwardWork& work, int) { return work.mask(p); }
__device__ __forceinline__ IntervalMask visible(const AttnParams& p, const MaskedBackwardWork& work, int h) {
  return IntervalMask(work.mask(p), work.pairs.head(h));
}

// The description at a ring position, once the producer warp has published it; nullptr at the end of the kernel.
template <class Shared, class Position>
__device__ __forceinline__ const auto* receive_work(Shared& shared, const Position& at) {
  ptx::barrier_wait(&shared.work_full[at.stage], at.parity);
  const auto* const work = &shared.work[at.stage];
  return uniform(work->exists()) ? work : nullptr;
}
// Calls `body` with each description that the producer warp publishes, until the end of the kernel.
template <class Shared, class Position, class Body>
__device__ __forceinline__ void for_each_work(Shared& shared, Position& works, const Body& body) {
  for (;; works.advance()) {
    ptx::barrier_wait(&shared.work_full[works.stage], works.parity);
    const auto& work = shared.work[works.stage];
    if (!uniform(work.exists())) return;
    body(work);
  }
}

struct ArithmeticQueries;  // backward_visibility.cuh
struct WholeGroups;        // backward_policies.cuh

// The loop over the query tiles of a key tile: all tiles of one head, then all tiles of the next head of the walk.
// kMayDescend: in a deterministic call the tiles of a head come in descending order, unless the key tiles do. Key tiles
// add to a query tile in ascending order, and all causal key tiles of a head see its last query tiles. Thread blocks
// that start at those tiles at the same time follow each other closely. A thread block that started at the diagonal
// would wait there for all earlier key tiles, which start at earlier queries.
template <bool kMayDescend, class Visibility = ArithmeticQueries, class Heads = WholeGroups>
struct QueryWalk {
  const AttnGradParams& p;
  int h, m;         // current query head, current tile in its sequence
  int start, last;  // first and last tile of a head
  int left;         // steps left, including this one

  __device__ __forceinline__ QueryWalk(const AttnGradParams& p, const BackwardWork& work, int heads)
      : p(p), h(Heads::first(work, heads)) {
    const int first = uniform(work.first), tiles = uniform(work.tiles);
    const bool descending = kMayDescend && ptx::opaque(p.deterministic) != 0 && !Visibility::key_tiles_descend(work);
    start = descending ? first + tiles - 1 : first;
    last = descending ? first : first + tiles - 1;
    m = start;
    left = tiles * heads;
  }
  // Returns the number of steps of a walk over this many heads.
  static __device__ __forceinline__ int steps(const BackwardWork& work, int heads) {
    return uniform(work.tiles) * heads;
  }
  __device__ __forceinline__ bool ends_head() const { return m == last; }
  __device__ __forceinline__ void advance() {
    --left;
    if (ends_head()) {
      m = start;
      ++h;
    } else {
      m += descends() ? -1 : 1;
    }
  }

 private:
  // Recomputed rather than kept in a register.
  __device__ __forceinline__ bool descends() const {
    return kMayDescend && (Visibility::kHasIntervals ? start > last : ptx::opaque(p.deterministic) != 0);
  }
};

}  // namespace flashattn_ext::sm90
