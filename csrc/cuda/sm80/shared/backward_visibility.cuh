// Policies of the sm_80 backward (backward.cuh) for visibility: which queries see a tile of keys. An object is of one
// tile of keys; every thread of a block calls its functions and the static ones. Kernel: Backward or Second.
//   Mask                     causal and window
//   Notes                    what a block keeps in shared memory for the tile of keys
//   some(rows), all(rows, length_q)
//                            those of `rows`, which causal and window leave, that see some key, or every key
//   note(...)                fills the Notes. first, last: tiles of queries of the walk
//   Walk                     over tiles of queries: all those of one head, then those of the group's next head
//     steps                  how many there are. If that is found out late, it is INT_MAX until `advance` finds the end
//     next(kernel, i)        the tile to load next, the i-th of the walk. One thread notes it
//     now(kernel, i)         the i-th tile, once a barrier has followed next(kernel, i); valid in the step of the tile
//     ends_head(tile)        whether a tile is the last one of its head
//     advance_ahead(kernel, i)
//                            moves to the next tile to load, which is the i-th
//     advance(kernel, i)     the same, and moves past the tile that has been computed
//   QueryTile                h, m: query head, number of the tile in its sequence; and what the policy knows of it
//   is_whole(tile)           whether the tile lies in no partial block of a BlockMask; what causal, the window and a
//                            Mask hide is in `all`
//   SeenBy<kKeyTiles, N>, seen_by<kKeyTiles, N>(kernel, tile, row, key)
//                            what a lane sees. row, key: the warp's first ones, within the sequence
//   isolate_keys(kernel), isolate_queries(kernel, tile)
//                            keep inputs that are not finite out of results that do not see them (isolation.cuh)
//   isolate_key_rows(kernel, rows), isolate_query_rows<kRows>(kernel, tile, rows)
//                            the same for one more tile of rows. isolate_key_rows is called only with a mask, once the
//                            rows are visible to all threads
//   added_before(kernel, tile), added_after(kernel, before)
//                            in a deterministic call: the counter of a query tile (tile_order.cuh) before and after
//                            this key tile adds to it
#pragma once

#include <climits>
#include <type_traits>

#include "cuda/score/block_mask.cuh"
#include "cuda/score/intervals.cuh"
#include "cuda/score/isolation.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/stages/tile_order.cuh"

namespace flashattn_ext::sm80 {

// Causal and window alone.
template <class Kernel>
struct ArithmeticQueries {
  using Mask = UnplacedMask32;
  struct Notes {};
  struct QueryTile {
    int h, m;
  };
  template <int kKeyTiles, int N>
  using SeenBy = flashattn_ext::SeenBy<kKeyTiles>;

  struct Walk {
    int last, steps;
    QueryTile computed, ahead;

    __device__ Walk(const Kernel& kernel, int first, int last) : last(last) {
      const int group = static_cast<int>(kernel.p.group_size());
      steps = (last + 1 - first) * group;
      computed = ahead = {kernel.hk * group, first};
    }
    static __device__ bool is_empty() { return false; }
    __device__ QueryTile next(const Kernel&, int) const { return ahead; }
    __device__ const QueryTile& now(const Kernel&, int) const { return computed; }
    __device__ bool ends_head(const QueryTile& tile) const { return tile.m == last; }
    __device__ void advance_ahead(const Kernel& kernel, int) { move(kernel, &ahead); }
    __device__ void advance(const Kernel& kernel, int) {
      move(kernel, &computed);
      move(kernel, &ahead);
    }

   private:
    __device__ void move(const Kernel& kernel, QueryTile* tile) const {
      if (++tile->m > last) *tile = {tile->h + 1, kernel.starts()->query_tile};
    }
  };

  __device__ ArithmeticQueries(const Kernel&, const Mask&, int, int, int) {}
  __device__ Limits some(const Limits& rows) const { return rows; }
  __device__ Limits all(const Limits& rows, int) const { return rows; }
  __device__ void note(const Kernel&, const Mask&, int, int, int) const {}

  static __device__ bool is_whole(const QueryTile&) { return true; }
  template <int kKeyTiles, int N>
  static __device__ SeenBy<kKeyTiles, N> seen_by(const Kernel& kernel, const QueryTile&, int row, int key) {
    return SeenBy<kKeyTiles, N>(kernel.mask(), row + 2 * lane_in_quad(), key + quad());
  }
  static __device__ void isolate_keys(const Kernel&) {}
  static __device__ void isolate_queries(const Kernel&, const QueryTile&) {}
  template <class T>
  static __device__ void isolate_key_rows(const Kernel&, T*) {}
  template <int kRows, class T>
  static __device__ void isolate_query_rows(const Kernel&, const QueryTile&, T*) {}
  static __device__ int added_before(const Kernel& kernel, const QueryTile& tile) {
    return key_tiles_before(kernel.mask(), kernel.n, Kernel::kKeys, tile.m * Kernel::kQueries, Kernel::kQueries);
  }
  static __device__ int added_after(const Kernel&, int before) { return before + 1; }
};

// Causal and window, and a Mask (intervals of rows for each key) or a BlockMask (lists of blocks).
template <class Kernel>
struct MaskQueries {
  using Mask = Mask32;
  struct alignas(16) QueryTile {
    int h, m;
    int bits;  // MaskBlock::bits of the block that it lies in
    int ends_head;
  };
  struct Notes {
    IntervalPairs pairs;
    EarlierKeyTile before;  // in a deterministic call with a Mask: the last key tile that adds to any tile of the walk
    Limits walk;            // tiles of queries that causal, window and a Mask leave; a BlockMask may hide some of them
    int end_head;           // after the last query head of the KV head
    QueryTile tiles[4];     // those of two stages that are computed or loaded
  };
  template <int kKeyTiles, int N>
  using SeenBy = SeenQueries<kKeyTiles, N>;

