// The backward's products: with P recomputed from S and lse,
//
//   dV = P~^T dO      dS = P (dP~ - delta)      dK = dS^T Q      dQ = dS K        (~: after dropout)
//
// A task is 128 keys of one KV head, a step a task and up to 512 queries of one query head of its group. Cube and
// vector cores walk through the same steps, as in the forward:
//
//   cube     S(t) = Q K^T, dP(t) = dO V^T      ->  scores         kScoresReady
//   vector   P(t), dS(t)                       ->  probabilities  kProbabilitiesReady
//   cube     dV += P^T dO, dK += dS^T Q, dQ += dS K, kGradAhead steps later
//
// A task's dK and dV are added up by one core, step by step. Every core adds to dQ, in any order; with `deterministic`
// all tasks of a KV head belong to one core. The flags are enough: scores of step t + kGradSlots overwrite slot t
// after the products of step t, which wait for P(t), and announce themselves on the pipe that stored those products.
#pragma once

#include "backward_steps.h"
#include "bias_gradients.h"
#include "cube.h"
#include "row_delta.h"

namespace flashattn_ext {
namespace ascend {

// T: type of the inputs.
template <typename T, class A>
class BackwardCube {
  static constexpr int32_t kInner = SizesOf<sizeof(T)>::kInner, kQueries = SizesOf<sizeof(T)>::kQueries;

 public:
  __aicore__ explicit BackwardCube(const A& arguments) : a(arguments), workspace(arguments) {}

  __aicore__ void Run() {
    GradSteps<A> steps(a, kQueries);
    GradStep ring[kGradSlots], step;
    int32_t issued = 0;
    while (steps.Next(&step)) {
      MultiplyScores(step);
      ring[issued % kGradSlots] = step;
      if (issued >= kGradAhead) MultiplyGradients(ring[(issued - kGradAhead) % kGradSlots]);
      ++issued;
    }
    for (int32_t t = Greater(0, issued - kGradAhead); t < issued; ++t) MultiplyGradients(ring[t % kGradSlots]);
    cube.Finish();
  }

 private:
  // Rows of the task's keys and of the step's queries.
  __aicore__ AscendC::GlobalTensor<T> Keys(const GradStep& s, const TensorView& view) const {
    return Head<T>(view, s.task.batch, s.task.head, s.task.keys.start + s.task.row);
  }
  __aicore__ AscendC::GlobalTensor<T> Queries(const GradStep& s, const TensorView& view, int32_t row) const {
    return Head<T>(view, s.task.batch, s.head, s.task.queries.start + s.row + row);
  }

  __aicore__ void MultiplyScores(const GradStep& step) {
    if (step.first) {
      keys = cube.LoadResident(0, Keys(step, a.k), step.task.rows, a.head_dim, a.k.row_stride);
      values = cube.LoadResident(1, Keys(step, a.v), step.task.rows, a.head_dim_v, a.v.row_stride);
    }
    for (int32_t row = 0; row < step.rows; row += kTile) {
      MultiplyTile(step, row, a.q, a.head_dim, keys, 0);
      MultiplyTile(step, row, a.dout, a.head_dim_v, values, 1);
    }
    if (step.last) {
      cube.ReleaseResident(keys);
      cube.ReleaseResident(values);
    }
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
  }
  __aicore__ void MultiplyTile(const GradStep& step, int32_t row, const TensorView& left, int32_t dim,
                               const L1Tile<T>& right, int32_t which) {
    const int32_t rows = Lesser(kTile, step.rows - row);
    cube.BeginSums();
    for (int32_t d = 0; d < dim; d += kInner) {
      const int32_t k = Lesser(kInner, dim - d);
      const L1Tile<T> tile = cube.LoadTile(Queries(step, left, row)[d], rows, k, left.row_stride);
      cube.MultiplyTransposed({tile, 0, rows, 0, k, false}, right, d, step.task.rows, d == 0, false);
      cube.Release(tile);
    }
    cube.StoreSums(workspace.Scores(step.slot, which)[row * kTile], rows, step.task.rows, kTile);
  }

