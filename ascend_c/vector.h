// Common parts of the vector core's stages: UB carved up by hand, a vector core's half of the rows, the mask.
#pragma once

#include "core.h"
#include "schedule.h"

// Keeps a loop's code short: the instruction cache of a vector core has 16 KB by one of the vendor's documents.
#if defined(__clang__)
#define FLASHATTN_ROLLED _Pragma("clang loop unroll(disable)")
#else
#define FLASHATTN_ROLLED
#endif

namespace flashattn_ext {
namespace ascend {

constexpr float kLowest = -1e30f;  // instead of -inf for a maximum or lse that must not make NaN of -inf - (-inf)
constexpr float kHighest = 3.40282347e38f;  // instead of +inf, for the same reason

// Rounds fp32 to the type of an input, to nearest even, in repeats of 64.
template <typename T>
__aicore__ inline void RoundRepeats(const AscendC::LocalTensor<T>& to, const AscendC::LocalTensor<float>& from,
                                    uint8_t repeats) {
  if constexpr (sizeof(T) == 2)
    AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, kLanes, repeats, {1, 1, 4, 8});
  else
    AscendC::Muls(to, from, 1.0f, kLanes, repeats, {1, 1, 8, 8});
}

template <typename T>
__aicore__ inline void Widen(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<T>& from,
                             int32_t count) {
  if constexpr (sizeof(T) == 2)
    AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, count);
  else
    AscendC::Muls(to, from, 1.0f, count);
}

class VectorCore {
 protected:
  __aicore__ VectorCore() {}

  template <typename T>
  __aicore__ AscendC::LocalTensor<T> Carve(int32_t elements) {
    const int32_t at = used;
    used += RoundUp(elements * int32_t(sizeof(T)), 32);
    return AscendC::LocalTensor<T>(AscendC::TPosition::VECIN, at, elements);  // what DataCopyPad takes
  }
  // Elements left to carve.
  template <typename T>
  __aicore__ int32_t Free() const {
    return (kUbBytes - used) / int32_t(sizeof(T));
  }

  // Rounds `count` elements to T.
  template <typename T>
  __aicore__ static void Round(const AscendC::LocalTensor<T>& to, const AscendC::LocalTensor<float>& from,
                               int32_t count) {
    if constexpr (sizeof(T) == 2)
      AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, count);
    else
      AscendC::Muls(to, from, 1.0f, count);
  }
  // Zeros in the type of an input, which Duplicate may not support.
  template <typename T>
  __aicore__ static void Zero(const AscendC::LocalTensor<T>& x, int32_t count) {
    AscendC::Duplicate(x.template ReinterpretCast<uint16_t>(), uint16_t(0), count * int32_t(sizeof(T) / 2));
  }
  // Blocks that so many elements of a row take in UB.
  template <typename T>
  __aicore__ static int32_t Blocks(int32_t elements) {
    return RoundUp(elements * int32_t(sizeof(T)), 32) / 32;
  }

  // Both buffers that MTE2 fills, for the vector unit's own use: nothing is loaded until they are given back.
  __aicore__ static void TakeLoadBuffers() {
    using namespace AscendC;
    for (int32_t e = 0; e < 2; ++e) {
      WaitFlag<HardEvent::V_MTE2>(e);
      SetFlag<HardEvent::MTE2_V>(e);
      WaitFlag<HardEvent::MTE2_V>(e);
    }
  }
  __aicore__ static void GiveLoadBuffers() {
    for (int32_t e = 0; e < 2; ++e) AscendC::SetFlag<AscendC::HardEvent::V_MTE2>(e);
  }

  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }

  // The first half of the rows of a step goes to the first vector core, in whole groups of 16 (the generator's).
  __aicore__ static void TakeHalf(int32_t* row, int32_t* rows) {
    const int32_t first = Lesser(*rows, (*rows + 31) / 32 * 16);
    if (AscendC::GetSubBlockIdx() == 0) {
      *rows = first;
    } else {
      *row += first;
      *rows -= first;
    }
  }

 private:
  int32_t used = 0;
};

