// Keeps non-finite values out of results that do not see them, in calls with a Mask. In a product along keys or rows a
// hidden pair has the weight 0, and 0 * NaN is NaN. If an input has non-finite values, steps that hide a pair multiply
// copies of their operands, made by the vector cores, in which rows with an inf or a NaN are zeros. The weights of
// results that do see such a row become NaN. Steps that hide nothing multiply the tensors themselves.
//
// Normally all values are finite, and none of this runs. A stage before finds out, on the vector cores alone, because a
// NaN in a product may raise an execution error: forward_check.h sums up v, backward_prepare.h q, k, v and delta, which
// covers dout. Such a sum is a check: it is not finite if any of its terms is not. It may also overflow, which only
// costs time.
#pragma once

#include "vector.h"

namespace flashattn_ext {
namespace ascend {

// A vector core's check.
class FiniteCheck {
 public:
  static constexpr int32_t kFloats = kLanes + 8;

  __aicore__ void SetMemory(const AscendC::LocalTensor<float>& memory) {
    sum = memory;
    result = memory[kLanes];
    AscendC::Duplicate(sum, 0.0f, kFloats);
  }
  // `pitch`: blocks from row to row, of at most 255 rows.
  __aicore__ void Add(const AscendC::LocalTensor<float>& x, int32_t rows, int32_t columns, uint8_t pitch) {
    for (int32_t c = 0; c < columns; c += kLanes) {
      AscendC::Add(sum, x[c], sum, Lesser(kLanes, columns - c), rows, {1, 1, 1, 0, pitch, 0});
      AscendC::PipeBarrier<PIPE_V>();
    }
  }
  // `event`: from V to MTE3, and in no other use.
  __aicore__ void Store(const Arguments& a, int32_t event) {
    using namespace AscendC;
    PipeBarrier<PIPE_V>();  // also needed without an addition
    WholeReduceSum(result, sum, kLanes, 1, 1, 1, 8);
    SetFlag<HardEvent::V_MTE3>(event);
    WaitFlag<HardEvent::V_MTE3>(event);
    DataCopyPad(Global<float>((uint64_t)a.checks, GetBlockIdx()), result, DataCopyExtParams(1, 4, 0, 0, 0));
  }

 private:
  AscendC::LocalTensor<float> sum, result;
};

// Loads rows of a tensor, `stride` elements apart, into UB at a pitch of `width`, in whole repeats of which `dim`
// elements are loaded.
template <typename T>
__aicore__ inline void LoadRows(const AscendC::LocalTensor<T>& to, int32_t width, const AscendC::GlobalTensor<T>& from,
                                int64_t stride, int32_t rows, int32_t dim) {
  using namespace AscendC;
  constexpr int32_t kElement = sizeof(T);
  const int64_t gap = (stride - dim) * kElement;
  const int32_t free_blocks = width * kElement / 32 - RoundUp(dim * kElement, 32) / 32;
  const bool together = rows == 1 || (gap >= 0 && gap < int64_t{1} << 31);
  for (int32_t r = 0; r < rows; r += together ? rows : 1)
    DataCopyPad(to[r * width], from[r * stride],
                DataCopyExtParams(together ? rows : 1, dim * kElement, rows > 1 && together ? gap : 0, free_blocks, 0),
                DataCopyPadExtParams<T>(false, 0, 0, T()));
}

// Sums up whole tensors, a few rows at a time, with two loads in flight.
template <typename T>
class TensorCheck {
 public:
  static constexpr int32_t kRowsAtATime = 32;

  // The size of both buffers: rows as loaded, and in fp32. `width`: elements of the longest row, in whole repeats.
  __aicore__ TensorCheck(const AscendC::LocalTensor<T>& loaded0, const AscendC::LocalTensor<T>& loaded1,
                         const AscendC::LocalTensor<float>& wide0, const AscendC::LocalTensor<float>& wide1)
      : loaded0(loaded0), loaded1(loaded1), wide0(wide0), wide1(wide1) {}

