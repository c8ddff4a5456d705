// The order in which the tiles of a call are computed, and in which key tiles add to dq.
#pragma once

#include <algorithm>

#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/ptx/memory.cuh"

namespace flashattn_ext {

// Tiles are numbered section by section. A section is a set of heads (of all batch entries) whose data stay in the L2
// cache together. In a section the first tiles of all heads come before the second ones. The last tiles of every head
// may be left for the end: there all heads are one section.
struct TileOrder {
  int blocks;    // tiles of a sequence, as far as the host knows
  int section;   // heads of a section
  int last = 0;  // tiles of each head that come at the end

  struct Index {
    int head, block;
  };
  __device__ __forceinline__ Index index(int tile, int heads) const {
    const int sectioned = blocks - last;
    const bool at_end = tile >= sectioned * heads;
    if (at_end) tile -= sectioned * heads;
    const int size = at_end ? heads : section, section_tiles = size * (at_end ? last : sectioned);
    const int first = tile / section_tiles * size, rest = tile % section_tiles;
    const int section_heads = min(size, heads - first);
    return {first + rest % section_heads, (at_end ? sectioned : 0) + rest / section_heads};
  }
};

// The tile scheduler of persistent kernels: thread blocks take tiles one after another, and a block that is done early
// takes more.
struct TileGrid : TileOrder {
  int tiles;  // tiles of the whole call
  // How many tiles thread blocks have taken, beyond the first of each unless `take` says otherwise; in global memory.
  // nullptr, for `next` only and for kernels that take tiles in turn: every thread block has the same number of tiles,
  // or one less.
  int* taken;

