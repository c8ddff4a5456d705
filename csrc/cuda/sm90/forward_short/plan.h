// How the forward of short sequences on Hopper divides a call into thread blocks, and the shared memory that it needs.
// Host code, which choose.h reads too.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/host/call.h"
#include "cuda/host/unit_plan.h"
#include "cuda/table/rows.h"
#include "params.h"

namespace flashattn_ext::sm90 {

constexpr int kShortRows = 64;     // rows of a unit: queries of one query head, as many as a warpgroup multiplies
constexpr int kMostBoxRows = 256;  // rows of a TMA copy, which loads all keys

// A thread block has one warpgroup, which computes its units, of kShortRows each, one after another.
struct ShortForwardPlan : UnitPlan {
  // A thread block loads all keys of its KV head, in a quarter of the time of a unit. The share is the one with which
  // the multiprocessors need the least time for all thread blocks, as many at once as are resident. columns: the class
  // of head dims.
  static ShortForwardPlan of(const AttnParams& p, const ShortForwardTile& tile, int columns, int multiprocessors) {
    constexpr int kUnitTime = 4, kLoadTime = 1, kMostShare = 16;
    constexpr int64_t kMultiprocessorBytes = 228 << 10, kReservedBytes = 1 << 10;  // of shared memory; of each block
    const int keys = static_cast<int>(tile_count(std::max<int64_t>(p.seqlen_k, 1), kLeastKeys)) * kLeastKeys;
    const int units = static_cast<int>(tile_count(p.seqlen_q, kShortRows)), group = static_cast<int>(p.group_size());
    const int all = units * group;
    const int64_t fit = kMultiprocessorBytes / (block_bytes(keys, columns) + kReservedBytes);
    const int64_t resident = std::min<int64_t>(tile.blocks, fit) * multiprocessors;
    int parts = all;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int share = 1; share <= std::min(all, kMostShare); ++share) {
      const int64_t blocks = p.batch * p.heads_k * tile_count(all, share);
      const int64_t time = tile_count(blocks, resident) * (share * kUnitTime + kLoadTime);
      if (time >= least) continue;
      least = time;
      parts = static_cast<int>(tile_count(all, share));
    }
    return {{parts, static_cast<int>(tile_count(all, parts)), units, group, keys}};
  }
  // Barriers take the last bytes, behind the tiles of 16-bit elements.
  static int64_t block_bytes(int keys, int columns) {
    return int64_t{2 * keys + kShortRows} * columns * 2 + kBarrierBytes;
  }
  int64_t shared_bytes(int columns) const { return block_bytes(keys, columns); }

  static constexpr int kLeastKeys = 32;  // keys of a step
  static constexpr int kBarrierBytes = 32;
};

}  // namespace flashattn_ext::sm90
