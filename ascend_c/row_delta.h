// delta of rows that see no key outside of a task, from the products of the backward itself: the row sum of P dP~ (~:
// after dropout), minus the gradient of lse. backward_prepare.h computes delta from the rounded `out`, so that every
// dS of a row contains the rounding error of `out`. That error is all there is where a row sees one key, whose dS is 0,
// and it is multiplied by distances in the gradients of slopes.
#pragma once

#include "scores.h"

namespace flashattn_ext {
namespace ascend {

// T: type of the inputs. In fp32 the `out` of a row is accurate enough. A: the arguments of the kernel; the one
// with every option has no room for this code, so calls that combine dropout with biases or a Mask keep the given
// delta.
template <typename T, class A>
class RowDelta {
  static constexpr int32_t kGradRows = SizesOf<sizeof(T)>::kGradRows;

 public:
  static constexpr bool kUsed = sizeof(T) == 2 && A::kFindsDelta;

  __aicore__ explicit RowDelta(const A& arguments) : a(arguments) {}

  // Loads the gradient of lse of each of a chunk's rows behind its dP, where UB has two blocks that keep rows in
  // different banks. The caller orders the load against the vector unit. row: of the batch entry, or packed tensor.
  __aicore__ void Load(int64_t batch, int32_t head, int64_t row, int32_t rows,
                       const AscendC::LocalTensor<float>& dp) const {
    if (!a.dlse.data) return;
    const int64_t at = batch * a.dlse.batch_stride + head * a.dlse.head_stride + row;
    AscendC::DataCopyPad(dp[kTile], Global<float>((uint64_t)a.dlse.data, at),
                         AscendC::DataCopyExtParams(rows, 4, 0, kGradPitch / 8 - 1, 0),
                         AscendC::DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
  }

  // Whether the rows [row, row + rows) may see keys of the task only: all rows of a call with a Mask, because `Find`
  // recognises those that see others, and the vector unit is not what limits the backward.
  __aicore__ bool SeesOnly(const Task& task, int32_t row, int32_t rows) const {
    const TileMask::Range seen = TileMask(a, task.queries.length, task.keys.length).keys_of(row, row + rows);
    return a.has_intervals() || (seen.begin >= task.row && seen.end <= task.row + task.rows);
  }

  // Replaces delta of the chunk's rows, each in a whole block of `wide`, by the sum of its weights times dP~, less
  // dlse. A row whose weights do not add up to the weight of all its keys keeps the delta that was given: it sees
  // keys of other tasks, or the caller's lse includes keys of other calls. lse, given: of the rows, lse without -inf.
  // scratch: 2 * 64 fp32 for each row of the chunk. sums: 3 fp32 for each row of the largest chunk.
  __aicore__ void Find(const ScoreChunk& weights, const AscendC::LocalTensor<float>& dp, int32_t head,
                       const AscendC::LocalTensor<float>& lse, const AscendC::LocalTensor<float>& given,
                       const AscendC::LocalTensor<float>& wide, const AscendC::LocalTensor<float>& scratch,
                       const AscendC::LocalTensor<float>& sums) const {
    using namespace AscendC;
    const int32_t rows = weights.rows, columns = weights.columns();
    const uint8_t pitch = weights.layout.pitch;
    const LocalTensor<float> p = weights.s, weight = sums, delta = sums[kGradRows], key_weight = sums[2 * kGradRows],
                             second = scratch[rows * kLanes];
    static_assert(kTile == 2 * kLanes, "a chunk has one or two columns of 64");
    WeighKeys(head, lse, rows, key_weight);
    SumOfRows(weight, p, p[kLanes], pitch, rows, columns, columns, scratch);
    Mul(scratch, p, dp, kLanes, rows, {1, 1, 1, 8, pitch, pitch});
    if (columns > kLanes) Mul(second, p[kLanes], dp[kLanes], kLanes, rows, {1, 1, 1, 8, pitch, pitch});
    PipeBarrier<PIPE_V>();
    if (a.dlse.data) {  // one lane of each row
      Sub(scratch, scratch, dp[kTile], 1, rows, {1, 1, 1, 8, 8, pitch});
      PipeBarrier<PIPE_V>();
    }
    // Behind the last key weights are 0, but dP may be anything.
    SumOfRows(delta, scratch, second, 8, rows, columns, weights.keys, scratch);
    Sub(weight, weight, key_weight, rows);
    PipeBarrier<PIPE_V>();
    Abs(weight, weight, rows);
    Sub(delta, delta, given, rows);
    PipeBarrier<PIPE_V>();
    Muls(weight, weight, -kSteep, rows);
    PipeBarrier<PIPE_V>();
    Adds(weight, weight, kSteep * kWeightError, rows);
    PipeBarrier<PIPE_V>();
    Maxs(weight, weight, 0.0f, rows);
    PipeBarrier<PIPE_V>();
    Mins(weight, weight, 1.0f, rows);  // 1 where the weights add up, otherwise 0
    PipeBarrier<PIPE_V>();
    Mul(delta, delta, weight, rows);
    PipeBarrier<PIPE_V>();
    Add(delta, delta, given, rows);
    PipeBarrier<PIPE_V>();
    Brcb(wide, delta, RoundUp(rows, 8) / 8, {1, 8});
    PipeBarrier<PIPE_V>();
  }

 private:
  static constexpr float kWeightError = 1.0f / 4096;  // bound on the rounding error of a sum of weights
  static constexpr float kSteep = 17179869184.0f;     // 2^34: a difference of 2^-34 makes 0 or 1

  // The weight of all keys of each row: 1 minus that of the sink.
  __aicore__ void WeighKeys(int32_t head, const AscendC::LocalTensor<float>& lse, int32_t rows,
                            const AscendC::LocalTensor<float>& to) const {
    using namespace AscendC;
    const float sink = a.sink ? Global<float>((uint64_t)a.sink).GetValue(head) : 0.0f;
    if (!a.has_sink || sink > kHighest) {
      Duplicate(to, a.has_sink ? 0.0f : 1.0f, rows);
      PipeBarrier<PIPE_V>();
      return;
    }
    Muls(to, lse, -1.0f, rows);
    PipeBarrier<PIPE_V>();
    Adds(to, to, sink, rows);
    PipeBarrier<PIPE_V>();
    Exp(to, to, rows);
    PipeBarrier<PIPE_V>();
    Muls(to, to, -1.0f, rows);
    PipeBarrier<PIPE_V>();
    Adds(to, to, 1.0f, rows);
    PipeBarrier<PIPE_V>();
  }

  // The sum of each row: of the first `count` of so many columns, 64 of which are in `first`, the others in `second`.
  // pitch: blocks from row to row. scratch: `first`, or memory of its own if all columns count.
  __aicore__ static void SumOfRows(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& first,
                                   const AscendC::LocalTensor<float>& second, uint8_t pitch, int32_t rows,
                                   int32_t columns, int32_t count, const AscendC::LocalTensor<float>& scratch) {
    using namespace AscendC;
    if (columns > kLanes) {
      Add(scratch, first, second, count - kLanes, rows, {1, 1, 1, 8, pitch, pitch});
      PipeBarrier<PIPE_V>();
      WholeReduceSum(to, scratch, kLanes, rows, 1, 1, 8);
    } else {
      WholeReduceSum(to, first, count, rows, 1, 1, pitch);
    }
    PipeBarrier<PIPE_V>();
  }

  const A& a;
};

}  // namespace ascend
}  // namespace flashattn_ext