  // The next tile for one of `takers`, thread blocks or pairs of them that have the first tiles (0: none has one);
  // `tiles` or more when there is none left.
  __device__ int take(int takers) const { return tiles > takers ? takers + atomicAdd(taken, 1) : tiles; }
  __device__ int take() const { return take(static_cast<int>(gridDim.x)); }
  // The next tile for a thread block whose last tile was `tile`. Without a counter, the second of two rounds begins
  // with the block that has had the last tile, which is the shortest. In more rounds a block moves on by one place in
  // each: otherwise, where the tiles of a head divide the thread blocks, some blocks would have all of the tiles that
  // end a head, which may have fewer rows.
  __device__ int next(int tile) const {
    if (taken) return take();
    const int blocks = static_cast<int>(gridDim.x), round = tile / blocks + 1;
    if (round == 1 && tiles <= 2 * blocks) return 2 * blocks - 1 - tile;
    return round * blocks + (static_cast<int>(blockIdx.x) + round) % blocks;
  }
};

// The largest section of at most `most` heads, and not much less than half as many, that divides the heads nearly
// evenly. A last section of a few heads would begin with their long tiles when no short ones are left to fill the gaps.
inline int64_t even_section(int64_t heads, int64_t most) {
  int64_t best = 1, best_last = 0;
  for (int64_t limit = most; 2 * limit >= most && limit > 0 && 8 * best_last < 7 * best;) {
    const int64_t sections = (heads + limit - 1) / limit, section = (heads + sections - 1) / sections;
    const int64_t last = (heads - 1) % section + 1;
    if (last * best > best_last * section) {
      best = section;
      best_last = last;
    }
    limit = section - 1;
  }
  return best;
}

// Heads of a section. With a right bound or a Mask some tiles are longer than others: if the long tiles of all heads of
// a section start first, short ones are left for the end and fill the gaps. Without either this function returns one
// head. A BlockMask is no reason for more heads: its tiles may have any length at any place of a head, and read any of
// the head's data. With a right bound beside it, sections have the heads that the cache holds, whatever `at_least` is.
inline int section_heads(const AttnParams& p, int64_t heads, int64_t head_bytes, int64_t at_least = 1) {
  constexpr int64_t kCacheBytes = 32 << 20;
  if (p.window_right == kUnbounded && !p.has_intervals()) return 1;
  if (p.has_blocks()) at_least = 1;
  const int64_t most = std::max(kCacheBytes / std::max<int64_t>(1, head_bytes), at_least);
  return static_cast<int>(even_section(std::max<int64_t>(1, heads), std::max<int64_t>(1, most)));
}

// TileOrder::last. Where the tiles of a head become ever shorter, as those of a causal call with about as many keys as
// queries, thread blocks end up to the longest tile apart, by half of it on average: blocks / 2, in units of the
// shortest tile. last^2 / 2 is the work of the last tiles of a head; at most `quarters` quarters of the work that fills
// these gaps are left for the end. The last tiles read the data of all heads from memory once more: the more tiles are
// left, the sooner this costs more than the idle time that it saves (lab/logs/sm90_backward.md).
inline int last_tiles(const AttnParams& p, int64_t blocks, int64_t heads, int64_t quarters) {
  const bool shrink = p.window_right != kUnbounded && p.window_left == kUnbounded && !p.has_mask() &&
                      4 * (p.seqlen_k - p.seqlen_q + std::min(p.window_right, p.seqlen_k)) <= p.seqlen_k;
  int64_t last = 0;
  while (shrink && last < blocks && 4 * (last + 1) * (last + 1) * heads <= quarters * blocks * multiprocessors()) {
    ++last;
  }
  return static_cast<int>(last);
}

// The order of a forward call, whose keys and values are to stay in the cache. With a Mask tiles may be long anywhere
// in a head: then a section has so many heads that enough of its short tiles are left for the end, and neighbouring
// tiles of a head still read the same keys at about the same time. Heads of fewer than 10 tiles leave none for the end;
// others leave more of them where a multiprocessor has fewer than 10 tiles in all.
inline TileOrder forward_order(const AttnParams& p, int64_t blocks, int64_t element_bytes, int64_t at_least = 1) {
  const int64_t head_bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * element_bytes / p.group_size();
  const int64_t heads = p.batch * p.heads_q;
  const int64_t quarters = blocks < 10 ? 0 : blocks * heads < 10 * multiprocessors() ? 8 : 3;
  if (p.has_intervals()) at_least = std::max<int64_t>(at_least, 16);
  return {static_cast<int>(blocks), section_heads(p, heads, head_bytes, at_least),
          last_tiles(p, blocks, heads, quarters)};
}

// The order of a backward call, whose queries, output gradients and sums of dq are to stay in the cache. at_once: how
// many key tiles are computed at a time; at_least: about how many heads a section has at least, if it leaves no tiles
// for the end; 0: as many as have at_once tiles. Figures are in lab/logs/sm90_backward.md.
// In a deterministic call key tiles of a head add to dq one after the other, so that consecutive tiles belong to
// different heads. A section has at least as many tiles as are computed at a time, and up to twice as many where the
// data of its heads fit kDeterministicBytes. With a right bound or a Mask it has about 2 * at_least heads or more.
// Other calls may leave tiles for the end, kernels with an `at_least` of 0 or 1 only from 64 tiles in a head on. Their
// sections then have a quarter of the bytes, and with grouped heads at least four KV heads. Grouped heads leave half as
// many tiles, because each KV head reads the data of its whole group once more.
inline TileOrder backward_order(const AttnGradParams& p, int64_t blocks, int64_t element_bytes, int64_t at_once,
                                int64_t at_least = 0) {
  constexpr int64_t kDeterministicBytes = 24 << 20;
  const int64_t head_bytes = group_bytes(p, element_bytes), heads = p.batch * p.heads_k;
  const bool grouped = p.group_size() > 1, names_heads = at_least > 1;  // whether the kernel has a number of heads
  // A section of fewer tiles than are computed at a time would leave the long tiles of the next one without short tiles
  // beside them: on an H200 2 x 4096 causal with 32:8 heads took 1.41 times the time at D = 64, at D = 128 1.2 times.
  if (at_least == 0) at_least = p.deterministic ? 1 : std::max<int64_t>(1, (at_once + blocks / 2) / blocks);
  int64_t section = section_heads(p, heads, head_bytes, p.deterministic && names_heads ? 2 * at_least : at_least);
  int last = 0;
  if (p.deterministic) {
    const int64_t apart = tile_count(at_once, blocks), cached = kDeterministicBytes / std::max<int64_t>(1, head_bytes);
    section = std::max(section, std::min(heads, std::max(apart, std::min(2 * apart, cached))));
  } else if (names_heads || blocks >= 64) {
    last = last_tiles(p, blocks, heads, 2) / (grouped ? 2 : 1);
    if (last > 0) section = section_heads(p, heads, 4 * head_bytes, grouped ? 4 : 1);
  }
  return {static_cast<int>(blocks), static_cast<int>(section), last};
}

// --- additions to dq -----------------------------------------------------------------------------------------------
//
// The order of additions to dq in a deterministic call: key tiles add to a tile of queries in ascending order. A
// counter in the workspace (BackwardWorkspace::dq_added) says how many have added. In kernels that can read a Mask it
// says instead which one has added last (its number plus 1, or 0 before the first), unless the call has a BlockMask.

// How many key tiles of `keys` keys add before key tile n to the `queries` queries from row0 on.
template <class Mask>
__device__ __forceinline__ int key_tiles_before(const Mask& mask, int n, int keys, int row0, int queries) {
  return n - mask.keys_of(row0, min(row0 + queries, mask.seqlen_q)).begin / keys;
}

// One key tile's place in that order, for the threads that add together. before(): the value of the counter at which
// this key tile may add. after(): its value once the tile has added. sync(): a barrier of these threads. One of them,
// the leader, reads and writes the counter.
template <class Before, class After, class Sync>
struct DqOrder {
  int* added;
  bool leader;
  Before before;
  After after;
  Sync sync;

  __device__ __forceinline__ void await_earlier_keys() const {
    if (leader) {
      const int wanted = before();
      while (ptx::load_acquire(added) != wanted) __nanosleep(64);
    }
    sync();
  }
  // Whether that wait would end at once. The leader calls it.
  __device__ __forceinline__ bool earlier_keys_have_added() const { return ptx::load_acquire(added) == before(); }
  // The leader's store releases the additions of all these threads, which the barrier orders before it.
  __device__ __forceinline__ void admit_later_keys() const {
    sync();
    if (leader) ptx::store_release(added, after());
  }
};
template <class Before, class After, class Sync>
DqOrder(int*, bool, Before, After, Sync) -> DqOrder<Before, After, Sync>;

}  // namespace flashattn_ext
