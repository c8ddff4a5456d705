// What happens to scores between two products, a chunk of rows at a time in UB: OnlineSoftmax::Weigh turns them into
// weights in the forward; Weigh with a known lse does so in the backward, where Differentiate then turns the gradient
// of the weights into that of the scores. csrc/score.h says what a score is.
//
// The vector unit's exponential has base e, so that both keep the logit itself of a product, in natural units.
#pragma once

#include "biases.h"
#include "intervals.h"
#include "philox.h"

namespace flashattn_ext {
namespace ascend {

// UB for what is computed on the way, so many fp32.
struct Scratch {
  AscendC::LocalTensor<float> data;
  int32_t floats;
};

// 1 + c1 x + c2 x^2 + c3 x^3 + c4 x^4.
__aicore__ inline void Polynomial(const AscendC::LocalTensor<float>& sum, const AscendC::LocalTensor<float>& x,
                                  uint8_t repeats, float c4, float c3, float c2, float c1) {
  using namespace AscendC;
  Muls(sum, x, c4, kLanes, repeats, {1, 1, 8, 8});
  PipeBarrier<PIPE_V>();
  FLASHATTN_ROLLED for (int32_t k = 3; k > 0; --k) {
    Adds(sum, sum, k == 3 ? c3 : k == 2 ? c2 : c1, kLanes, repeats, {1, 1, 8, 8});
    PipeBarrier<PIPE_V>();
    Mul(sum, sum, x, kLanes, repeats, {1, 1, 1, 8, 8, 8});
    PipeBarrier<PIPE_V>();
  }
  Adds(sum, sum, 1.0f, kLanes, repeats, {1, 1, 8, 8});
  PipeBarrier<PIPE_V>();
}

// Products to capped logits, cap * tanh(product * inner). With an
// exponential, tanh y is 1 - 2 / (exp(2 y) + 1), whose error of some 1e-7 is nothing beside that of 16-bit inputs
// unless the cap is large. Otherwise it is a quotient of polynomials of y^2, fitted to a relative error of 2e-8 up to
// |y| = 9, beyond which tanh y is 1 in fp32.
template <typename T>
__aicore__ inline void CapLogits(const Arguments& a, const ScoreChunk& chunk, const Scratch& scratch) {
  using namespace AscendC;
  const UnaryRepeatParams dense(1, 1, 8, 8);
  const LocalTensor<float> s = chunk.s;
  const uint8_t all = chunk.repeats();
  constexpr float kLargeCap = 1000.0f;
  if (sizeof(T) == 2 && a.cap <= kLargeCap) {
    const LocalTensor<float> numerator = scratch.data;
    Duplicate(numerator, -2 * a.cap, 8);
    Muls(s, s, 2 * a.inner, kLanes, all, dense);
    PipeBarrier<PIPE_V>();
    Exp(s, s, kLanes, all, dense);
    PipeBarrier<PIPE_V>();
    Adds(s, s, 1.0f, kLanes, all, dense);
    PipeBarrier<PIPE_V>();
    Div(s, numerator, s, kLanes, all, {1, 0, 1, 8, 0, 8});
    PipeBarrier<PIPE_V>();
    Adds(s, s, a.cap, kLanes, all, dense);
    PipeBarrier<PIPE_V>();
    return;
  }
  Muls(s, s, a.inner, kLanes, all, dense);
  PipeBarrier<PIPE_V>();
  Mins(s, s, 9.0f, kLanes, all, dense);
  PipeBarrier<PIPE_V>();
  Maxs(s, s, -9.0f, kLanes, all, dense);
  PipeBarrier<PIPE_V>();
  const int32_t most = scratch.floats / (2 * kLanes);
  for (int32_t done = 0; done < all; done += most) {
    const uint8_t some = Lesser(most, all - done);
    const LocalTensor<float> y = s[done * kLanes], square = scratch.data, sum = scratch.data[most * kLanes];
    Mul(square, y, y, kLanes, some, {1, 1, 1, 8, 8, 8});
    PipeBarrier<PIPE_V>();
    Polynomial(sum, square, some, 1.335498556187531e-08f, 2.060934275505133e-05f, 3.495605196803808e-03f,
               1.338104009628296e-01f);
    Mul(y, y, sum, kLanes, some, {1, 1, 1, 8, 8, 8});
    PipeBarrier<PIPE_V>();
    Polynomial(sum, square, some, 7.776698680572736e-07f, 3.285661805421114e-04f, 2.587704919278622e-02f,
               4.671435654163361e-01f);
    Div(y, y, sum, kLanes, some, {1, 1, 1, 8, 8, 8});
    PipeBarrier<PIPE_V>();
  }
  Muls(s, s, a.cap, kLanes, all, dense);
  PipeBarrier<PIPE_V>();
}

// The derivative of a capped logit by the logit: 1 - (logit / cap)^2.
__aicore__ inline void SlopeOfCap(const Arguments& a, const ScoreChunk& chunk,
                                  const AscendC::LocalTensor<float>& slope) {
  using namespace AscendC;
  const uint8_t all = chunk.repeats();
  Muls(slope, chunk.s, 1 / a.cap, kLanes, all, {1, 1, 8, 8});
  PipeBarrier<PIPE_V>();
  Mul(slope, slope, slope, kLanes, all, {1, 1, 1, 8, 8, 8});
  PipeBarrier<PIPE_V>();
  Muls(slope, slope, -1.0f, kLanes, all, {1, 1, 8, 8});
  PipeBarrier<PIPE_V>();
  Adds(slope, slope, 1.0f, kLanes, all, {1, 1, 8, 8});
}

// Products to logits without biases.
template <typename T>
__aicore__ inline void ScaleProducts(const Arguments& a, const ScoreChunk& chunk, const Scratch& scratch) {
  if (a.cap > 0) return CapLogits<T>(a, chunk, scratch);
  AscendC::Muls(chunk.s, chunk.s, a.score.softmax_scale, kLanes, chunk.repeats(), {1, 1, 8, 8});
  AscendC::PipeBarrier<PIPE_V>();
}

// Biases are added, and what is hidden becomes -inf.
template <typename T>
__aicore__ inline void BiasAndHide(const Arguments& a, const Task& task, int32_t head, const ScoreChunk& chunk,
                                   Biases<T>* biases, Intervals* intervals, const Scratch& scratch) {
  if (a.has_bias()) biases->Add(task, head, chunk, scratch.data, scratch.floats);
  HideScores(TileMask(a, task.queries.length, task.keys.length), chunk.row, chunk.rows, chunk.key, chunk.keys, chunk.s,
             chunk.layout);
  if (a.has_intervals()) intervals->Hide(chunk, scratch.data);
}

// Zeros into what is hidden of weights or gradients, where hidden scores were not finite (isolation.h).
__aicore__ inline void ClearHidden(const Arguments& a, const Task& task, const ScoreChunk& chunk, Intervals* intervals,
                                   const AscendC::LocalTensor<float>& scratch) {
  HideScores(TileMask(a, task.queries.length, task.keys.length), chunk.row, chunk.rows, chunk.key, chunk.keys, chunk.s,
             chunk.layout, 0.0f);
  intervals->Hide<Hidden::kZero>(chunk, scratch);
}

// The running maximum and sum of the rows that one vector core has of the tasks in flight, and the weights of a chunk.
template <typename T>
class OnlineSoftmax {
  using Sizes = SizesOf<sizeof(T)>;
  static constexpr int32_t kHalf = kRows / 2, kChunkRows = Sizes::kChunkRows, kPitch = Sizes::kPitch;
  static constexpr int32_t kPitchBlocks = kPitch / 8;

