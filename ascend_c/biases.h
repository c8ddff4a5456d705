// Biases, which are added to a logit by its position (csrc/rules/bias.h), on the vector core: ALiBi from the numbers of
// rows and keys; a relative bias and a bias of any shape from GM, a few rows of a chunk at a time.
#pragma once

#include "vector.h"

namespace flashattn_ext {
namespace ascend {

// A chunk of scores in UB: its rows of queries against the keys of a step, all counted within their sequence.
struct ScoreChunk {
  AscendC::LocalTensor<float> s;
  ScoreLayout layout;
  int32_t row, rows;
  int32_t key, keys;

  // fp32 per row, in whole repeats.
  __aicore__ int32_t columns() const { return RoundUp(keys, kLanes); }
  // The chunk is contiguous: an operation without a per-row operand covers it with this number of repeats.
  __aicore__ uint8_t repeats() const { return RepeatsOf(rows); }
  __aicore__ uint8_t RepeatsOf(int32_t some_rows) const {
    return ((some_rows - 1) * layout.pitch + columns() / 8 + 7) / 8;
  }
};

// T: type of the inputs. A bias may have it too.
template <typename T>
class Biases {
 public:
  // Rows of scores in a piece, for which a bias is in UB at a time. Two pieces are in flight; a third holds the fp32
  // values of a 16-bit bias.
  __aicore__ static constexpr int32_t PieceRows(int32_t pitch) { return pitch > 264 ? 2 : 3; }
  // The fp32 values that SetMemory needs, for chunks of at most this many rows and keys.
  __aicore__ static constexpr int32_t FloatsOf(int32_t rows, int32_t keys, int32_t pitch) {
    return keys + 8 * rows + 3 * PieceRows(pitch) * pitch;
  }

  __aicore__ explicit Biases(const Arguments& arguments) : a(arguments) {}

  __aicore__ void SetMemory(const AscendC::LocalTensor<float>& memory, int32_t rows, int32_t keys, int32_t pitch) {
    using namespace AscendC;
    piece_rows = PieceRows(pitch);
    piece_floats = piece_rows * pitch;
    key_numbers = memory;
    row_numbers = key_numbers[keys];
    pieces = row_numbers[8 * rows];
    CountLanes(key_numbers);
    for (int32_t at = kLanes; at < keys; at += kLanes)
      Adds(key_numbers[at], key_numbers, float(at), kLanes, 1, {1, 1, 8, 8});
    Barrier();
    // -r for row r, in every lane of a block.
    Muls(pieces, key_numbers, -1.0f, RoundUp(rows, 8));
    Barrier();
    Brcb(row_numbers, pieces, RoundUp(rows, 8) / 8, {1, 8});
    Barrier();
    Duplicate(pieces, 0.0f,
              3 * piece_floats);  // lanes without a load are added to unused scores, so they must be finite
    Barrier();
    for (int32_t e = 0; e < 2; ++e) SetFlag<HardEvent::V_MTE2>(kPieceEvent + e);
  }
  __aicore__ void Finish() {
    for (int32_t e = 0; e < 2; ++e) AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(kPieceEvent + e);
  }

  // Adds all biases to the logits of a chunk of a query head. `scratch`: fp32, at least as many as a row needs.
  __aicore__ void Add(const Task& task, int32_t head, const ScoreChunk& chunk,
                      const AscendC::LocalTensor<float>& scratch, int32_t scratch_floats) {
    if (a.alibi_slopes) {
      const int32_t most = scratch_floats / (8 * chunk.layout.pitch);
      for (int32_t row = 0; row < chunk.rows; row += most) {
        const int32_t rows = Lesser(most, chunk.rows - row);
        Distances(task, chunk, row, rows, scratch);
        AscendC::Axpy(chunk.s[row * chunk.layout.pitch * 8], scratch, -Slope(task, head), kLanes, chunk.RepeatsOf(rows),
                      {1, 1, 8, 8});
        Barrier();
      }
    }
    if (a.relative_bias) AddRelative(task, head, chunk);
    if (a.bias.data) AddDense(task, head, chunk);
  }