  __aicore__ void MultiplyGradients(const GradStep& step) {
    AscendC::CrossCoreWaitFlag(kProbabilitiesReady);
    const int32_t n = step.task.rows;
    const L1Tile<T> p = cube.LoadWide(0, workspace.Rounded(step.slot, 0), step.rows, n, kTile);
    const L1Tile<T> ds = cube.LoadWide(1, workspace.Rounded(step.slot, 1), step.rows, n, kTile);
    const bool isolates = a.has_intervals() && step.isolates;
    if (isolates) {
      AddOverQueries(step, p, IsolatedStep<T>::Gradients(a, step.slot, 0), a.isolated_pitch(), a.head_dim_v, a.dv_sum);
      AddOverQueries(step, ds, IsolatedStep<T>::Queries(a, step.slot, 0), a.isolated_pitch(), a.head_dim, a.dk_sum);
    } else {
      AddOverQueries(step, p, Queries(step, a.dout, 0), a.dout.row_stride, a.head_dim_v, a.dv_sum);
      AddOverQueries(step, ds, Queries(step, a.q, 0), a.q.row_stride, a.head_dim, a.dk_sum);
    }
    const AscendC::GlobalTensor<T> keys = isolates ? IsolatedStep<T>::Keys(a, step.slot) : Keys(step, a.k);
    const int64_t key_pitch = isolates ? a.isolated_pitch() : a.k.row_stride;
    const int32_t pitch = sum_pitch(a.head_dim);
    const AscendC::GlobalTensor<float> dq =
        Global<float>((uint64_t)a.dq_sum, (step.head * a.rows_q + step.QueryRow(a)) * pitch);
    for (int32_t d = 0; d < a.head_dim; d += kTile) {
      const int32_t columns = Lesser(kTile, a.head_dim - d);
      L1Tile<T> tiles[kTile / kInner];
      static_assert(kTile / kInner < kRing, "one is left to be loaded");
      for (int32_t key = 0; key < n; key += kInner)
        tiles[key / kInner] = cube.LoadTile(keys[key * key_pitch + d], Lesser(kInner, n - key), columns, key_pitch);
      for (int32_t row = 0; row < step.rows; row += kTile) {
        const int32_t rows = Lesser(kTile, step.rows - row);
        cube.BeginSums();
        for (int32_t key = 0; key < n; key += kInner)
          cube.MultiplyPlain({ds, row, rows, key, Lesser(kInner, n - key), false}, tiles[key / kInner], columns,
                             key == 0, row + rows == step.rows);
        cube.StoreSums(dq[row * pitch + d], rows, columns, pitch, Store::add);
      }
    }
    cube.Release(p);
    cube.Release(ds);
  }
  // sums[key] += left^T right, over all queries of the step. `right_pitch`: elements from row to row.
  __aicore__ void AddOverQueries(const GradStep& step, const L1Tile<T>& left, const AscendC::GlobalTensor<T>& right,
                                 int64_t right_pitch, int32_t dim, void* sums) {
    const int32_t pitch = sum_pitch(dim), n = step.task.rows;
    const AscendC::GlobalTensor<float> to =
        Global<float>((uint64_t)sums, (step.task.head * a.rows_k + step.KeyRow(a)) * pitch);
    for (int32_t d = 0; d < dim; d += kTile) {
      const int32_t columns = Lesser(kTile, dim - d);
      cube.BeginSums();
      for (int32_t row = 0; row < step.rows; row += kInner) {
        const int32_t rows = Lesser(kInner, step.rows - row);
        const L1Tile<T> tile = cube.LoadTile(right[row * right_pitch + d], rows, columns, right_pitch);
        cube.MultiplyPlain({left, row, rows, 0, n, true}, tile, columns, row == 0, true);
      }
      cube.StoreSums(to[d], n, columns, pitch, Store::add);
    }
  }