  // V_MTE2 of 0 and 1 are set before and after.
  __aicore__ void Run(FiniteCheck* check, const TensorView& view, int64_t batch, int64_t rows, int64_t heads,
                      int32_t dim) {
    using namespace AscendC;
    const int64_t chunks = (rows + kRowsAtATime - 1) / kRowsAtATime;
    const int32_t pitch = RoundUp(dim, kLanes);
    for (int64_t item = GetBlockIdx(); item < batch * heads * chunks; item += GetBlockNum()) {
      const int64_t row = item % chunks * kRowsAtATime, head = item / chunks % heads, b = item / chunks / heads;
      const int32_t some = Lesser(kRowsAtATime, rows - row), buffer = checked++ % 2;
      const LocalTensor<T> loaded = buffer ? loaded1 : loaded0;
      const LocalTensor<float> x = buffer ? wide1 : wide0;
      WaitFlag<HardEvent::V_MTE2>(buffer);
      LoadRows(loaded, pitch, Head<T>(view, b, head, row), view.row_stride, some, dim);
      SetFlag<HardEvent::MTE2_V>(buffer);
      WaitFlag<HardEvent::MTE2_V>(buffer);
      Widen(x, loaded, some * pitch);
      PipeBarrier<PIPE_V>();
      SetFlag<HardEvent::V_MTE2>(buffer);
      check->Add(x, some, dim, pitch / 8);
    }
  }

 private:
  AscendC::LocalTensor<T> loaded0, loaded1;
  AscendC::LocalTensor<float> wide0, wide1;
  int32_t checked = 0;
};

// A row among the copies of a core.
template <typename T>
__aicore__ inline AscendC::GlobalTensor<T> IsolatedRow(const Arguments& a, int32_t rows_of_core, int32_t row) {
  const int64_t core = AscendC::GetBlockIdx() / AscendC::GetTaskRation();
  return Global<T>((uint64_t)a.isolated, (core * rows_of_core + row) * a.isolated_pitch());
}

// Rows of a tensor, `pitch` elements apart, through UB.
template <typename T>
class RowIsolation {
  static constexpr int32_t kElement = sizeof(T);

 public:
  // fp32 values of this many rows.
  __aicore__ static constexpr int32_t FloatsOf(int32_t rows, int32_t width) {
    return rows * (width + width * kElement / 4 + 1 + 8);
  }

  // `memory`: so many fp32, at least for 16 rows, in buffers that TakeLoadBuffers took. `event`: from V to MTE3, which
  // has no other use.
  __aicore__ RowIsolation(const Arguments& a, int32_t dim, const AscendC::LocalTensor<float>& memory, int32_t floats,
                          int32_t event)
      : to_pitch(a.isolated_pitch()), dim(dim), width(RoundUp(dim, kLanes)), event(event) {
    most = Lesser(kMostRows, floats / FloatsOf(1, width) / 8 * 8);
    wide = memory;
    keep = memory[most * width].template ReinterpretCast<int32_t>();
    keep_wide = keep[most];
    x = keep_wide[8 * most].template ReinterpretCast<T>();
  }

  // not_finite[r] becomes NaN if a row is not finite, otherwise 0. `stores`: the rows go to `to`, non-finite ones as
  // zeros.
  __aicore__ void Run(const AscendC::GlobalTensor<T>& from, int64_t pitch, int32_t rows,
                      const AscendC::LocalTensor<float>& not_finite, const AscendC::GlobalTensor<T>& to, bool stores) {
    using namespace AscendC;
    SetFlag<HardEvent::V_MTE2>(0);
    WaitFlag<HardEvent::V_MTE2>(0);
    for (int32_t row = 0; row < rows; row += most) {
      const int32_t some = Lesser(most, rows - row);
      LoadRows(x, width, from[row * pitch], pitch, some, dim);
      SetFlag<HardEvent::MTE2_V>(0);
      WaitFlag<HardEvent::MTE2_V>(0);
      Find(not_finite[row], some);
      if (stores) Clear(not_finite[row], some);
      SetFlag<HardEvent::V_MTE3>(event);
      WaitFlag<HardEvent::V_MTE3>(event);
      if (stores)
        DataCopyPad(
            to[row * to_pitch], x,
            DataCopyExtParams(some, dim * kElement, Blocks(width) - Blocks(dim), (to_pitch - dim) * kElement, 0));
      SetFlag<HardEvent::MTE3_MTE2>(0);
      WaitFlag<HardEvent::MTE3_MTE2>(0);
    }
    SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
  }