  // |j - i - shift| for rows of a chunk from `row` on, at its pitch.
  __aicore__ void Distances(const Task& task, const ScoreChunk& chunk, int32_t row, int32_t rows,
                            const AscendC::LocalTensor<float>& to) {
    using namespace AscendC;
    const uint8_t pitch = chunk.layout.pitch;
    for (int32_t c = 0; c < chunk.columns(); c += kLanes)
      AscendC::Add(to[c], key_numbers[c], row_numbers, kLanes, rows, {1, 1, 0, pitch, 0, 1});
    Barrier();
    Adds(to, to, float(Distance(task, chunk, row)), kLanes, chunk.RepeatsOf(rows), {1, 1, 8, 8});
    Barrier();
    Abs(to, to, kLanes, chunk.RepeatsOf(rows), {1, 1, 8, 8});
    Barrier();
  }

 private:
  static constexpr int32_t kPieceEvent = 3;  // between MTE2 and V; and 4

  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }
  __aicore__ float Slope(const Task& task, int32_t head) const {
    return Global<float>((uint64_t)a.alibi_slopes).GetValue(task.batch * a.alibi_batch_stride + head);
  }
  // j - i - shift of a row of a chunk and its first key.
  __aicore__ int32_t Distance(const Task& task, const ScoreChunk& chunk, int32_t row) const {
    return chunk.key - (chunk.row + row) - TileMask(a, task.queries.length, task.keys.length).first_position();
  }

  __aicore__ void AddRelative(const Task& task, int32_t head, const ScoreChunk& chunk) {
    using namespace AscendC;
    const int32_t reach = Lesser(a.relative_reach, kFarthest), pitch = chunk.layout.pitch * 8;
    const GlobalTensor<float> entries = Global<float>((uint64_t)a.relative_bias, head * (2 * a.relative_reach + 1));
    const float below = entries.GetValue(0), above = entries.GetValue(2 * a.relative_reach);
    const int32_t first = Distance(task, chunk, 0);
    if (first - (chunk.rows - 1) >= reach || first + chunk.keys - 1 <= -reach) {  // the chunk has one value
      Adds(chunk.s, chunk.s, first >= reach ? above : below, kLanes, chunk.repeats(), {1, 1, 8, 8});
      return Barrier();
    }
    for (int32_t row = 0; row < chunk.rows; row += piece_rows) {
      const int32_t rows = Lesser(piece_rows, chunk.rows - row), which = piece++ % 2;
      const LocalTensor<float> values = pieces[which * piece_floats];
      WaitFlag<HardEvent::V_MTE2>(kPieceEvent + which);
      for (int32_t r = 0; r < rows; ++r) {
        const Inside inside(first - row - r, chunk.keys, reach);
        if (inside.begin == inside.end) continue;
        const int32_t before = inside.begin % 8;
        DataCopyPad(values[r * pitch + inside.begin - before],
                    entries[first - row - r + inside.begin + a.relative_reach],
                    DataCopyExtParams(1, (inside.end - inside.begin) * 4, 0, 0, 0),
                    DataCopyPadExtParams<float>(true, before, 0, 0.0f));
      }
      SetFlag<HardEvent::MTE2_V>(kPieceEvent + which);
      WaitFlag<HardEvent::MTE2_V>(kPieceEvent + which);
      FLASHATTN_ROLLED for (int32_t side = 0; side < 2; ++side) {  // below, then above
        for (int32_t r = 0; r < rows; ++r) {
          const Inside inside(first - row - r, chunk.keys, reach);
          if (side ? inside.end < chunk.keys : inside.begin > 0)
            FillOutside(values[r * pitch], chunk, side ? 0 : inside.begin, side ? inside.end : chunk.columns(),
                        side ? above : below);
        }
        Barrier();  // both fills may end in the same block
      }
      AddPiece(chunk, row, rows, values);
      SetFlag<HardEvent::V_MTE2>(kPieceEvent + which);
    }
    Barrier();
  }
  static constexpr int64_t kFarthest = int64_t{1} << 30;  // beyond every sequence
  // The keys [begin, end) of a row within the reach: with an entry of their own, or the entry of the reach itself.
  struct Inside {
    int32_t begin, end;
    __aicore__ Inside(int32_t first, int32_t keys, int32_t reach)
        : begin(Lesser(keys, Greater(0, -reach - first))), end(Greater(begin, Lesser(keys, reach + 1 - first))) {}
  };
  __aicore__ static void FillOutside(const AscendC::LocalTensor<float>& line, const ScoreChunk& chunk, int32_t begin,
                                     int32_t end, float value) {
    ascend::FillOutside(line, {chunk.layout.pitch, false}, 1, 0, chunk.columns(), begin, end, value);
  }