  const A& a;
  BackwardWorkspace<T> workspace;
  CubeCore<T> cube;
  L1Tile<T> keys, values;
};

template <typename T, class A>
class BackwardVector : VectorCore {
  static constexpr int32_t kQueries = SizesOf<sizeof(T)>::kQueries, kGradRows = SizesOf<sizeof(T)>::kGradRows;

 public:
  __aicore__ explicit BackwardVector(const A& arguments)
      : a(arguments),
        workspace(arguments),
        chunk_rows(arguments.has_score_option() && arguments.has_dropout() ? kGroupRows : kGradRows),
        biases(arguments),
        intervals(arguments),
        bias_gradients(arguments, &biases),
        row_delta(arguments) {
    using namespace AscendC;
    s = Carve<float>(4 * kChunk);  // followed by dP
    dp = s[2 * kChunk];
    rounded = Carve<T>(2 * 2 * kChunk);
    lse = Carve<float>(kHalf);
    delta = Carve<float>(kHalf);
    lse_wide = Carve<float>(kGradRows * 8);
    delta_wide = Carve<float>(kGradRows * 8);
    if (has_product()) {
      product = Carve<float>(kChunk);
      Duplicate(product, 0.0f, kChunk);
    }
    if (a.has_bias()) {
      biases.SetMemory(Carve<float>(Biases<T>::FloatsOf(kGradRows, kTile, kGradPitch)), kGradRows, kTile, kGradPitch);
      if (bias_gradients.any()) bias_gradients.SetMemory(Carve<float>(bias_gradients.kFloats));
    }
    if (a.has_intervals()) intervals.SetMemory(Carve<float>(Intervals::FloatsOf(kGradRows, kTile)), kGradRows, kTile);
    if (a.has_dropout()) {
      words = Carve<int32_t>(Dropout::WordsOf(kStepTiles));
      dropout.Init(a, Carve<int32_t>(Dropout::kConstantWords));
    }
    // Lanes beyond the last row and column enter the computation but not the results: they must hold finite values.
    Duplicate(s, 0.0f, 4 * kChunk);
    Duplicate(lse, 0.0f, kHalf);
    Duplicate(delta, 0.0f, kHalf);
    Barrier();
    for (int32_t e = 0; e < 2; ++e) {
      SetFlag<HardEvent::V_MTE2>(e);
      SetFlag<HardEvent::MTE3_V>(e);
    }
    SetFlag<HardEvent::V_MTE2>(kRowsEvent);
  }

  __aicore__ void Run() {
    using namespace AscendC;
    GradSteps<A> steps(a, kQueries);
    GradStep step;
    while (steps.Next(&step)) {
      const int32_t begin = step.row;
      TakeHalf(&step.row, &step.rows);
      if (step.rows > 0) LoadRows(step);
      if (step.rows > 0 && a.has_dropout()) {
        static_assert(Dropout::ScratchOf(kStepTiles) <= 4 * kChunk, "the buffers of S and dP are free here");
        static_assert(Dropout::PartsOf(kGroups, kAcross) <= kChunk, "and that of products");
        TakeLoadBuffers();
        if (bias_gradients.any()) bias_gradients.TakeScratch();
        dropout.SetMemory(product.ReinterpretCast<int32_t>(), kGroups, kAcross, words, kStepTiles);
        dropout.SetScratch(s.ReinterpretCast<int32_t>(), kStepTiles);
        dropout.Draw(step.task.batch, step.head, step.row, step.rows, step.task.row, RoundUp(step.task.rows, kLanes));
        if (bias_gradients.any()) bias_gradients.GiveScratch();
        GiveLoadBuffers();
      }
      if (a.has_intervals() && step.rows > 0)
        intervals.Begin(step.task, step.head, step.task.row, step.task.rows, step.row, step.rows);
      CrossCoreWaitFlag(kScoresReady);
      const bool isolates = a.has_intervals() && step.isolates && step.rows > 0;
      if (isolates) Isolate(step, step.row - begin);
      if (bias_gradients.any() && step.rows > 0) bias_gradients.BeginRows();
      for (int32_t row = 0; row < step.rows; row += chunk_rows)
        Chunk(step, row, Lesser(chunk_rows, step.rows - row), step.row - begin + row);
      if (isolates) intervals.GiveBack();
      if (step.rows > 0) SetFlag<HardEvent::V_MTE2>(kRowsEvent);
      CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
      if (bias_gradients.any() && step.rows > 0) bias_gradients.EndRows(step.task, step.head, step.row);
      if (bias_gradients.any() && step.last_of_head) bias_gradients.EndHead(step.task, step.head);
    }
    for (int32_t e = 0; e < 2; ++e) {
      WaitFlag<HardEvent::V_MTE2>(e);
      WaitFlag<HardEvent::MTE3_V>(e);
    }
    WaitFlag<HardEvent::V_MTE2>(kRowsEvent);
    if (a.has_bias()) biases.Finish();
    if (a.has_intervals()) intervals.Finish();
    if (bias_gradients.any()) bias_gradients.Finish();
  }