  // With a BlockMask the tiles of a head are counted along the run of entries of the key tile's block (TilesOfRun).
  struct Walk {
    int steps;
    int h, place, last;  // the tile that is loaded next: its head, its place, the last place of its head
    MaskBlock entry;     // that it lies in

    __device__ Walk(const Kernel& kernel, int first, int last)
        : steps(kernel.p.has_blocks() ? INT_MAX : (last + 1 - first) * static_cast<int>(kernel.p.group_size())) {
      start_head(kernel, kernel.hk * static_cast<int>(kernel.p.group_size()), 0);
    }
    __device__ bool is_empty() const { return steps == 0; }
    __device__ QueryTile next(const Kernel& kernel, int i) const {
      QueryTile tile{h, place, kWholeBlock, place == last};
      if (kernel.p.has_blocks()) {
        const Limits walk = notes(kernel).walk;
        const int m = entry.block * kTiles + place % kTiles;
        tile.m = min(max(m, walk.begin), walk.end - 1);  // whatever is in the list
        tile.bits = entry.bits;
      }
      if (threadIdx.x == 0) notes(kernel).tiles[i % 4] = tile;  // all threads have left the step of tile i - 4
      return tile;
    }
    __device__ const QueryTile& now(const Kernel& kernel, int i) const { return notes(kernel).tiles[i % 4]; }
    static __device__ bool ends_head(const QueryTile& tile) { return tile.ends_head; }
    __device__ void advance_ahead(const Kernel& kernel, int i) {
      if (place == last) return start_head(kernel, h + 1, i);
      ++place;
      if (kernel.p.has_blocks() && place % kTiles == 0) entry = run(kernel, h).at(place / kTiles);
    }
    __device__ void advance(const Kernel& kernel, int i) { advance_ahead(kernel, i); }

   private:
    static constexpr int kTiles = kTilesOfBlock<Kernel::kQueries>;

    static __device__ BlockRun run(const Kernel& kernel, int h) {
      return HeadBlocks(kernel.p, kernel.b, h).of_keys(block_of<Kernel::kKeys>(kernel.n));
    }
    // Moves to the first tile of head `head` or, with a BlockMask, of the next head that has one. i: its number.
    __device__ void start_head(const Kernel& kernel, int head, int i) {
      const Limits walk = notes(kernel).walk;
      h = head, place = walk.begin, last = walk.end - 1;
      if (!kernel.p.has_blocks()) return;
      for (; h < notes(kernel).end_head; ++h) {
        const TilesOfRun<Kernel::kQueries> tiles{run(kernel, h)};
        place = tiles.template first_from<32>(walk.begin), last = tiles.template first_from<32>(walk.end) - 1;
        if (place > last) continue;
        entry = tiles.run.at(place / kTiles);
        return;
      }
      last = place;  // the next move comes here again, and reads no list
      if (i < steps) steps = i;
    }
  };

  IntervalExtremes of_keys;

  __device__ MaskQueries(const Kernel& kernel, const Mask& mask, int key_start, int key0, int end)
      : of_keys(extremes(kernel, key_start, mask.seqlen_k).of_tile(key0, end)) {}
  __device__ Limits some(const Limits& rows) const { return clipped(rows, of_keys); }
  __device__ Limits all(const Limits& rows, int length_q) const { return clipped_to_all(rows, of_keys, length_q); }
  __device__ void note(const Kernel& kernel, const Mask& mask, int key_start, int first, int last) const {
    if (threadIdx.x == 0) {
      notes(kernel).pairs = IntervalPairs(kernel.p, kernel.b, kernel.hk, key_start);
      notes(kernel).walk = {first, last + 1};
      notes(kernel).end_head = (kernel.hk + 1) * static_cast<int>(kernel.p.group_size());
    }
    if (!kernel.p.deterministic || kernel.p.has_blocks() || threadIdx.x >= 32) return;
    const Limits walk{first * Kernel::kQueries, (last + 1) * Kernel::kQueries};
    const EarlierKeyTile found =
        key_tile_before<Kernel::kKeys>(extremes(kernel, key_start, mask.seqlen_k), mask, kernel.n, walk);
    if (threadIdx.x == 0) notes(kernel).before = found;
  }