  // Pieces are copied as 16-bit units, two of which are one fp32, so that one copy of the code has both types.
  __aicore__ void AddDense(const Task& task, int32_t head, const ScoreChunk& chunk) {
    using namespace AscendC;
    const bool narrow = sizeof(T) == 2 && a.bias.dtype != DType::kFloat32;
    const int32_t units = narrow ? 1 : 2, bytes = 2 * units;  // sizes of an element
    const int64_t at = task.batch * a.bias.batch_stride + head * a.bias.head_stride + chunk.key;
    const GlobalTensor<uint16_t> values = Global<uint16_t>((uint64_t)a.bias.data, at * units);
    const int32_t pitch = chunk.layout.pitch * 8;
    const DataCopyPadExtParams<uint16_t> no_padding(false, 0, 0, 0);
    const int64_t gap = (a.bias.row_stride - chunk.keys) * bytes;
    const bool together = gap >= 0 && gap < kFarthest;
    for (int32_t row = 0; row < chunk.rows; row += piece_rows) {
      const int32_t rows = Lesser(piece_rows, chunk.rows - row), which = piece++ % 2;
      const LocalTensor<float> arrived = pieces[which * piece_floats];
      const LocalTensor<uint16_t> loaded = arrived.ReinterpretCast<uint16_t>();
      WaitFlag<HardEvent::V_MTE2>(kPieceEvent + which);
      for (int32_t r = 0; r < rows; r += together ? rows : 1)
        DataCopyPad(loaded[r * pitch * units], values[(chunk.row + row + r) * a.bias.row_stride * units],
                    DataCopyExtParams(together ? rows : 1, chunk.keys * bytes, together ? gap : 0,
                                      (pitch * bytes - RoundUp(chunk.keys * bytes, 32)) / 32, 0),
                    no_padding);
      SetFlag<HardEvent::MTE2_V>(kPieceEvent + which);
      WaitFlag<HardEvent::MTE2_V>(kPieceEvent + which);
      if constexpr (sizeof(T) == 2) {
        if (narrow) {
          Cast(pieces[2 * piece_floats], arrived.ReinterpretCast<T>(), RoundMode::CAST_NONE, rows * pitch);
          Barrier();
        }
      }
      AddPiece(chunk, row, rows, narrow ? pieces[2 * piece_floats] : arrived);
      if (narrow) Barrier();
      SetFlag<HardEvent::V_MTE2>(kPieceEvent + which);
    }
    Barrier();
  }

  // Instructions loop over the shorter side of a piece.
  __aicore__ static void AddPiece(const ScoreChunk& chunk, int32_t row, int32_t rows,
                                  const AscendC::LocalTensor<float>& values) {
    const uint8_t pitch = chunk.layout.pitch;
    const AscendC::LocalTensor<float> s = chunk.s[row * pitch * 8];
    if (rows * kLanes < chunk.columns()) {
      for (int32_t r = 0; r < rows; ++r) {
        const int32_t at = r * pitch * 8;
        AscendC::Add(s[at], s[at], values[at], kLanes, chunk.columns() / kLanes, {1, 1, 1, 8, 8, 8});
      }
    } else {
      for (int32_t c = 0; c < chunk.columns(); c += kLanes)
        AscendC::Add(s[c], s[c], values[c], kLanes, rows, {1, 1, 1, pitch, pitch, pitch});
    }
  }

  const Arguments& a;
  int32_t piece = 0, piece_rows = 0, piece_floats = 0;
  AscendC::LocalTensor<float> key_numbers;  // 0, 1, 2 ..
  AscendC::LocalTensor<float> row_numbers;  // 0, -1, -2 .., each in a whole block
  AscendC::LocalTensor<float> pieces;
};

}  // namespace ascend
}  // namespace flashattn_ext
