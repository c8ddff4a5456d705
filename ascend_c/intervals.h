// Hides what a Mask hides in partial tiles, on the vector core. Keys lie along the lanes: each lane has the first and
// the last row that see its key.
#pragma once

#include "biases.h"
#include "interval_tiles.h"

namespace flashattn_ext {
namespace ascend {

// The value of hidden elements: -inf for a score, 0 for a weight or a gradient.
enum class Hidden { kLowest, kZero };

class Intervals {
 public:
  // The fp32 values that SetMemory needs, for chunks of at most this many rows, of steps of at most this many keys.
  __aicore__ static constexpr int32_t FloatsOf(int32_t rows, int32_t keys) { return 4 * keys + 8 * rows; }
  // Bytes of the scratch memory of Hide.
  __aicore__ static constexpr int32_t ScratchOf(int32_t rows) { return (2 * rows + 2) * kLanes; }

  __aicore__ explicit Intervals(const Arguments& arguments) : a(arguments) {}

  __aicore__ void SetMemory(const AscendC::LocalTensor<float>& memory, int32_t rows, int32_t keys) {
    using namespace AscendC;
    most_keys = keys;
    pairs = memory.ReinterpretCast<int32_t>();
    first = pairs[2 * keys];
    last = first[keys];
    row_numbers = last[keys];
    CountLanes(pairs);
    Brcb(row_numbers, pairs, RoundUp(rows, 8) / 8, {1, 8});
    Barrier();
    Duplicate(pairs, int32_t(0), 4 * keys);
    Barrier();
    SetFlag<HardEvent::V_MTE2>(kPairsEvent);
  }
  __aicore__ void Finish() { AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(kPairsEvent); }

  // Compares the keys of a step with the rows [row, row + rows) of this vector core: finds the partly masked blocks of
  // 64, and loads the pairs of all keys if there is one.
  __aicore__ void Begin(const Task& task, int32_t head, int32_t key, int32_t keys, int32_t row, int32_t rows) {
    using namespace AscendC;
    const IntervalTiles tiles(a, task.batch, head, task.keys.start);
    whole = tiles.Blocks(key, key + keys, kLanes, row, row + rows, blocks);
    if (whole) return;
    const IntervalView& view = a.intervals;
    const int64_t at = task.batch * view.batch_stride + mask_head(a, head) * view.head_stride;
    const int32_t columns = RoundUp(keys, kLanes);
    WaitFlag<HardEvent::V_MTE2>(kPairsEvent);
    DataCopyPad(pairs, Global<int32_t>((uint64_t)view.data, 2 * (at + task.keys.start + key)),
                DataCopyExtParams(1, keys * 8, 0, 0, 0), DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
    SetFlag<HardEvent::MTE2_V>(kPairsEvent);
    WaitFlag<HardEvent::MTE2_V>(kPairsEvent);
    uint64_t count = 0;
    GatherMaskParams gather;
    gather.repeatTimes = 2 * columns / kLanes;
    GatherMask(first, pairs, uint8_t(1), false, 0, gather, count);
    GatherMask(last, pairs, uint8_t(2), false, 0, gather, count);
    Barrier();
    SetFlag<HardEvent::V_MTE2>(kPairsEvent);
    // They may hold anything; differences of what is left fit into 32 bits.
    constexpr int32_t kFarthest = 1 << 30;
    const int32_t both = most_keys + columns;  // from the first rows to the last ones
    Maxs(first, first, int32_t(0), both);
    Barrier();
    Mins(first, first, kFarthest, both);
    Barrier();
    Adds(last, last, int32_t(-1), columns);
    Barrier();
  }

  // Whether the columns [begin, end) of the step's keys are fully masked.
  __aicore__ bool HidesAll(int32_t row, int32_t rows, int32_t begin, int32_t end) const {
    if (whole) return begin >= end;
    for (int32_t c = begin / kLanes * kLanes; c < end; c += kLanes)
      if (blocks[c / kLanes].visibility(row, row + rows) != Visibility::kNone) return false;
    return true;
  }

  // Room for one fp32 per key or row of a step, from Begin to the end of the step.
  __aicore__ AscendC::LocalTensor<float> Borrow() {
    AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(kPairsEvent);
    return pairs.ReinterpretCast<float>();
  }
  __aicore__ void GiveBack() { AscendC::SetFlag<AscendC::HardEvent::V_MTE2>(kPairsEvent); }

  // Writes -inf, or 0, to the elements that the rows of a chunk do not see.
  __aicore__ void Hide(const ScoreChunk& chunk, const AscendC::LocalTensor<float>& scratch,
                       Hidden hidden = Hidden::kLowest) {
    if (whole) return;
    for (int32_t c = 0; c < chunk.columns(); c += kLanes) {
      const Visibility seen = blocks[c / kLanes].visibility(chunk.row, chunk.row + chunk.rows);
      if (seen == Visibility::kNone)
        AscendC::Duplicate(chunk.s[c], hidden == Hidden::kZero ? 0.0f : -__builtin_inff(), kLanes, chunk.rows, 1,
                           chunk.layout.pitch);
      else if (seen == Visibility::kSome)
        HideBlock(chunk, c, scratch.ReinterpretCast<int32_t>(), hidden);
    }
    Barrier();
  }

 private:
  static constexpr int32_t kPairsEvent = 5;  // between MTE2 and V
  static constexpr int32_t kMostBlocks = SizesOf<2>::kKeys / kLanes;

  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }
  __aicore__ static AscendC::LocalTensor<uint16_t> Bits(const AscendC::LocalTensor<int32_t>& words) {
    return words.ReinterpretCast<uint16_t>();
  }