// Lanes in the order of paired columns: of 16 keys, the k-th and the (8 + k)-th side by side.
__aicore__ inline uint64_t PairLanes(uint64_t lanes) {
  uint64_t swapped = (lanes ^ (lanes >> 4)) & 0x00f000f000f000f0u;
  lanes ^= swapped ^ (swapped << 4);
  swapped = (lanes ^ (lanes >> 2)) & 0x0c0c0c0c0c0c0c0cu;
  lanes ^= swapped ^ (swapped << 2);
  swapped = (lanes ^ (lanes >> 1)) & 0x2222222222222222u;
  return lanes ^ swapped ^ (swapped << 1);
}

// The numbers 0 to 63, in fp32 or int32. CreateVecIndex would take its event ids from a TPipe.
template <typename T>
__aicore__ inline void CountLanes(const AscendC::LocalTensor<T>& to) {
  using namespace AscendC;
  Duplicate(to, T(0), kLanes);
  uint64_t lanes[2] = {~uint64_t(0), 0};  // those whose number has the bit `step`
  FLASHATTN_ROLLED for (int32_t step = kLanes / 2; step > 0; step /= 2) {
    lanes[0] ^= lanes[0] >> step;
    PipeBarrier<PIPE_V>();
    Adds(to, to, T(step), lanes, 1, {1, 1, 8, 8});
  }
  PipeBarrier<PIPE_V>();
}

// The layout of a chunk of scores in UB.
struct ScoreLayout {
  uint8_t pitch;  // blocks from row to row
  bool paired;    // columns
};

// Writes a value to the columns of [first, columns) outside [begin, end).
__aicore__ inline void FillOutside(const AscendC::LocalTensor<float>& s, const ScoreLayout& layout, int32_t rows,
                                   int32_t first, int32_t columns, int32_t begin, int32_t end,
                                   float value = -__builtin_inff()) {
  for (int32_t c = first; c < columns; c += kLanes) {
    const int32_t from = Lesser(kLanes, Greater(0, begin - c)), to = Lesser(kLanes, Greater(from, end - c));
    const uint64_t below_from = from == kLanes ? ~uint64_t(0) : (uint64_t(1) << from) - 1;
    const uint64_t below_to = to == kLanes ? ~uint64_t(0) : (uint64_t(1) << to) - 1;
    uint64_t lanes[2] = {below_from | ~below_to, 0};
    if (layout.paired) lanes[0] = PairLanes(lanes[0]);
    if (lanes[0]) AscendC::Duplicate(s[c], value, lanes, rows, 1, layout.pitch);
  }
}

// Writes a value (-inf) where a query does not see a key, and behind the last key up to whole repeats: first the
// columns that are fully masked, for all rows at once, then, in partly masked columns, row by row.
__aicore__ inline void HideScores(const TileMask& mask, int32_t row, int32_t rows, int32_t key, int32_t keys,
                                  const AscendC::LocalTensor<float>& s, const ScoreLayout& layout,
                                  float value = -__builtin_inff()) {
  const int32_t columns = RoundUp(keys, kLanes);
  const TileMask::Range some = mask.keys_of(row, row + rows), every = mask.keys_of_all(row, row + rows);
  const int32_t some_begin = Lesser(keys, Greater(0, some.begin - key));
  const int32_t some_end = Lesser(keys, Greater(some_begin, some.end - key));
  const int32_t every_begin = Lesser(some_end, Greater(some_begin, every.begin - key));
  const int32_t every_end = Lesser(some_end, Greater(every_begin, every.end - key));
  if (every_begin == 0 && every_end == columns) return;
  FillOutside(s, layout, rows, 0, columns, some_begin, some_end, value);
  AscendC::PipeBarrier<PIPE_V>();
  if (every_begin == some_begin && every_end == some_end) return;
  const int32_t left_end = every_begin > some_begin ? every_begin : 0;
  const int32_t right_begin = Greater(RoundUp(left_end, kLanes), every_end / kLanes * kLanes);
  for (int32_t r = 0; r < rows; ++r) {
    const TileMask::Range seen = mask.keys_of(row + r, row + r + 1);
    const int32_t begin = seen.begin - key, end = Lesser(keys, seen.end - key);
    const AscendC::LocalTensor<float> line = s[r * layout.pitch * 8];
    FLASHATTN_ROLLED for (int32_t side = 0; side < 2; ++side)
        FillOutside(line, layout, 1, side ? right_begin : some_begin / kLanes * kLanes, side ? some_end : left_end,
                    begin, end, value);
  }
  AscendC::PipeBarrier<PIPE_V>();
}

}  // namespace ascend
}  // namespace flashattn_ext
