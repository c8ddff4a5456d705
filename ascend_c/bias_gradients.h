// The gradients of biases, for one vector core's rows of a step: g is the gradient of the logits.
//
//   slopes         -sum g |d|, in 64 lanes; a sum of every task, head and vector core, which backward_finish.h adds up
//   relative bias  sums over diagonals: rows r, r + 8, r + 16 .. are added with a shift of whole blocks into one of 8
//                  lines, which are added to memory at the end of a step, each where its first diagonal is
//   bias           g itself, written or added
#pragma once

#include "biases.h"

namespace flashattn_ext {
namespace ascend {

__aicore__ inline int64_t RelativeSumsAt(const Arguments& a, int64_t batch, int64_t sub, int64_t head) {
  return ((batch * 2 + sub) * a.heads_q + head) * a.relative_pitch;
}
// The sums of slopes of the blocks of keys of a batch entry and head: where they begin, two for each block.
__aicore__ inline int64_t SlopeSumsAt(const Arguments& a, int64_t batch, int64_t head, const Sequence& keys) {
  if (!a.is_varlen()) return (batch * a.heads_q + head) * a.slope_blocks * 2;
  return (head * a.slope_blocks + keys.start / kRows + batch) * 2;
}

template <typename T, class A>
class BiasGradients {
  static constexpr int32_t kHalf = SizesOf<sizeof(T)>::kQueries / 2;
  static constexpr int32_t kLines = 8;
  static constexpr int32_t kSpan = kHalf - kLines + kTile;  // diagonals of a line
  static_assert(kSpan % 8 == 0 && kSpan <= kDiagonalMargin, "whole blocks");

 public:
  static constexpr int32_t kFloats = kLanes + 8 + kLines * kSpan;

  __aicore__ BiasGradients(const A& arguments, Biases<T>* biases) : a(arguments), biases(biases) {}
  __aicore__ bool any() const { return a.has_bias_gradient(); }

  __aicore__ void SetMemory(const AscendC::LocalTensor<float>& memory) {
    slope = memory;
    result = slope[kLanes];
    lines = result[8];
    AscendC::Duplicate(slope, 0.0f, kLanes);
    Barrier();
    for (int32_t e = kLinesEvent; e <= kScratchEvent; ++e) AscendC::SetFlag<AscendC::HardEvent::MTE3_V>(e);
  }
  __aicore__ void Finish() {
    for (int32_t e = kLinesEvent; e <= kScratchEvent; ++e) AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(e);
  }

  // Add leaves in its scratch what memory is to have of a bias, and gives it back. Others take it before they use it,
  // also before they call Add.
  __aicore__ void TakeScratch() {
    if (a.dbias.data) AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(kScratchEvent);
  }
  __aicore__ void GiveScratch() {
    using namespace AscendC;
    if (!a.dbias.data) return;
    SetFlag<HardEvent::V_MTE3>(kScratchEvent);
    WaitFlag<HardEvent::V_MTE3>(kScratchEvent);
    SetFlag<HardEvent::MTE3_V>(kScratchEvent);
  }

  // This vector core's rows of a step.
  __aicore__ void BeginRows() {
    if (!a.drelative_bias) return;
    AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(kLinesEvent);
    for (int32_t line = 0; line < kLines; ++line) AscendC::Duplicate(lines[line * kSpan], 0.0f, kSpan);
    Barrier();
  }
  // A chunk of these rows, which begins at `row`. `scratch`: as many fp32 as the chunk has.
  __aicore__ void Add(const Task& task, int32_t head, const ScoreChunk& chunk, int32_t row,
                      const AscendC::LocalTensor<float>& g, const AscendC::LocalTensor<float>& scratch) {
    if (a.dalibi_slopes) AddToSlope(task, chunk, g, scratch);
    if (a.drelative_bias) AddToLines(chunk, row, g);
    if (a.dbias.data) {
      if (sizeof(T) == 2 && a.dbias.dtype != DType::kFloat32)
        StoreBias<T>(task, head, chunk, g, scratch);
      else
        StoreBias<float>(task, head, chunk, g, scratch);
      AscendC::SetFlag<AscendC::HardEvent::MTE3_V>(kScratchEvent);
    }
  }
  // `row`: the first of them, within the sequence.
  __aicore__ void EndRows(const Task& task, int32_t head, int32_t row) {
    using namespace AscendC;
    if (!a.drelative_bias) return;
    SetFlag<HardEvent::V_MTE3>(kLinesEvent);
    WaitFlag<HardEvent::V_MTE3>(kLinesEvent);
    const int64_t reach = a.relative_reach, at = RelativeSumsAt(a, task.batch, GetSubBlockIdx(), head);
    const int64_t shift = TileMask(a, task.queries.length, task.keys.length).first_position();
    const int64_t first = task.row - row - shift - (kHalf - kLines);
    SetAtomicAdd<float>();
    for (int32_t line = 0; line < kLines; ++line) {
      int64_t distance = first - line;  // distance of the line's first entry
      distance = distance < -reach - kDiagonalMargin ? -reach - kDiagonalMargin : distance > reach ? reach : distance;
      PipeBarrier<PIPE_MTE3>();  // the same diagonals in the same order
      DataCopyPad(Global<float>((uint64_t)a.relative_sums, at + distance + reach + kDiagonalMargin),
                  lines[line * kSpan], DataCopyExtParams(1, kSpan * 4, 0, 0, 0));
    }
    SetAtomicNone();
    SetFlag<HardEvent::MTE3_V>(kLinesEvent);
  }
  // Called after the last rows of a task and a head.
  __aicore__ void EndHead(const Task& task, int32_t head) {
    using namespace AscendC;
    if (!a.dalibi_slopes) return;
    WaitFlag<HardEvent::MTE3_V>(kSlopeEvent);
    Barrier();
    WholeReduceSum(result, slope, kLanes, 1, 1, 1, 8);
    Barrier();
    Duplicate(slope, 0.0f, kLanes);
    SetFlag<HardEvent::V_MTE3>(kSlopeEvent);
    WaitFlag<HardEvent::V_MTE3>(kSlopeEvent);
    const int64_t at = SlopeSumsAt(a, task.batch, head, task.keys) + task.row / kRows * 2 + GetSubBlockIdx();
    DataCopyPad(Global<float>((uint64_t)a.slope_sums, at), result, DataCopyExtParams(1, 4, 0, 0, 0));
    SetFlag<HardEvent::MTE3_V>(kSlopeEvent);
    Barrier();
  }