  // 64 keys. A lane is hidden if row - first or last - row is negative. Bit operations set its score, which may be NaN,
  // to -inf: they set all bits, then clear the mantissa. For 0 they clear all bits.
  __aicore__ void HideBlock(const ScoreChunk& chunk, int32_t column, const AscendC::LocalTensor<int32_t>& scratch,
                            Hidden hidden) {
    using namespace AscendC;
    const uint8_t rows = chunk.rows, pitch = chunk.layout.pitch;
    const LocalTensor<int32_t> after = scratch, before = scratch[rows * kLanes],
                               s = chunk.s[column].ReinterpretCast<int32_t>();
    const LocalTensor<int32_t> from = scratch[2 * rows * kLanes], to = from[kLanes];  // counted from the chunk's rows
    Adds(from, first[column], -chunk.row, kLanes, 1, {1, 1, 8, 8});
    Adds(to, last[column], -chunk.row, kLanes, 1, {1, 1, 8, 8});
    Barrier();
    Sub(after, row_numbers, from, kLanes, rows, {1, 0, 1, 8, 1, 0});
    Sub(before, to, row_numbers, kLanes, rows, {1, 1, 0, 8, 0, 1});
    Barrier();
    Or(Bits(after), Bits(after), Bits(before), 128, rows, {1, 1, 1, 8, 8, 8});
    Barrier();
    ShiftRight(after, after, int32_t(31), kLanes, rows, {1, 1, 8, 8});
    Barrier();
    if (hidden == Hidden::kZero) {  // -1 if hidden, otherwise 0: inverted
      Adds(after, after, int32_t(1), kLanes, rows, {1, 1, 8, 8});
      Barrier();
      Muls(after, after, int32_t(-1), kLanes, rows, {1, 1, 8, 8});
      Barrier();
      And(Bits(s), Bits(s), Bits(after), 128, rows, {1, 1, 1, pitch, pitch, 8});
      Barrier();
      return;
    }
    ShiftRight(before.ReinterpretCast<uint32_t>(), after.ReinterpretCast<uint32_t>(), uint32_t(9), kLanes, rows,
               {1, 1, 8, 8});
    Or(Bits(s), Bits(s), Bits(after), 128, rows, {1, 1, 1, pitch, pitch, 8});
    Barrier();
    Sub(s, s, before, kLanes, rows, {1, 1, 1, pitch, pitch, 8});
    Barrier();
  }

  const Arguments& a;
  bool whole = true;
  int32_t most_keys = 0;
  IntervalExtremes blocks[kMostBlocks];
  AscendC::LocalTensor<int32_t> pairs, first, last;  // intervals of the keys of a step; last is inclusive
  AscendC::LocalTensor<int32_t> row_numbers;         // 0, 1, 2 .., each in a whole block
};

}  // namespace ascend
}  // namespace flashattn_ext