  static __device__ bool is_whole(const QueryTile& tile) { return tile.bits == kWholeBlock; }
  template <int kKeyTiles, int N>
  static __device__ SeenBy<kKeyTiles, N> seen_by(const Kernel& kernel, const QueryTile& tile, int row, int key) {
    const IntervalMask mask(kernel.mask(), notes(kernel).pairs.head(tile.h));
    SeenBy<kKeyTiles, N> seen([&](int i, int r) {
      const Limits rows = rows_that_see(mask, key + quad() + 16 * i + 8 * r);
      return Limits{rows.begin - row - 2 * lane_in_quad(), rows.end - row - 2 * lane_in_quad()};
    });
    if (!is_whole(tile)) seen.keep(PartialBlock(kernel.p, tile.bits), row % kBlockSide, key % kBlockSide);
    return seen;
  }

  // Rows of partially masked tiles that are not finite become zeros. Their queries get a log-sum-exp of NaN, which
  // makes their unmasked weights NaN. Their keys get values of NaN, which make their unmasked dS NaN.
  static __device__ void isolate_keys(const Kernel& kernel) {
    if (!kernel.p.has_mask()) return;
    if (Kernel::kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    isolate_key_rows(kernel, kernel.k_tile);
  }
  static __device__ void isolate_queries(const Kernel& kernel, const QueryTile& tile) {
    // The tile of dout follows the tile of q.
    isolate_query_rows<2 * Kernel::kQueries>(kernel, tile, kernel.q_tile);
  }

  // Isolates one tile of keys; the next function kRows rows of queries from `rows` on.
  template <class T>
  static __device__ void isolate_key_rows(const Kernel& kernel, T* rows) {
    using RowTile = typename Kernel::RowTile;
    isolate_rows<RowTile, Kernel::kKeys, Kernel::kThreads>(rows, [&](int row, bool finite) {
      uint4* const values = reinterpret_cast<uint4*>(kernel.v_tile + row * RowTile::kStride);
#pragma unroll 1
      for (int i = 0; !finite && i < Kernel::kHeadDim * Kernel::kBytes / kVectorBytes; ++i) {
        values[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
      }
    });
  }
  template <int kRows, class T>
  static __device__ void isolate_query_rows(const Kernel& kernel, const QueryTile& tile, T* rows) {
    if (!kernel.p.has_mask()) return;
    const auto* const extent = kernel.extent();
    const int row0 = tile.m * Kernel::kQueries;
    const bool unmasked = row0 >= extent->unmasked_begin && row0 + Kernel::kQueries <= extent->unmasked_end;
    if (unmasked && is_whole(tile)) return;
    isolate_rows<typename Kernel::RowTile, kRows, Kernel::kThreads>(rows, [&](int row, bool finite) {
      if (!finite) kernel.lse[row % Kernel::kQueries] = not_a_number();
    });
  }
  static __device__ int added_before(const Kernel& kernel, const QueryTile& tile) {
    const Limits rows{tile.m * Kernel::kQueries, (tile.m + 1) * Kernel::kQueries};
    if (kernel.p.has_blocks()) return blocks_added_before(kernel, tile, rows);
    const KeyExtremes all = extremes(kernel, kernel.starts()->key, kernel.extent()->length_k);
    return key_tile_before<Kernel::kKeys>(all, kernel.mask(), notes(kernel).before, rows) + 1;
  }
  static __device__ int added_after(const Kernel& kernel, int before) {
    return kernel.p.has_blocks() ? before + 1 : kernel.n + 1;
  }

 private:
  static __device__ Notes& notes(const Kernel& kernel) { return kernel.notes()->visibility; }
  // The extremes for all query heads that read the KV head.
  static __device__ KeyExtremes extremes(const Kernel& kernel, int key_start, int length_k) {
    const int group = static_cast<int>(kernel.p.group_size());
    return KeyExtremes(kernel.p, kernel.b, kernel.hk * group, group, key_start, length_k);
  }
  // How many key tiles add before this one: those of the blocks that the rows see, from the first that causal and
  // window leave on.
  static __device__ int blocks_added_before(const Kernel& kernel, const QueryTile& tile, const Limits& rows) {
    const HeadBlocks blocks(kernel.p, kernel.b, tile.h);
    const TilesOfRun<Kernel::kKeys> tiles{blocks.of_rows(block_of<Kernel::kQueries>(tile.m))};
    const int first = kernel.mask().keys_of(rows.begin, min(rows.end, kernel.extent()->length_q)).begin;
    return tiles.template first_from<32>(kernel.n) - tiles.template first_from<32>(first / Kernel::kKeys);
  }
};

template <class Kernel, bool kHasMask>
using QueriesOf = std::conditional_t<kHasMask, MaskQueries<Kernel>, ArithmeticQueries<Kernel>>;

}  // namespace flashattn_ext::sm80
