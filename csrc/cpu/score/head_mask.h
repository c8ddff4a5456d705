// Visibility of the keys of one sequence for the rows of one head: the BasicMask of the call with the intervals of its
// Mask (both in mask.h) or the blocks of its BlockMask (block_visibility.h), tile by tile.
#pragma once

#include "cpu/score/block_visibility.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

class HeadMask {
 public:
  FLASHATTN_SHARED HeadMask(const AttnParams& p, int64_t b, int64_t h, const Sequence& queries, const KeyLocator& keys)
      : basic(p, queries.length, keys.length), first_interval_(keys.first_interval), has_blocks_(p.has_blocks()) {
    if (has_blocks_) blocks_ = BlockVisibility(p, b, h);
    if (!p.has_intervals()) return;
    intervals_ = head_intervals(p, b, h, keys.first_interval);
    extremes_ = head_extremes(p, b, h);
  }

  // The visibility of a tile of rows and keys under the Mask or BlockMask alone.
  Visibility mask_visibility(IndexRange rows, IndexRange keys) const {
    if (has_blocks_) return blocks_.visibility(block_of(rows), block_of(keys));
    if (!has_intervals()) return Visibility::kAll;
    IntervalExtremes extremes = IntervalExtremes::none();
    const int64_t first = first_interval_ + keys.begin, end = first_interval_ + keys.end;
    if (first < 0) extremes = {0, INT32_MAX, 0, INT32_MAX};  // keys without an interval are visible to every row
    for (int64_t n = greater<int64_t>(first, 0) / kMaskGranule; n * kMaskGranule < end; ++n) extremes.add(extremes_[n]);
    return extremes.visibility(rows.begin, rows.end);
  }
  // The rows that see a key, clipped to `rows`; of a BlockMask also its bits say which.
  IndexRange rows_of_key(int64_t key, IndexRange rows) const {
    IndexRange seen = basic.rows_of(key, key + 1);
    if (has_intervals() && first_interval_ + key >= 0) {
      seen.begin = greater<int64_t>(seen.begin, intervals_[2 * key]);
      seen.end = lesser<int64_t>(seen.end, intervals_[2 * key + 1]);
    }
    seen.begin = greater(seen.begin, rows.begin);
    seen.end = lesser(seen.end, rows.end);
    return seen.begin < seen.end ? seen : IndexRange{rows.begin, rows.begin};
  }
  // Whether bits say which rows of a tile see a key.
  bool has_bits(IndexRange rows, IndexRange keys) const {
    return has_blocks_ && mask_visibility(rows, keys) == Visibility::kSome;
  }
  BlockColumns bits(IndexRange rows, IndexRange keys) const { return blocks_.columns(block_of(rows), block_of(keys)); }

  // --- tiles of `length` keys, for some rows ---
  // Whether any of the rows may see a key of the tile.
  bool sees_tile(int64_t length, IndexRange rows, int64_t tile) const {
    const IndexRange visible = basic.keys_of(rows.begin, rows.end);
    const IndexRange keys{tile * length, lesser((tile + 1) * length, basic.seqlen_k)};
    return visible.begin < visible.end && keys.begin < visible.end && visible.begin < keys.end &&
           mask_visibility(rows, keys) != Visibility::kNone;
  }
  // The nearest earlier (previous_tile) or later (next_tile) tile that any of the rows may see; -1 if there is none.
  // next_tile(length, rows, -1) is the first such tile.
  int64_t previous_tile(int64_t length, IndexRange rows, int64_t tile) const {
    const int64_t first = basic.keys_of(rows.begin, rows.end).begin / length;
    const auto listed = [&](int64_t n) { return has_blocks_ ? blocks_.previous_keys(block_of(rows), n) : n; };
    for (int64_t n = listed(tile - 1); n >= first; n = listed(n - 1)) {
      if (sees_tile(length, rows, n)) return n;
    }
    return -1;
  }
  int64_t next_tile(int64_t length, IndexRange rows, int64_t tile) const {
    const IndexRange visible = basic.keys_of(rows.begin, rows.end);
    for (int64_t n = next_listed(rows, greater(tile + 1, visible.begin / length)); n * length < visible.end;
         n = next_listed(rows, n + 1)) {
      if (sees_tile(length, rows, n)) return n;
    }
    return -1;
  }
  // Where a walk over keys or rows goes on: the first tile from `tile` on that a BlockMask lists, past every tile if
  // there is none; `tile` itself in other calls.
  int64_t next_listed(IndexRange rows, int64_t tile) const {
    return has_blocks_ ? blocks_.next_keys(block_of(rows), tile) : tile;
  }
  int64_t next_listed_rows(int64_t key_tile, int64_t tile) const {
    return has_blocks_ ? blocks_.next_rows(key_tile, tile) : tile;
  }

  const Mask basic;

 private:
  bool has_intervals() const { return intervals_ != nullptr; }
  static int64_t block_of(IndexRange tile) { return tile.begin / kMaskBlock; }

  int64_t first_interval_;  // KeyLocator
  bool has_blocks_;
  BlockVisibility blocks_;
  const int32_t* intervals_ = nullptr;          // [keys][2], intervals of this sequence
  const IntervalExtremes* extremes_ = nullptr;  // from granule 0 of the batch entry or of the packed keys on
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