 private:
  static constexpr int32_t kLinesEvent = 3, kSlopeEvent = 4, kScratchEvent = 5;  // from MTE3 to V

  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }

  __aicore__ void AddToSlope(const Task& task, const ScoreChunk& chunk, const AscendC::LocalTensor<float>& g,
                             const AscendC::LocalTensor<float>& scratch) {
    const uint8_t pitch = chunk.layout.pitch;
    biases->Distances(task, chunk, 0, chunk.rows, scratch);
    AscendC::Mul(scratch, scratch, g, kLanes, chunk.repeats(), {1, 1, 1, 8, 8, 8});
    Barrier();
    for (int32_t c = 0; c < chunk.keys; c += kLanes) {
      AscendC::Add(slope, scratch[c], slope, Lesser(kLanes, chunk.keys - c), chunk.rows, {1, 1, 1, 0, pitch, 0});
      Barrier();
    }
  }

  // Entry x of line k is the distance (task.row - row - shift) - k - (kHalf - kLines) + x, of the first row of a step.
  __aicore__ void AddToLines(const ScoreChunk& chunk, int32_t row, const AscendC::LocalTensor<float>& g) {
    const uint8_t pitch = chunk.layout.pitch, line = kSpan / 8;
    for (int32_t r = 0; r < chunk.rows; r += kLines) {
      const int32_t begin = kHalf - kLines - (row + r);
      for (int32_t c = 0; c < chunk.keys; c += kLanes)
        AscendC::Add(lines[begin + c], lines[begin + c], g[r * pitch * 8 + c], Lesser(kLanes, chunk.keys - c),
                     Lesser(kLines, chunk.rows - r), {1, 1, 1, line, line, pitch});
      Barrier();
    }
  }

  template <typename U>
  __aicore__ void StoreBias(const Task& task, int32_t head, const ScoreChunk& chunk,
                            const AscendC::LocalTensor<float>& g, const AscendC::LocalTensor<float>& scratch) {
    using namespace AscendC;
    constexpr int32_t kElement = sizeof(U);
    const BiasView& view = a.dbias;
    const bool one_row = a.seqlen_q > 1 && view.row_stride == 0;
    const bool adds = one_row || (a.batch > 1 && view.batch_stride == 0) || (a.heads_q > 1 && view.head_stride == 0);
    const LocalTensor<U> values = scratch.template ReinterpretCast<U>();
    const uint8_t pitch = chunk.layout.pitch;
    if (one_row) {
      Duplicate(scratch, 0.0f, chunk.columns());
      Barrier();
      for (int32_t c = 0; c < chunk.columns(); c += kLanes)
        AscendC::Add(scratch[c], g[c], scratch[c], kLanes, chunk.rows, {1, 1, 1, 0, pitch, 0});
    } else {
      RoundRepeats(values, g, chunk.repeats());
    }
    SetFlag<HardEvent::V_MTE3>(kScratchEvent);
    WaitFlag<HardEvent::V_MTE3>(kScratchEvent);
    const int64_t at =
        task.batch * view.batch_stride + head * view.head_stride + chunk.row * view.row_stride + chunk.key;
    const GlobalTensor<U> to = Global<U>((uint64_t)view.data, at);
    const int64_t gap = (view.row_stride - chunk.keys) * kElement;
    const int32_t rows = one_row ? 1 : chunk.rows;
    const bool together = rows == 1 || (gap >= 0 && gap < int64_t{1} << 31);
    if (adds) SetAtomicAdd<float>();
    for (int32_t r = 0; r < rows; r += together ? rows : 1)
      DataCopyPad(to[r * view.row_stride], values[r * pitch * 8],
                  DataCopyExtParams(together ? rows : 1, chunk.keys * kElement,
                                    (pitch * 8 * kElement - RoundUp(chunk.keys * kElement, 32)) / 32,
                                    rows > 1 && together ? gap : 0, 0));
    if (adds) SetAtomicNone();
  }

  const A& a;
  Biases<T>* biases;
  AscendC::LocalTensor<float> slope;   // one repeat
  AscendC::LocalTensor<float> result;  // one block
  AscendC::LocalTensor<float> lines;   // [kLines][kSpan]
};

}  // namespace ascend
}  // namespace flashattn_ext
