// The arithmetic on scores between two products, a chunk of rows at a time in UB: OnlineSoftmax::Weigh turns them into
// weights in the forward; Weigh with a known lse does so in the backward, where Differentiate then turns the
// gradient of the weights into the gradient of the scores. csrc/rules/score.h defines a score.
//
// The vector unit's exponential has base e, so that both keep the logit itself of a product, in natural units.
#pragma once

#include "biases.h"
#include "intervals.h"
#include "philox.h"

namespace flashattn_ext {
namespace ascend {

// Scratch in UB, in fp32 values.
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

// Products to capped logits, cap * tanh(product * inner). With an exponential, tanh y is 1 - 2 / (exp(2 y) + 1), whose
// error of about 1e-7 is negligible beside 16-bit rounding up to kLargeCap. Otherwise it is a quotient of
// polynomials of y^2, fitted to a relative error of 2e-8 up to |y| = 9, beyond which tanh y is 1 in fp32.
template <typename T>
__aicore__ inline void CapLogits(const Arguments& a, const ScoreChunk& chunk, const Scratch& scratch) {
  using namespace AscendC;
  const UnaryRepeatParams dense(1, 1, 8, 8);
  const LocalTensor<float> s = chunk.s;
  const uint8_t all = chunk.repeats();
  if (sizeof(T) == 2 && a.cap <= kLargeCap) {
    const LocalTensor<float> numerator = scratch.data;
    Duplicate(numerator, -2 * a.cap, 8);
    Muls(s, s, 2 * a.score.inner, kLanes, all, dense);
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
  Muls(s, s, a.score.inner, kLanes, all, dense);
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
    FLASHATTN_ROLLED for (int32_t divides = 0; divides < 2; ++divides) {
      Polynomial(sum, square, some, divides ? 7.776698680572736e-07f : 1.335498556187531e-08f,
                 divides ? 3.285661805421114e-04f : 2.060934275505133e-05f,
                 divides ? 2.587704919278622e-02f : 3.495605196803808e-03f,
                 divides ? 4.671435654163361e-01f : 1.338104009628296e-01f);
      if (divides)
        Div(y, y, sum, kLanes, some, {1, 1, 1, 8, 8, 8});
      else
        Mul(y, y, sum, kLanes, some, {1, 1, 1, 8, 8, 8});
      PipeBarrier<PIPE_V>();
    }
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

// Turns products into logits without biases.
template <typename T, class A>
__aicore__ inline void ScaleProducts(const A& a, const ScoreChunk& chunk, const Scratch& scratch) {
  if (a.has_score_option()) return CapLogits<T>(a, chunk, scratch);
  AscendC::Muls(chunk.s, chunk.s, a.score.softmax_scale, kLanes, chunk.repeats(), {1, 1, 8, 8});
  AscendC::PipeBarrier<PIPE_V>();
}

// Adds biases and sets hidden scores to -inf.
template <typename T, class A>
__aicore__ inline void BiasAndHide(const A& a, const Task& task, int32_t head, const ScoreChunk& chunk,
                                   Biases<T>* biases, Intervals* intervals, const Scratch& scratch) {
  if (a.has_bias()) biases->Add(task, head, chunk, scratch.data, scratch.floats);
  HideScores(TileMask(a, task.queries.length, task.keys.length), chunk.row, chunk.rows, chunk.key, chunk.keys, chunk.s,
             chunk.layout);
  if (a.has_intervals()) intervals->Hide(chunk, scratch.data);
}

// Zeroes hidden weights or gradients, if hidden scores were not finite (isolation.h).
__aicore__ inline void ClearHidden(const Arguments& a, const Task& task, const ScoreChunk& chunk, Intervals* intervals,
                                   const AscendC::LocalTensor<float>& scratch) {
  HideScores(TileMask(a, task.queries.length, task.keys.length), chunk.row, chunk.rows, chunk.key, chunk.keys, chunk.s,
             chunk.layout, 0.0f);
  intervals->Hide(chunk, scratch, Hidden::kZero);
}

// The running maximum and sum of one vector core's rows of the tasks in flight, and the weights of a chunk.
template <typename T, class A>
class OnlineSoftmax {
  using Sizes = SizesOf<sizeof(T), A::kLongSteps>;
  static constexpr int32_t kScale = 8;  // a block
  static constexpr int32_t kHalf = kRows / 2, kChunkRows = Sizes::kChunkRows, kPitch = Sizes::kPitch;
  static constexpr int32_t kPitchBlocks = kPitch / 8;

 public:
  static constexpr int32_t kFloats = (2 * kStatisticsRing + kSlots) * kHalf + 2 * kChunkRows + kScale;

  __aicore__ OnlineSoftmax(const A& arguments, Biases<T>* biases, Intervals* intervals)
      : a(arguments), biases(biases), intervals(intervals) {}

  // memory: kFloats. wide: a whole block for each row of a chunk, used only within Weigh.
  __aicore__ void SetMemory(const AscendC::LocalTensor<float>& memory, const AscendC::LocalTensor<float>& wide) {
    row_maximum = memory;
    row_sum = row_maximum[kStatisticsRing * kHalf];
    decay = row_sum[kStatisticsRing * kHalf];
    chunk_maximum = decay[kSlots * kHalf];
    chunk_sum = chunk_maximum[kChunkRows];
    scale = chunk_sum[kChunkRows];
    chunk_wide = wide;
    AscendC::Duplicate(scale, a.score.softmax_scale, kScale);
    // Lanes beyond the last row enter the computation but not the results: they must hold finite values.
    AscendC::Duplicate(chunk_maximum, 0.0f, 2 * kChunkRows);
    AscendC::Duplicate(decay, 0.0f, kSlots * kHalf);
  }

  // Statistics of the rows of a task: the maximum of the logits, and the sum of the weights relative to that maximum.
  __aicore__ AscendC::LocalTensor<float> Maximum(const Task& task) const { return row_maximum[At(task)]; }
  __aicore__ AscendC::LocalTensor<float> Sum(const Task& task) const { return row_sum[At(task)]; }
  // The factor by which the maximum of a step rescales all earlier sums, for each row.
  __aicore__ AscendC::LocalTensor<float> Decay(int32_t slot) const { return decay[slot * kHalf]; }

  __aicore__ float Sink(const Task& task) const {
    return a.sink ? Global<float>((uint64_t)a.sink).GetValue(task.head) : 0.0f;
  }
  // The sink is a logit that precedes the first key in every row.
  __aicore__ void Begin(const Task& task) {
    float logit = kLowest, sum = 0.0f;
    if (a.has_sink) {
      const float sink = Sink(task);
      const bool counts = !(sink < kLowest);
      logit = counts ? (sink > kHighest ? kHighest : sink) : kLowest;
      sum = counts ? 1.0f : 0.0f;
    }
    AscendC::Duplicate(Maximum(task), logit, kHalf);
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
    const LocalTensor<float> tree = weights.template ReinterpretCast<float>();  // until the weights are computed
    const int32_t rows = chunk.rows, columns = chunk.columns();
    const uint8_t all = chunk.repeats();
    const Scratch scratch = {tree, kChunkRows * kPitch * int32_t(sizeof(T)) / 4};
    const bool late = ScalesLate();
    if (!late) ScaleProducts<T>(a, chunk, scratch);
    BiasAndHide(a, step.task, step.task.head, chunk, biases, intervals, scratch);
    Update(Maximum(step.task)[row], Decay(step.slot)[row], s, rows, columns, tree);
    for (int32_t c = 0; c < columns; c += kLanes) {
      if (late)  // chunk_wide is the negative maximum
        FusedMulAdd(s[c], scale, chunk_wide, kLanes, rows, {1, 0, 0, kPitchBlocks, 0, 1});
      else
        Sub(s[c], s[c], chunk_wide, kLanes, rows, {1, 1, 0, kPitchBlocks, kPitchBlocks, 1});
    }
    Barrier();
    const LocalTensor<float> sum = Sum(step.task)[row];
    Exp(s, s, kLanes, all, {1, 1, 8, 8});
    Barrier();
    Reduce(Of::sum, chunk_sum, s, rows, columns, tree);
    FusedMulAdd(sum, Decay(step.slot)[row], chunk_sum, rows, 1, {1, 1, 1, 8, 8, 8});
    if (a.has_dropout() && !Pairs<T>(a)) {
      const int32_t groups = (rows + kGroupRows - 1) / kGroupRows;
      const int32_t most = scratch.floats / Dropout::MasksOf(groups), across = columns / kLanes;
      for (int32_t key = 0; key < across; key += most)
        dropout->Apply(s[key * kLanes], kPitchBlocks, tree.template ReinterpretCast<int32_t>(), group, groups, key,
                       Lesser(most, across - key));
    }
    if (a.has_intervals() && step.isolates) {
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

  // Weigh for rows that are fully masked in the step: without their scores.
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
  // Whether products are scaled where the maximum is subtracted, in one instruction: where nothing else comes between,
  // and the scale is a power of two, so that the product is exact and the result has the bits of two instructions.
  __aicore__ bool ScalesLate() const { return a.exact_scale && !a.has_score_option() && !a.has_bias(); }
  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }
  __aicore__ static int32_t At(const Task& task) { return task.number % kStatisticsRing * kHalf; }

  // `maximum` becomes the larger one of the old and the new maxima, chunk_wide its copy in whole blocks (its negative
  // where products are scaled late), and chunk_decay exp(old - new maximum). The last two instructions overlap with the
  // caller's next ones.
  __aicore__ void Update(const AscendC::LocalTensor<float>& maximum, const AscendC::LocalTensor<float>& chunk_decay,
                         const AscendC::LocalTensor<float>& s, int32_t rows, int32_t columns,
                         const AscendC::LocalTensor<float>& tree) {
    using namespace AscendC;
    Reduce(Of::maximum, chunk_maximum, s, rows, columns, tree);
    if (ScalesLate()) {
      Muls(chunk_maximum, chunk_maximum, a.score.softmax_scale, rows);
      Barrier();
    }
    Max(chunk_maximum, chunk_maximum, maximum, rows);
    Barrier();
    Sub(chunk_decay, maximum, chunk_maximum, rows);
    if (ScalesLate()) {
      Muls(chunk_sum, chunk_maximum, -1.0f, rows);  // free until the sums
      Barrier();
    }
    Brcb(chunk_wide, ScalesLate() ? chunk_sum : chunk_maximum, RoundUp(rows, 8) / 8, {1, 8});
    Barrier();
    Exp(chunk_decay, chunk_decay, rows);
    Adds(maximum, chunk_maximum, 0.0f, rows);
  }

  enum class Of { maximum, sum };
  // The maximum or sum of each row: of columns of 64, pair by pair, then of the blocks of the last one, and of those.
  __aicore__ void Reduce(Of of, const AscendC::LocalTensor<float>& result, const AscendC::LocalTensor<float>& s,
                         int32_t rows, int32_t columns, const AscendC::LocalTensor<float>& tree) {
    const uint8_t pitch = kPitchBlocks;
    const int32_t parts = columns / kLanes, part = rows * kLanes;
    int32_t pairs = parts / 2;
    for (int32_t i = 0; i < pairs; ++i)
      Combine(of, tree[i * part], s[2 * i * kLanes], s[(2 * i + 1) * kLanes], rows, {1, 1, 1, 8, pitch, pitch});
    Barrier();
    if (pairs > 0 && parts % 2) {
      Combine(of, tree, tree, s[(parts - 1) * kLanes], rows, {1, 1, 1, 8, 8, pitch});
      Barrier();
    }
    while (pairs > 1) {
      const int32_t half = pairs / 2;
      pairs -= half;
      Combine(of, tree, tree, tree[pairs * part], half * rows, {1, 1, 1, 8, 8, 8});
      Barrier();
    }
    const AscendC::LocalTensor<float> last = parts > 1 ? tree : s;
    const uint8_t last_pitch = parts > 1 ? kLanes / 8 : kPitchBlocks;
    const AscendC::LocalTensor<float> blocks = tree[kChunkRows * kLanes];  // a result of each, so 8 a row
    static_assert((kLanes + 8) * 4 <= kPitch * int32_t(sizeof(T)), "they lie in P's buffer");
    constexpr uint64_t kAll = ~uint64_t(0);
    if (of == Of::maximum || sizeof(T) == 4 || Pairs<T>(a)) {  // no pairs, or the blocks hold them
      ReduceBlocks(of, blocks, last, rows, kAll, 1, last_pitch);
      Barrier();
      ReduceRows(of, result, blocks, rows, kAll);
    } else {
      // In the same order as with paired columns, for the same bits: first the k-th and the (8 + k)-th of 16.
      uint64_t half[2] = {kAll >> 32, 0};
      AscendC::Add(tree, last, last[8], half, rows, {2, 2, 2, kLanes / 8, last_pitch, last_pitch});
      Barrier();
      ReduceBlocks(of, blocks, tree, rows, half[0], 2, kLanes / 8);
      Barrier();
      ReduceRows(of, result, blocks, rows, 0x0f0f0f0f0f0f0f0fu);
    }
    Barrier();
  }

  // A row's results, 8 or fewer lanes a block.
  __aicore__ void ReduceRows(Of of, const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& blocks,
                             int32_t rows, uint64_t lanes) {
    const int32_t whole = rows / 8;
    const uint64_t rest = lanes & ((uint64_t(1) << rows % 8 * 8) - 1);
    if (whole) ReduceBlocks(of, to, blocks, whole, lanes, 1, 8);
    if (rest) ReduceBlocks(of, to[whole * 8], blocks[whole * kLanes], 1, rest, 1, 8);
  }

  __aicore__ static void ReduceBlocks(Of of, const AscendC::LocalTensor<float>& to,
                                      const AscendC::LocalTensor<float>& from, int32_t repeats, uint64_t lanes,
                                      int32_t block, int32_t pitch) {
    uint64_t mask[2] = {lanes, 0};
    if (of == Of::maximum)
      AscendC::BlockReduceMax(to, from, repeats, mask, 1, block, pitch);
    else
      AscendC::BlockReduceSum(to, from, repeats, mask, 1, block, pitch);
  }
  __aicore__ static void Combine(Of of, const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& x,
                                 const AscendC::LocalTensor<float>& y, int32_t rows,
                                 const AscendC::BinaryRepeatParams& blocks) {
    if (of == Of::maximum)
      AscendC::Max(to, x, y, kLanes, rows, blocks);
    else
      AscendC::Add(to, x, y, kLanes, rows, blocks);
  }

  const A& a;
  Biases<T>* biases;
  Intervals* intervals;
  AscendC::LocalTensor<float> scale;                                 // the factor of products, in every lane of a block
  AscendC::LocalTensor<float> row_maximum, row_sum;                  // [kStatisticsRing][kHalf]
  AscendC::LocalTensor<float> decay;                                 // [kSlots][kHalf]
  AscendC::LocalTensor<float> chunk_maximum, chunk_sum, chunk_wide;  // [kChunkRows], the last one in whole blocks
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

// dP to dP~ (~: after dropout), in place, without what lies behind the columns. `group`: the first of the generator's
// groups of rows that were drawn for the chunk.
template <class A>
__aicore__ inline void DropGradients(const A& a, const ScoreChunk& weights,
                                     const AscendC::LocalTensor<float>& gradients, Dropout* dropout,
                                     const DropoutScratch& scratch, int32_t group) {
  const int32_t groups = (weights.rows + kGroupRows - 1) / kGroupRows;
  const uint8_t pitch = weights.layout.pitch;
  dropout->Apply(gradients, pitch, scratch.masks, group, groups, 0, weights.columns() / kLanes);
  for (int32_t c = 0; c < weights.columns(); c += kLanes)
    AscendC::Muls(gradients[c], gradients[c], a.inverse_keep, kLanes, weights.rows, {1, 1, pitch, pitch});
  AscendC::PipeBarrier<PIPE_V>();
}

// dP to dS / softmax_scale = P (dP~ - delta), in place, and P to P~. `delta`: of the chunk's rows, each in a whole
// block. `dropped`: the gradients are dP~ already.
template <class A>
__aicore__ inline void Differentiate(const A& a, const ScoreChunk& weights,
                                     const AscendC::LocalTensor<float>& gradients,
                                     const AscendC::LocalTensor<float>& delta, Dropout* dropout,
                                     const DropoutScratch& scratch, int32_t group, bool dropped) {
  using namespace AscendC;
  const LocalTensor<float> p = weights.s, ds = gradients;
  const uint8_t all = weights.repeats(), pitch = weights.layout.pitch;
  const int32_t rows = weights.rows, columns = weights.columns();
  const BinaryRepeatParams dense(1, 1, 1, 8, 8, 8), by_row(1, 1, 0, pitch, pitch, 1);
  const bool drops = a.has_dropout() && !dropped;  // then dS is P~ dP / p_keep - P delta
  const LocalTensor<float> product = scratch.product;
  if (drops) {
    for (int32_t c = 0; c < columns; c += kLanes) Mul(product[c], p[c], delta, kLanes, rows, by_row);
  } else {
    for (int32_t c = 0; c < columns; c += kLanes) Sub(ds[c], ds[c], delta, kLanes, rows, by_row);
    PipeBarrier<PIPE_V>();
    Mul(ds, ds, p, kLanes, all, dense);
  }
  if (a.has_dropout())
    dropout->Apply(p, pitch, scratch.masks, group, (rows + kGroupRows - 1) / kGroupRows, 0, columns / kLanes);
  if (drops) {
    Muls(ds, ds, a.inverse_keep, kLanes, all, {1, 1, 8, 8});
    PipeBarrier<PIPE_V>();
    Mul(ds, ds, p, kLanes, all, dense);
    PipeBarrier<PIPE_V>();
    Sub(ds, ds, product, kLanes, all, dense);
  }
  PipeBarrier<PIPE_V>();
}

}  // namespace ascend
}  // namespace flashattn_ext