 private:
  static constexpr int32_t kHalf = kQueries / 2;
  static constexpr int32_t kGroups = kHalf / kGroupRows, kAcross = kTile / kLanes, kStepTiles = kGroups * kAcross;
  static constexpr int32_t kChunk = kGradRows * kGradPitch;
  static constexpr int32_t kPitchBlocks = kGradPitch / 8;
  static constexpr int32_t kRowsEvent = 2;       // between MTE2 and V
  static constexpr int32_t kIsolationEvent = 2;  // from V to MTE3

  __aicore__ bool has_product() const {
    return a.has_dropout() || a.has_score_option() || a.has_bias() || a.has_intervals();
  }

  // Loads lse and delta of the step's rows.
  __aicore__ void LoadRows(const GradStep& step) {
    using namespace AscendC;
    const DataCopyExtParams copy(1, step.rows * 4, 0, 0, 0);
    const DataCopyPadExtParams<float> no_padding(false, 0, 0, 0.0f);
    const int64_t at = step.task.batch * a.lse.batch_stride + step.head * a.lse.head_stride + step.task.queries.start;
    WaitFlag<HardEvent::V_MTE2>(kRowsEvent);
    DataCopyPad(lse, Global<float>((uint64_t)a.lse.data, at + step.row), copy, no_padding);
    DataCopyPad(delta, Global<float>((uint64_t)a.delta, step.head * a.rows_q + step.QueryRow(a)), copy, no_padding);
    SetFlag<HardEvent::MTE2_V>(kRowsEvent);
    WaitFlag<HardEvent::MTE2_V>(kRowsEvent);
    Maxs(lse, lse, kLowest, step.rows);
    Barrier();
  }