 public:
  static constexpr int32_t kFloats = (2 * kStatisticsRing + kSlots) * kHalf + 2 * kChunkRows;

  __aicore__ OnlineSoftmax(const Arguments& arguments, Biases<T>* biases, Intervals* intervals)
      : a(arguments), biases(biases), intervals(intervals) {}

  // memory: kFloats. wide: a whole block for each row of a chunk, needed within Weigh alone.
  __aicore__ void SetMemory(const AscendC::LocalTensor<float>& memory, const AscendC::LocalTensor<float>& wide) {
    row_shift = memory;
    row_sum = row_shift[kStatisticsRing * kHalf];
    decay = row_sum[kStatisticsRing * kHalf];
    chunk_shift = decay[kSlots * kHalf];
    chunk_sum = chunk_shift[kChunkRows];
    chunk_wide = wide;
    // Lanes beyond the last row are computed with and never used: they must hold something.
    AscendC::Duplicate(chunk_shift, 0.0f, kChunkRows);
    AscendC::Duplicate(decay, 0.0f, kSlots * kHalf);
  }

  // Statistics of the rows of a task: the negated maximum of the logits, and the sum of the weights relative to that
  // maximum.
  __aicore__ AscendC::LocalTensor<float> Shift(const Task& task) const { return row_shift[At(task)]; }
  __aicore__ AscendC::LocalTensor<float> Sum(const Task& task) const { return row_sum[At(task)]; }
  // What the maximum that a step found makes of everything summed before that step, for each row.
  __aicore__ AscendC::LocalTensor<float> Decay(int32_t slot) const { return decay[slot * kHalf]; }

