// What the queries of one tile see of the keys of another: the answers of mask.h, clipped to the two tiles and widened
// to what the products read.
#pragma once

#include "tiles.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// One query tile against one key tile. Rows and keys are counted from the beginning of their tile.
template <class Op>
class PanelMask {
 public:
  using Real = typename Op::Real;

  PanelMask(const Mask& mask, int64_t row0, int64_t rows, int64_t key0, int64_t keys)
      : mask_(mask), row0_(row0), rows_(rows), key0_(key0), keys_(keys) {}

  int64_t rows() const { return rows_; }
  // Keys that rows [begin, end) see, widened to whole pairs of bfloat16.
  IndexRange keys_of(int64_t begin, int64_t end) const {
    return clip(mask_.keys_of(row0_ + begin, row0_ + lesser(end, rows_)), key0_, keys_, Op::kPack);
  }
  // Rows that see keys [begin, end).
  IndexRange rows_of(int64_t begin, int64_t end) const {
    return clip(mask_.rows_of(key0_ + begin, key0_ + lesser(end, keys_)), row0_, rows_, Op::kPack);
  }
  // Keys for which the scores of the panel at `lane` are computed: all that the later products read, which go by groups
  // of kTileRows queries or keys.
  IndexRange panel_keys(int64_t lane) const {
    const int64_t begin = lane / kTileRows * kTileRows;
    const int64_t end = lesser(round_up(lane + kPanel<Op>, kTileRows), rows_);
    return clip(mask_.keys_of(row0_ + begin, row0_ + end), key0_, keys_, kTileRows);
  }
  // Whether every query of the panel at `lane` sees every one of `keys`.
  bool panel_is_full(int64_t lane, IndexRange keys) const {
    return mask_.visibility(row0_ + lane, panel_end(lane), key0_ + keys.begin, key0_ + keys.end) == Visibility::kAll;
  }
  // Whether the queries of the panel at `lane` see keys of this tile and of no other.
  bool panel_sees_this_tile_alone(int64_t lane) const {
    const IndexRange seen = mask_.keys_of(row0_ + lane, panel_end(lane));
    return seen.begin < seen.end && seen.begin >= key0_ && seen.end <= key0_ + keys_;
  }
  // For each of the lanes the keys [first, last) that its query sees, as numbers of the compute type; none for lanes
  // beyond the rows.
  void lane_limits(IndexRange lanes, Real* first, Real* last) const {
    for (int64_t i = lanes.begin; i < lanes.end; ++i) {
      const bool inside = i < rows_;
      const IndexRange keys = inside ? mask_.keys_of(row0_ + i, row0_ + i + 1) : IndexRange{key0_, key0_};
      first[i] = static_cast<Real>(greater<int64_t>(keys.begin - key0_, -1));
      last[i] = static_cast<Real>(lesser<int64_t>(keys.end - key0_, keys_));
    }
  }

 private:
  int64_t panel_end(int64_t lane) const { return row0_ + lesser(lane + kPanel<Op>, rows_); }

  static IndexRange clip(IndexRange range, int64_t origin, int64_t length, int64_t granule) {
    int64_t begin = greater<int64_t>(range.begin - origin, 0) / granule * granule;
    int64_t end = lesser(round_up(greater<int64_t>(range.end - origin, 0), granule), length);
    return {begin, greater(begin, end)};
  }

  Mask mask_;
  int64_t row0_, rows_, key0_, keys_;
};

// Which units along k the products need (gemm.h): for rows the keys that they see, for keys the rows that see them, or
// everything.
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
template <class Op>
struct EveryUnit {
  int64_t elements;
  IndexRange operator()(int64_t, int64_t) const { return {0, ceil_div(elements, Op::kPack)}; }
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