  // Copies this vector core's rows, the first of which is `slot_row` of the step, and the task's keys, with zeros for
  // non-finite rows.
  __aicore__ void Isolate(const GradStep& step, int32_t slot_row) {
    const Task& task = step.task;
    static_assert(RowIsolation<T>::FloatsOf(16, kMaxHeadDim) <= 4 * kChunk, "the buffers of S and dP do");
    TakeLoadBuffers();
    not_finite = intervals.Borrow();
    RowIsolation<T> rows(a, a.head_dim, s, 4 * kChunk, kIsolationEvent);
    if (AscendC::GetSubBlockIdx() == 0)
      rows.Run(Head<T>(a.k, task.batch, task.head, task.keys.start + task.row), a.k.row_stride, task.rows, not_finite,
               IsolatedStep<T>::Keys(a, step.slot), true);
    rows.Run(Head<T>(a.q, task.batch, step.head, task.queries.start + step.row), a.q.row_stride, step.rows, not_finite,
             IsolatedStep<T>::Queries(a, step.slot, slot_row), true);
    RowIsolation<T> gradients(a, a.head_dim_v, s, 4 * kChunk, kIsolationEvent);
    gradients.Run(Head<T>(a.dout, task.batch, step.head, task.queries.start + step.row), a.dout.row_stride, step.rows,
                  not_finite, IsolatedStep<T>::Gradients(a, step.slot, slot_row), true);
    GiveLoadBuffers();
  }
  // Sets P to NaN in rows whose gradient of out is not finite (dS becomes NaN by itself). Zeroes hidden values of P, dS
  // and the slope of a score option.
  __aicore__ void ClearHiddenWeights(const GradStep& step, const ScoreChunk& chunk, int32_t row,
                                     const AscendC::LocalTensor<float>& ds, const AscendC::LocalTensor<float>& slope) {
    using namespace AscendC;
    const uint8_t pitch = chunk.layout.pitch;
    const LocalTensor<float> wide = lse_wide;  // lse is no longer needed
    Brcb(wide, not_finite[row], RoundUp(chunk.rows, 8) / 8, {1, 8});
    Barrier();
    for (int32_t c = 0; c < chunk.columns(); c += kLanes)
      Add(chunk.s[c], chunk.s[c], wide, kLanes, chunk.rows, {1, 1, 0, pitch, pitch, 1});
    Barrier();
    const int32_t count = a.has_score_option() ? 3 : 2;
    ScoreChunk cleared = chunk;
    FLASHATTN_ROLLED for (int32_t which = 0; which < count; ++which) {
      if (which > 0) cleared.s = which == 1 ? ds : slope;
      ClearHidden(a, step.task, cleared, &intervals, product);
    }
  }

  // `row` counts within this vector core's rows, `slot_row` within the step's.
  __aicore__ void Chunk(const GradStep& step, int32_t row, int32_t rows, int32_t slot_row) {
    using namespace AscendC;
    const Task& task = step.task;
    const int32_t buffer = chunks++ % 2, keys = task.rows;
    const LocalTensor<float> p = s[buffer * kChunk], ds = dp[buffer * kChunk];
    const LocalTensor<T> rounded_p = rounded[buffer * 2 * kChunk], rounded_ds = rounded_p[kChunk];
    WaitFlag<HardEvent::V_MTE2>(buffer);
    const DataCopyExtParams copy(rows, keys * 4, (kTile - keys) * 4, kPitchBlocks - RoundUp(keys, 8) / 8, 0);
    const DataCopyPadExtParams<float> no_padding(false, 0, 0, 0.0f);
    DataCopyPad(p, workspace.Scores(step.slot, 0)[slot_row * kTile], copy, no_padding);
    DataCopyPad(ds, workspace.Scores(step.slot, 1)[slot_row * kTile], copy, no_padding);
    const bool finds_delta = row_delta.kUsed && row_delta.SeesOnly(task, step.row + row, rows);
    if (finds_delta) row_delta.Load(task.batch, step.head, task.queries.start + step.row + row, rows, ds);
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);