  __aicore__ float Sink(const Task& task) const {
    return a.sink ? Global<float>((uint64_t)a.sink).GetValue(task.head) : 0.0f;
  }
  // The sink is a logit that every row has seen before the first key.
  __aicore__ void Begin(const Task& task) {
    float logit = kLowest, sum = 0.0f;
    if (a.has_sink) {
      const float sink = Sink(task);
      const bool counts = !(sink < kLowest);
      logit = counts ? (sink > kHighest ? kHighest : sink) : kLowest;
      sum = counts ? 1.0f : 0.0f;
    }
    AscendC::Duplicate(Shift(task), -logit, kHalf);
    AscendC::Duplicate(Sum(task), sum, kHalf);
    Barrier();
  }

  // Products to weights in the type of an input, kept or dropped. `row`: the chunk's first among the rows of this
  // vector core. `group`: the first of the generator's groups of rows that were drawn for it. `not_finite`: NaN for the
  // keys of the step whose value is not finite, where the step isolates them; otherwise unused.
  __aicore__ void Weigh(const Step& step, const ScoreChunk& chunk, int32_t row, const AscendC::LocalTensor<T>& weights,
                        Dropout* dropout, int32_t group, const AscendC::LocalTensor<float>& not_finite) {
    using namespace AscendC;
    const LocalTensor<float> s = chunk.s;
    const LocalTensor<float> tree = weights.template ReinterpretCast<float>();  // until the weights are there
    const int32_t rows = chunk.rows, columns = chunk.columns();
    const uint8_t all = chunk.repeats();
    const Scratch scratch = {tree, kChunkRows * kPitch * int32_t(sizeof(T)) / 4};
    ScaleProducts<T>(a, chunk, scratch);
    BiasAndHide(a, step.task, step.task.head, chunk, biases, intervals, scratch);
    Update(Shift(step.task)[row], Decay(step.slot)[row], s, rows, columns, tree);
    for (int32_t c = 0; c < columns; c += kLanes)
      Add(s[c], s[c], chunk_wide, kLanes, rows, {1, 1, 0, kPitchBlocks, kPitchBlocks, 1});
    Barrier();
    const LocalTensor<float> sum = Sum(step.task)[row];
    Exp(s, s, kLanes, all, {1, 1, 8, 8});
    Barrier();
    Reduce<false>(chunk_sum, s, rows, columns, tree);
    FusedMulAdd(sum, Decay(step.slot)[row], chunk_sum, rows, 1, {1, 1, 1, 8, 8, 8});
    if (a.has_dropout() && !Pairs<T>(a)) {
      const int32_t groups = (rows + kGroupRows - 1) / kGroupRows;
      const int32_t most = scratch.floats / Dropout::MasksOf(groups), across = columns / kLanes;
      for (int32_t key = 0; key < across; key += most)
        dropout->Apply(s[key * kLanes], kPitchBlocks, tree.template ReinterpretCast<int32_t>(), group, groups, key,
                       Lesser(most, across - key));
    }
    if (step.isolates) {
      for (int32_t c = 0; c < columns; c += kLanes)
        Add(s[c], s[c], not_finite[c], kLanes, rows, {1, 1, 1, kPitchBlocks, kPitchBlocks, 0});
      Barrier();
      ClearHidden(a, step.task, chunk, intervals, tree);
    }
    RoundRepeats(weights, s, all);
    if constexpr (sizeof(T) == 2) {
      if (Pairs<T>(a))
        dropout->ApplyRounded(weights.template ReinterpretCast<uint16_t>(), kPitchBlocks / 2,
                              s.template ReinterpretCast<int32_t>(), group);
    }
  }

  // The same of rows from which a Mask hides everything of the step: without their scores.
  __aicore__ void WeighNothing(const Step& step, int32_t row, int32_t rows, const AscendC::LocalTensor<T>& weights) {
    Barrier();
    AscendC::Duplicate(Decay(step.slot)[row], 1.0f, rows);
    AscendC::Duplicate(weights.template ReinterpretCast<uint16_t>(), uint16_t(0),
                       rows * kPitch * int32_t(sizeof(T)) / 2);
    Barrier();
  }
  __aicore__ bool SeesNothing(const Step& step, int32_t row, int32_t rows) const {
    if (!a.has_intervals()) return false;
    const TileMask::Range seen = TileMask(a, step.task.queries.length, step.task.keys.length).keys_of(row, row + rows);
    return intervals->HidesAll(row, rows, Greater(0, seen.begin - step.key), Lesser(step.keys, seen.end - step.key));
  }