 private:
  static constexpr int32_t kMostRows = 128;
  __aicore__ static int32_t Blocks(int32_t elements) { return RoundUp(elements * kElement, 32) / 32; }

  // The sum of x * 0 over every row: over columns of 64, then halves, then a block.
  __aicore__ void Find(const AscendC::LocalTensor<float>& not_finite, int32_t rows) {
    using namespace AscendC;
    const uint8_t pitch = width / 8;
    if constexpr (kElement == 2) {
      Cast(wide, x, RoundMode::CAST_NONE, rows * width);
      Barrier();
      Muls(wide, wide, 0.0f, rows * width);
    } else {
      Muls(wide, x, 0.0f, rows * width);
    }
    Barrier();
    for (int32_t c = kLanes; c < dim; c += kLanes) AddColumns(c, Lesser(kLanes, dim - c), rows);
    int32_t lanes = Lesser(kLanes, dim);
    for (int32_t half = kLanes / 2; half >= 8; half /= 2) {
      if (lanes > half) AddColumns(half, lanes - half, rows);
      lanes = Lesser(lanes, half);
    }
    const uint64_t of_block = (uint64_t(1) << lanes) - 1, of_all = of_block * 0x0101010101010101u;
    const int32_t whole = rows / 8;
    uint64_t mask[2] = {of_all, 0}, rest[2] = {of_all & ((uint64_t(1) << rows % 8 * 8) - 1), 0};
    if (whole) BlockReduceSum(not_finite, wide, whole, mask, 1, pitch, 8 * pitch);
    if (rest[0]) BlockReduceSum(not_finite[whole * 8], wide[whole * 8 * width], 1, rest, 1, pitch, 8 * pitch);
    Barrier();
  }
  // Adds columns from `column` on to the first ones.
  __aicore__ void AddColumns(int32_t column, int32_t lanes, int32_t rows) {
    const uint8_t pitch = width / 8;
    AscendC::Add(wide, wide, wide[column], lanes, rows, {1, 1, 1, pitch, pitch, pitch});
    Barrier();
  }
  // Zeroes rows that are not finite, by their bits: a sum of 0 of either sign becomes all ones, a NaN becomes all
  // zeros.
  __aicore__ void Clear(const AscendC::LocalTensor<float>& not_finite, int32_t rows) {
    using namespace AscendC;
    const LocalTensor<uint32_t> bits = keep.ReinterpretCast<uint32_t>();
    ShiftLeft(bits, not_finite.ReinterpretCast<uint32_t>(), uint32_t(1), rows);
    Barrier();
    ShiftRight(bits, bits, uint32_t(1), rows);
    Barrier();
    Mins(keep, keep, int32_t(1), rows);
    Barrier();
    Adds(keep, keep, int32_t(-1), rows);
    Barrier();
    Brcb(keep_wide, keep, RoundUp(rows, 8) / 8, {1, 8});
    Barrier();
    const LocalTensor<uint16_t> halves = x.template ReinterpretCast<uint16_t>(),
                                kept = keep_wide.ReinterpretCast<uint16_t>();
    const uint8_t pitch = Blocks(width);
    const int32_t lanes = width * kElement / 2;
    for (int32_t c = 0; c < lanes; c += 128)
      And(halves[c], halves[c], kept, Lesser(128, lanes - c), rows, {1, 1, 0, pitch, pitch, 1});
    Barrier();
  }
  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }

  int64_t to_pitch;
  int32_t dim, width, event;
  int32_t most;                             // rows at a time
  AscendC::LocalTensor<float> wide;         // [most][width], as x
  AscendC::LocalTensor<int32_t> keep;       // [rows]: all bits set for a row that is kept, or none
  AscendC::LocalTensor<int32_t> keep_wide;  // keep, each row in a whole block
  AscendC::LocalTensor<T> x;
};

}  // namespace ascend
}  // namespace flashattn_ext