    const ScoreChunk chunk = {p, {kPitchBlocks, false}, step.row + row, rows, task.row, keys};
    const Scratch scratch = {product, kChunk};
    WaitFlag<HardEvent::MTE3_V>(buffer);
    if (bias_gradients.any()) bias_gradients.TakeScratch();
    ScaleProducts<T>(a, chunk, scratch);
    // Until P and dS are rounded, their buffers hold the slope of a score option and the dropout masks.
    const LocalTensor<float> slope = rounded_p.template ReinterpretCast<float>();
    const LocalTensor<T> masks = a.has_score_option() ? rounded_ds : rounded_p;
    static_assert(Dropout::MasksOf(kGradRows / kGroupRows * kAcross) * 4 <= 2 * kChunk * int32_t(sizeof(T)) &&
                      Dropout::MasksOf(kAcross) * 4 <= kChunk * int32_t(sizeof(T)) &&
                      kGroupRows * kGradPitch * 4 <= kChunk * int32_t(sizeof(T)),
                  "they are large enough");
    if (a.has_score_option()) SlopeOfCap(a, chunk, slope);
    BiasAndHide(a, task, step.head, chunk, &biases, &intervals, scratch);
    Brcb(lse_wide, lse[row], RoundUp(rows, 8) / 8, {1, 8});
    Brcb(delta_wide, delta[row], RoundUp(rows, 8) / 8, {1, 8});
    Barrier();
    Weigh(chunk, lse_wide);
    const DropoutScratch dropped = {product, masks.template ReinterpretCast<int32_t>()};
    if (finds_delta) {
      if (a.has_intervals() && step.isolates) {
        ScoreChunk hidden = chunk;
        hidden.s = ds;
        ClearHidden(a, task, hidden, &intervals, product);
      }
      if (a.has_dropout()) DropGradients(a, chunk, ds, &dropout, dropped, row / kGroupRows);
      // lse is no longer needed. Without `product` there is no score option and no dropout, whose values lie in
      // `rounded`.
      static_assert(2 * kLanes <= kGradPitch, "a chunk of scores has room for two columns of 64");
      row_delta.Find(chunk, ds, step.head, lse[row], delta[row], delta_wide, has_product() ? product : slope, lse_wide);
    }
    Differentiate(a, chunk, ds, delta_wide, &dropout, dropped, row / kGroupRows, finds_delta);
    if (a.has_intervals() && step.isolates) ClearHiddenWeights(step, chunk, row, ds, slope);
    if (bias_gradients.any()) bias_gradients.Add(task, step.head, chunk, row, ds, product);
    if (a.has_score_option()) {
      Barrier();  // the stores of a bias's gradient have read dS
      Mul(ds, ds, slope, kLanes, chunk.repeats(), {1, 1, 1, 8, 8, 8});
      Barrier();
    }
    RoundRepeats(rounded_p, p, chunk.repeats());
    RoundRepeats(rounded_ds, ds, chunk.repeats());
    SetFlag<HardEvent::V_MTE2>(buffer);
    SetFlag<HardEvent::V_MTE3>(buffer);
    WaitFlag<HardEvent::V_MTE3>(buffer);
    constexpr int32_t kElement = sizeof(T);
    const DataCopyExtParams store(rows, keys * kElement, kGradPitch * kElement / 32 - Blocks<T>(keys),
                                  (kTile - keys) * kElement, 0);
    DataCopyPad(workspace.Rounded(step.slot, 0)[slot_row * kTile], rounded_p, store);
    DataCopyPad(workspace.Rounded(step.slot, 1)[slot_row * kTile], rounded_ds, store);
    SetFlag<HardEvent::MTE3_V>(buffer);
  }

  const A& a;
  BackwardWorkspace<T> workspace;
  int32_t chunk_rows;  // rows of scores in UB at a time
  int32_t chunks = 0;
  Biases<T> biases;
  Intervals intervals;
  BiasGradients<T, A> bias_gradients;
  RowDelta<T, A> row_delta;
  AscendC::LocalTensor<float> s, dp, lse, delta, lse_wide, delta_wide;
  AscendC::LocalTensor<float> product;     // scratch of a chunk
  AscendC::LocalTensor<float> not_finite;  // flags of the rows of a step that isolates
  AscendC::LocalTensor<int32_t> words;
  AscendC::LocalTensor<T> rounded;  // P and dS of a chunk, then of the next
  Dropout dropout;
};

template <typename T, class A>
__aicore__ inline void Backward(const A& arguments) {
  if ASCEND_IS_AIC {
    RunPart<BackwardCube<T, A>>(arguments);
  }
  if ASCEND_IS_AIV {
    RunPart<BackwardVector<T, A>>(arguments);
  }
}

}  // namespace ascend
}  // namespace flashattn_ext
