// Which keys rows see under a Mask (csrc/rules/mask.h), from the extremes of its granules. The cube and vector cores
// skip fully masked keys by it, and the vector core tells unmasked from partly masked tiles.
#pragma once

#include <kernel_operator.h>  // before the shared headers: it defines what they compile to

#include "../csrc/rules/mask.h"
#include "arguments.h"

namespace flashattn_ext {
namespace ascend {

// The granules of a query head of a batch entry. `start`: of its first key among the packed ones. Keys are counted
// within the sequence. Granules at the ends of a packed sequence also have keys of its neighbours.
class IntervalTiles {
 public:
  __aicore__ IntervalTiles(const Arguments& a, int64_t batch, int64_t head, int64_t start) : start(start) {
    const IntervalView& view = a.intervals;
    const int64_t keys = a.is_varlen() ? a.total_k : a.seqlen_k;
    granules = (keys + kMaskGranule - 1) / kMaskGranule;
    const int64_t at = batch * view.extremes_batch_stride + mask_head(a, head) * view.extremes_head_stride;
    extremes.SetGlobalBuffer((__gm__ int64_t*)(uint64_t)view.extremes + 2 * at);
  }

  // The extremes of the keys [begin, end), which is not empty.
  __aicore__ IntervalExtremes Of(int64_t begin, int64_t end) const {
    IntervalExtremes all = IntervalExtremes::none();
    const int64_t last = Granule(end - 1);
    for (int64_t g = Granule(begin); g <= last; ++g) {
      const Rows any = Any(g), every = All(g);
      all.add({any.first, any.last, every.first, every.last});
    }
    return all;
  }
  // Whether every row of [row_begin, row_end) sees all keys of [begin, end), which is not empty.
  __aicore__ bool Whole(int64_t begin, int64_t end, int64_t row_begin, int64_t row_end) const {
    const int64_t last = Granule(end - 1);
    for (int64_t super = Granule(begin) / kMaskSuper; super <= last / kMaskSuper; ++super) {
      if (AllSee(granules + super, row_begin, row_end)) continue;
      const int64_t first = super * kMaskSuper, after = first + kMaskSuper;
      for (int64_t g = Granule(begin) > first ? Granule(begin) : first; g <= last && g < after; ++g)
        if (!AllSee(g, row_begin, row_end)) return false;
    }
    return true;
  }
  // The first key from `begin` on whose granule is seen by a row of [row_begin, row_end), or `end`.
  __aicore__ int64_t FirstSeen(int64_t begin, int64_t end, int64_t row_begin, int64_t row_end) const {
    for (int64_t g = Granule(begin); g * kMaskGranule < start + end;) {
      if (g % kMaskSuper == 0 && !Seen(granules + g / kMaskSuper, row_begin, row_end)) {
        g += kMaskSuper;
      } else if (Seen(g, row_begin, row_end)) {
        const int64_t key = g * kMaskGranule - start;
        return key < begin ? begin : key;
      } else {
        ++g;
      }
    }
    return end;
  }
  // The end of the last granule of [begin, end) that such a row sees, or `begin`.
  __aicore__ int64_t EndOfSeen(int64_t begin, int64_t end, int64_t row_begin, int64_t row_end) const {
    for (int64_t g = Granule(end - 1); g >= Granule(begin); --g) {
      if (!Seen(g, row_begin, row_end)) continue;
      const int64_t key = (g + 1) * kMaskGranule - start;
      return key < end ? key : end;
    }
    return begin;
  }

  // The extremes of blocks of `width` keys of [begin, end), whole granules except at its ends. A block that every
  // row of [row_begin, row_end) sees gets the extremes of visible keys. Returns whether all blocks are such.
  __aicore__ bool Blocks(int64_t begin, int64_t end, int32_t width, int64_t row_begin, int64_t row_end,
                         IntervalExtremes* blocks) const {
    bool whole = true, super_whole = false;
    int64_t known_super = -1;
    for (int64_t key = begin; key < end; key += width, ++blocks) {
      const int64_t first = Granule(key), last = Granule((key + width < end ? key + width : end) - 1);
      *blocks = {0, INT32_MAX, 0, INT32_MAX};
      for (int64_t g = first; g <= last; ++g) {
        if (g / kMaskSuper != known_super) {
          known_super = g / kMaskSuper;
          super_whole = AllSee(granules + known_super, row_begin, row_end);
        }
        if (super_whole) continue;
        const Rows rows = All(g);
        if (rows.first > blocks->all_first) blocks->all_first = rows.first;
        if (rows.last < blocks->all_last) blocks->all_last = rows.last;
      }
      if (blocks->all_first <= row_begin && blocks->all_last >= row_end) continue;
      whole = false;
      *blocks = Of(key, key + width < end ? key + width : end);
    }
    return whole;
  }

 private:
  struct Rows {
    int32_t first, last;
  };
  // A single access of the scalar unit reads both.
  __aicore__ Rows At(int64_t index) const {
    const int64_t both = extremes.GetValue(index);
    return {int32_t(both), int32_t(both >> 32)};
  }
  __aicore__ Rows Any(int64_t entry) const { return At(2 * entry); }
  __aicore__ Rows All(int64_t entry) const { return At(2 * entry + 1); }

  __aicore__ int64_t Granule(int64_t key) const { return (start + key) / kMaskGranule; }
  __aicore__ bool Seen(int64_t entry, int64_t row_begin, int64_t row_end) const {
    const Rows any = Any(entry);
    return any.first < row_end && any.last > row_begin;
  }
  __aicore__ bool AllSee(int64_t entry, int64_t row_begin, int64_t row_end) const {
    const Rows all = All(entry);
    return all.first <= row_begin && all.last >= row_end;
  }

  AscendC::GlobalTensor<int64_t> extremes;  // [entries][4]: first and last of any row, first and last of all rows
  int64_t start, granules;
};

}  // namespace ascend
}  // namespace flashattn_ext