 private:
  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }
  __aicore__ static int32_t At(const Task& task) { return task.number % kStatisticsRing * kHalf; }

  // The shift, which is added to logits, becomes the negated maximum of old and new ones, chunk_wide the same in whole
  // blocks, and chunk_decay exp(old - new maximum). The last two instructions go beside the caller's next ones.
  __aicore__ void Update(const AscendC::LocalTensor<float>& shift, const AscendC::LocalTensor<float>& chunk_decay,
                         const AscendC::LocalTensor<float>& s, int32_t rows, int32_t columns,
                         const AscendC::LocalTensor<float>& tree) {
    using namespace AscendC;
    Reduce<true>(chunk_shift, s, rows, columns, tree);
    Muls(chunk_shift, chunk_shift, -1.0f, rows);
    Barrier();
    Min(chunk_shift, chunk_shift, shift, rows);
    Barrier();
    Sub(chunk_decay, chunk_shift, shift, rows);
    Brcb(chunk_wide, chunk_shift, RoundUp(rows, 8) / 8, {1, 8});
    Barrier();
    Exp(chunk_decay, chunk_decay, rows);
    Adds(shift, chunk_shift, 0.0f, rows);
  }

  // The maximum or sum of each row: of columns of 64, pair by pair, then of the blocks of the last one, and of those.
  template <bool maximum>
  __aicore__ void Reduce(const AscendC::LocalTensor<float>& result, const AscendC::LocalTensor<float>& s, int32_t rows,
                         int32_t columns, const AscendC::LocalTensor<float>& tree) {
    const uint8_t pitch = kPitchBlocks;
    const int32_t parts = columns / kLanes, part = rows * kLanes;
    int32_t pairs = parts / 2;
    for (int32_t i = 0; i < pairs; ++i)
      Combine<maximum>(tree[i * part], s[2 * i * kLanes], s[(2 * i + 1) * kLanes], rows, {1, 1, 1, 8, pitch, pitch});
    Barrier();
    if (pairs > 0 && parts % 2) {
      Combine<maximum>(tree, tree, s[(parts - 1) * kLanes], rows, {1, 1, 1, 8, 8, pitch});
      Barrier();
    }
    while (pairs > 1) {
      const int32_t half = pairs / 2;
      pairs -= half;
      Combine<maximum>(tree, tree, tree[pairs * part], half * rows, {1, 1, 1, 8, 8, 8});
      Barrier();
    }
    const AscendC::LocalTensor<float> last = pairs ? tree : s;
    const uint8_t last_pitch = pairs ? kLanes / 8 : kPitchBlocks;
    const AscendC::LocalTensor<float> blocks = tree[kChunkRows * kLanes];  // a result of each, so 8 a row
    static_assert((kLanes + 8) * 4 <= kPitch * int32_t(sizeof(T)), "they lie in P's buffer");
    uint64_t all[2] = {~uint64_t(0), 0};
    if constexpr (maximum) {
      AscendC::BlockReduceMax(blocks, last, rows, all, 1, 1, last_pitch);
      Barrier();
      ReduceRows<maximum>(result, blocks, rows, all[0]);
    } else if (sizeof(T) == 4 || Pairs<T>(a)) {  // no pairs, or the blocks hold them
      AscendC::BlockReduceSum(blocks, last, rows, all, 1, 1, last_pitch);
      Barrier();
      ReduceRows<maximum>(result, blocks, rows, all[0]);
    } else {
      // In the same order as with paired columns, for the same bits: first the k-th and the (8 + k)-th of 16.
      uint64_t half[2] = {all[0] >> 32, 0};
      AscendC::Add(tree, last, last[8], half, rows, {2, 2, 2, kLanes / 8, last_pitch, last_pitch});
      Barrier();
      AscendC::BlockReduceSum(blocks, tree, rows, half, 1, 2, kLanes / 8);
      Barrier();
      ReduceRows<maximum>(result, blocks, rows, 0x0f0f0f0f0f0f0f0fu);
    }
    Barrier();
  }

