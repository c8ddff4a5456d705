// Visibility within one pair of query tile and key tile: the ranges of head_mask.h, clipped to the two tiles and
// widened to the granularity of the products.
#pragma once

#include "cpu/score/head_mask.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Which rows of a tile see each of its keys. Rows are counted from the beginning of the query tile.
struct KeyRows {
  KeyRows(const TileSize& size, ScratchCarver* carve)
      : words(size.queries / kWordLanes),
        bits(carve->take<uint16_t>(size.keys * words)),
        groups(carve->take<IntervalExtremes>(ceil_div(size.keys, kTileRows))) {}

  FLASHATTN_SHARED void fill(const HeadMask& mask, IndexRange rows, IndexRange keys) const {
    if (mask.has_bits(rows, keys)) {
      const BlockColumns columns = mask.bits(rows, keys);
      fill_groups(mask, rows, keys,
                  [&](int64_t key, IndexRange seen_by) { return set_bits(key, seen_by, columns.of_key[key]); });
    } else {
      fill_groups(mask, rows, keys, [&](int64_t key, IndexRange seen_by) { return set_interval(key, seen_by); });
    }
  }
  bool sees(int64_t row, int64_t key) const { return bits[key * words + row / kWordLanes] >> (row % kWordLanes) & 1; }

  int64_t words;             // words of one key
  uint16_t* bits;            // [keys][words]: bit l of word n for row 16 * n + l
  IntervalExtremes* groups;  // [keys / kTileRows]: extremes of the keys of a register tile

 private:
  // set(key, rows) sets the bits of a key, which at most these rows see, and returns its extremes.
  template <class Set>
  void fill_groups(const HeadMask& mask, IndexRange rows, IndexRange keys, Set set) const {
    const int64_t count = keys.end - keys.begin;
    for (int64_t group = 0; group * kTileRows < count; ++group) {
      IntervalExtremes extremes = IntervalExtremes::none();
      for (int64_t j = group * kTileRows; j < lesser((group + 1) * kTileRows, count); ++j) {
        const IndexRange seen_by = mask.rows_of_key(keys.begin + j, rows);
        extremes.add(set(j, {seen_by.begin - rows.begin, seen_by.end - rows.begin}));
      }
      groups[group] = extremes;
    }
  }
  // A key that is masked for every row does not widen `any` and makes `all` empty.
  static constexpr IntervalExtremes kHidden{INT32_MAX, 0, 0, 0};

  IntervalExtremes set_interval(int64_t key, IndexRange rows) const {
    for (int64_t n = 0; n < words; n += kGroupWords) store(key, n, group_of(rows, n));
    const auto begin = static_cast<int32_t>(rows.begin), end = static_cast<int32_t>(rows.end);
    return begin < end ? IntervalExtremes{begin, end, begin, end} : kHidden;
  }
  // column: the bits of a BlockMask, whose tiles have two groups of rows.
  IntervalExtremes set_bits(int64_t key, IndexRange rows, const uint32_t* column) const {
    uint64_t seen[2];
    std::memcpy(seen, column, sizeof seen);
    for (int n = 0; n < 2; ++n) {
      seen[n] &= group_of(rows, n * kGroupWords);
      store(key, n * kGroupWords, seen[n]);
    }
    if ((seen[0] | seen[1]) == 0) return kHidden;
    const int32_t first = seen[0] ? __builtin_ctzll(seen[0]) : 64 + __builtin_ctzll(seen[1]),
                  end = seen[1] ? 128 - __builtin_clzll(seen[1]) : 64 - __builtin_clzll(seen[0]);
    const bool is_interval = end - first == __builtin_popcountll(seen[0]) + __builtin_popcountll(seen[1]);
    return is_interval ? IntervalExtremes{first, end, first, end} : IntervalExtremes{first, end, 0, 0};
  }

  // Four words at once. The processors of these kernels have the lowest byte of a number first.
  static constexpr int64_t kGroupWords = 4;
  static_assert(kTileMultiple == kGroupWords * kWordLanes && kMaskBlock == 2 * kTileMultiple, "rows of a tile");
  // The bits of these rows in the group that begins with word n.
  static uint64_t group_of(IndexRange rows, int64_t n) {
    const auto below = [](int64_t row) {
      return row >= 64 ? ~uint64_t{0} : row > 0 ? (uint64_t{1} << row) - 1 : uint64_t{0};
    };
    return below(rows.end - n * kWordLanes) & ~below(rows.begin - n * kWordLanes);
  }
  void store(int64_t key, int64_t n, uint64_t group) const {
    std::memcpy(bits + key * words + n, &group, sizeof group);
  }
};

// One query tile against one key tile. Rows and keys are counted from the beginning of their tile.
template <class Op>
class PanelMask {
 public:
  using Real = typename Op::Real;