  // A row's results, 8 or fewer lanes a block.
  template <bool maximum>
  __aicore__ void ReduceRows(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& blocks,
                             int32_t rows, uint64_t lanes) {
    const int32_t whole = rows / 8;
    uint64_t mask[2] = {lanes, 0}, rest[2] = {lanes & ((uint64_t(1) << rows % 8 * 8) - 1), 0};
    if constexpr (maximum) {
      if (whole) AscendC::BlockReduceMax(to, blocks, whole, mask, 1, 1, 8);
      if (rest[0]) AscendC::BlockReduceMax(to[whole * 8], blocks[whole * kLanes], 1, rest, 1, 1, 8);
    } else {
      if (whole) AscendC::BlockReduceSum(to, blocks, whole, mask, 1, 1, 8);
      if (rest[0]) AscendC::BlockReduceSum(to[whole * 8], blocks[whole * kLanes], 1, rest, 1, 1, 8);
    }
  }

  template <bool maximum>
  __aicore__ void Combine(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& x,
                          const AscendC::LocalTensor<float>& y, int32_t rows,
                          const AscendC::BinaryRepeatParams& blocks) {
    if constexpr (maximum)
      AscendC::Max(to, x, y, kLanes, rows, blocks);
    else
      AscendC::Add(to, x, y, kLanes, rows, blocks);
  }

  const Arguments& a;
  Biases<T>* biases;
  Intervals* intervals;
  AscendC::LocalTensor<float> row_shift, row_sum;                  // [kStatisticsRing][kHalf]
  AscendC::LocalTensor<float> decay;                               // [kSlots][kHalf]
  AscendC::LocalTensor<float> chunk_shift, chunk_sum, chunk_wide;  // [kChunkRows], the last one in whole blocks
};

// The backward's weights, with the known lse: exp(logit - lse). `lse`: of the chunk's rows, each in a whole block.
__aicore__ inline void Weigh(const ScoreChunk& chunk, const AscendC::LocalTensor<float>& lse) {
  using namespace AscendC;
  const uint8_t pitch = chunk.layout.pitch;
  for (int32_t c = 0; c < chunk.columns(); c += kLanes)
    Sub(chunk.s[c], chunk.s[c], lse, kLanes, chunk.rows, {1, 1, 0, pitch, pitch, 1});
  PipeBarrier<PIPE_V>();
  Exp(chunk.s, chunk.s, kLanes, chunk.repeats(), {1, 1, 8, 8});
  PipeBarrier<PIPE_V>();
}

// The memory that Differentiate needs for dropout: as many fp32 as a chunk has, and Dropout::MasksOf the chunk's tiles.
struct DropoutScratch {
  AscendC::LocalTensor<float> product;
  AscendC::LocalTensor<int32_t> masks;
};

// dP to dS / softmax_scale = P (dP~ - delta), in place, and P to P~ (~: after dropout). `delta`: of the chunk's rows,
// each in a whole block. `group`: the first of the generator's groups of rows that were drawn for the chunk.
__aicore__ inline void Differentiate(const Arguments& a, const ScoreChunk& weights,
                                     const AscendC::LocalTensor<float>& gradients,
                                     const AscendC::LocalTensor<float>& delta, Dropout* dropout,
                                     const DropoutScratch& scratch, int32_t group) {
  using namespace AscendC;
  const LocalTensor<float> p = weights.s, ds = gradients;
  const uint8_t all = weights.repeats(), pitch = weights.layout.pitch;
  const int32_t rows = weights.rows, columns = weights.columns();
  const BinaryRepeatParams dense(1, 1, 1, 8, 8, 8), by_row(1, 1, 0, pitch, pitch, 1);
  if (a.has_dropout()) {  // P~ dP / p_keep - P delta
    const LocalTensor<float> product = scratch.product;
    for (int32_t c = 0; c < columns; c += kLanes) Mul(product[c], p[c], delta, kLanes, rows, by_row);
    dropout->Apply(p, pitch, scratch.masks, group, (rows + kGroupRows - 1) / kGroupRows, 0, columns / kLanes);
    Muls(ds, ds, a.inverse_keep, kLanes, all, {1, 1, 8, 8});
    PipeBarrier<PIPE_V>();
    Mul(ds, ds, p, kLanes, all, dense);
    PipeBarrier<PIPE_V>();
    Sub(ds, ds, product, kLanes, all, dense);
  } else {
    for (int32_t c = 0; c < columns; c += kLanes) Sub(ds[c], ds[c], delta, kLanes, rows, by_row);
    PipeBarrier<PIPE_V>();
    Mul(ds, ds, p, kLanes, all, dense);
  }
  PipeBarrier<PIPE_V>();
}

}  // namespace ascend
}  // namespace flashattn_ext