  // Fills `limits` if a test will read them. pads: whether lanes without a query are fully masked.
  FLASHATTN_SHARED PanelMask(const HeadMask& mask, int64_t row0, int64_t rows, int64_t key0, int64_t keys, bool pads,
                             const KeyRows& limits)
      : mask_(mask.basic), limits_(limits), row0_(row0), rows_(rows), key0_(key0), keys_(keys), pads_(pads) {
    const IndexRange tile_rows{row0, row0 + rows}, tile_keys{key0, key0 + keys};
    has_groups_ = mask.mask_visibility(tile_rows, tile_keys) != Visibility::kAll;
    is_whole_ = !has_groups_ && mask_.visibility(row0, row0 + rows, key0, key0 + keys) == Visibility::kAll;
    if (kTileInstances<Real> < 4 || !is_whole_ || (pads && rows % kPanel<Op>)) limits.fill(mask, tile_rows, tile_keys);
  }

  // Whether every query sees every key.
  bool is_whole() const { return is_whole_; }
  // Keys that rows [begin, end) see, widened to whole steps of the product (bfloat16), or to register tiles if a Mask
  // or BlockMask masks some.
  IndexRange keys_of(int64_t begin, int64_t end) const {
    end = lesser(end, rows_);
    return has_groups_ ? groups_of(begin, end)
                       : clip(mask_.keys_of(row0_ + begin, row0_ + end), key0_, keys_, Op::kStep);
  }
  // Rows that see keys [begin, end), the keys of one register tile.
  IndexRange rows_of(int64_t begin, int64_t end) const {
    if (!has_groups_) return clip(mask_.rows_of(key0_ + begin, key0_ + lesser(end, keys_)), row0_, rows_, Op::kStep);
    const IntervalExtremes& group = limits_.groups[begin / kTileRows];
    if (group.any_first >= group.any_last) return {0, 0};
    return clip({group.any_first, group.any_last}, 0, rows_, Op::kStep);
  }
  // Keys for which the scores of the panel at `lane` are computed: all that the later products read, in groups of
  // kTileRows queries or keys.
  IndexRange panel_keys(int64_t lane) const {
    const int64_t begin = lane / kTileRows * kTileRows;
    const int64_t end = lesser(round_up(lane + kPanel<Op>, kTileRows), rows_);
    return has_groups_ ? groups_of(begin, end)
                       : clip(mask_.keys_of(row0_ + begin, row0_ + end), key0_, keys_, kTileRows);
  }
  // Whether every query of the panel at `lane` sees all of `keys`.
  bool panel_is_full(int64_t lane, IndexRange keys) const {
    if (pads_ && lane + kPanel<Op> > rows_) return false;
    const int64_t end = lesser(lane + kPanel<Op>, rows_);
    for (int64_t group = keys.begin / kTileRows; has_groups_ && group * kTileRows < keys.end; ++group) {
      if (limits_.groups[group].visibility(lane, end) != Visibility::kAll) return false;
    }
    return mask_.visibility(row0_ + lane, row0_ + end, key0_ + keys.begin, key0_ + keys.end) == Visibility::kAll;
  }
  const KeyRows& limits() const { return limits_; }

 private:
  // Whole register tiles of keys, from the first to the last that any of the rows may see.
  IndexRange groups_of(int64_t begin, int64_t end) const {
    int64_t first = 0, last = ceil_div(keys_, kTileRows);
    const auto hidden = [&](int64_t n) { return limits_.groups[n].visibility(begin, end) == Visibility::kNone; };
    while (first < last && hidden(first)) ++first;
    while (first < last && hidden(last - 1)) --last;
    return {first * kTileRows, first < last ? lesser(last * kTileRows, keys_) : first * kTileRows};
  }

  // The part of a range that is in the tile, widened to whole granules. An empty range stays empty: the scores of a
  // granule around it are masked and may not have been computed.
  static IndexRange clip(IndexRange range, int64_t origin, int64_t length, int64_t granule) {
    if (range.begin >= range.end) return {0, 0};
    int64_t begin = greater<int64_t>(range.begin - origin, 0) / granule * granule;
    int64_t end = lesser(round_up(greater<int64_t>(range.end - origin, 0), granule), length);
    return {begin, greater(begin, end)};
  }

  Mask mask_;
  const KeyRows& limits_;
  int64_t row0_, rows_, key0_, keys_;
  bool pads_, is_whole_;
  bool has_groups_;  // a Mask or BlockMask masks scores of this tile: ranges come from the groups of `limits`
};

// The range of units along k that a product needs (gemm.h): the keys that some rows see.
template <class Op>
struct KeysOfRows {
  const PanelMask<Op>& mask;
  IndexRange operator()(int64_t begin, int64_t end) const {
    const IndexRange keys = mask.keys_of(begin, end);
    return {keys.begin / Op::kPack, ceil_div(keys.end, Op::kPack)};
  }
};
template <class Op>
struct RowsOfKeys {
  const PanelMask<Op>& mask;
  IndexRange operator()(int64_t begin, int64_t end) const {
    const IndexRange rows = mask.rows_of(begin, end);
    return {rows.begin / Op::kPack, ceil_div(rows.end, Op::kPack)};
  }
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
