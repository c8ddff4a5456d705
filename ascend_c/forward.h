// The forward: out and lse of every query row. Per core one cube core and two vector cores walk through the same steps
// (schedule.h), a step being 128 query rows and up to 512 keys (long steps: 1024, fp32: 128); everything goes from one
// to the other through slots of the core's workspace:
//
//   cube     S(t) = Q K^T                    ->  scores         kScoresReady
//   vector   m, l, P(t) = exp(s - m)         ->  probabilities  kProbabilitiesReady
//   cube     P(t) V                          ->  partial        kPartialReady
//   vector   O = O * exp(m_old - m) + P(t) V
//
// The cube is kAhead steps ahead with S, and the vector cores add a product kAhead steps after its probabilities:
//
//   cube     S0  S1  S2  S3 PV0 S4 PV1 S5 PV2 ...
//   vector       P0  P1  P2  P3 O0  P4 O1  P5 O2 ...
//
// Where L0C has room, the products of S3 and PV0 alternate: sums of PV0 grow while tiles of S3 are stored.
//
// One flag in each direction and per step is enough. Scores of step t + kSlots overwrite slot t after PV(t), which
// waits for P(t); P(t + kSlots) comes after O(t), which waits for PV(t); and PV(t + kSlots) waits for P(t + kSlots).
//
// With a Mask, rows of V that are not finite are isolated (isolation.h).
#pragma once

#include "cube.h"
#include "isolation.h"
#include "scores.h"

namespace flashattn_ext {
namespace ascend {

// The columns of scores for a number of keys: whole pairs if keys are paired.
template <typename T, class A>
__aicore__ inline int32_t Columns(const A& a, int32_t keys) {
  return Pairs<T>(a) ? RoundUp(keys, 16) : keys;
}

// T: type of the inputs. A: Arguments, or ArgumentsWith.
template <typename T, class A>
class ForwardCube {
  using Sizes = SizesOf<sizeof(T), A::kLongSteps>;
  static constexpr int32_t kKeys = Sizes::kKeys, kInner = Sizes::kInner, kWideKeys = Sizes::kWideKeys;

 public:
  __aicore__ explicit ForwardCube(const A& arguments)
      : a(arguments),
        workspace(arguments),
        alternates(sizeof(T) == 2 && Greater(arguments.head_dim, arguments.head_dim_v) <= kTile),
        tile_keys(alternates ? kTile / 2 : kTile) {}

  __aicore__ void Run() {
    Steps<A> steps(a, kKeys);
    Step ring[kSlots], step;
    int32_t issued = 0;
    while (steps.Next(&step)) {
      if (!step.keys) continue;
      const Step* before = issued >= kAhead ? &ring[(issued - kAhead) % kSlots] : nullptr;
      MultiplyKeys(step, alternates ? before : nullptr);
      if (before) MultiplyValues(*before);
      ring[issued++ % kSlots] = step;
    }
    for (int32_t t = Greater(0, issued - kAhead); t < issued; ++t) MultiplyValues(ring[t % kSlots]);
    cube.Finish();
  }

 private:
  // S of a step. Between its tiles, if any earlier step `before` is given, P V of that one: a product behind the third
  // tile, and one after every two more, so that a tile of S is always ready for FIX. What is left is up to
  // MultiplyValues. The queries of a task stay in L1.
  __aicore__ void MultiplyKeys(const Step& step, const Step* before) {
    const Task& task = step.task;
    const int32_t key_head = task.head / a.group_size();
    if (step.first)
      queries = cube.LoadResident(task.number % 2, Head<T>(a.q, task.batch, task.head, task.queries.start + task.row),
                                  task.rows, a.head_dim, a.q.row_stride);
    const AscendC::GlobalTensor<float> scores = workspace.Scores(step.slot);
    for (int32_t key = 0; key < step.keys; key += tile_keys) {
      const int32_t rows = Lesser(tile_keys, step.keys - key), n = Columns<T>(a, rows);
      if (alternates)
        cube.BeginSums(key % kTile == 0 ? kScoreSums : kOtherScoreSums);
      else
        cube.BeginSums();
      for (int32_t d = 0; d < a.head_dim; d += kInner) {
        const int32_t k = Lesser(kInner, a.head_dim - d);
        const int64_t row = task.keys.start + step.key + key;
        const L1Tile<T> tile =
            cube.LoadTile(Head<T>(a.k, task.batch, key_head, row)[d], rows, k, a.k.row_stride, Pairs<T>(a));
        cube.MultiplyTransposed({queries, 0, task.rows, d, k, false}, tile, 0, n, d == 0, true);
      }
      cube.StoreSums(scores[key], task.rows, n, kKeys);
      if (before) AddValues(*before, 0, key - kTile / 2);
    }
    if (step.last) cube.ReleaseResident(queries);
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
  }

  // P V of a step, or what is left of it.
  __aicore__ void MultiplyValues(const Step& step) {
    const AscendC::GlobalTensor<float> partial = workspace.Partial(step.slot);
    for (int32_t d = 0; d < a.head_dim_v; d += kTile) {
      AddValues(step, d, step.keys);
      if (alternates) cube.ResumeSums(kValueSums);
      cube.StoreSums(partial[d], step.task.rows, Lesser(kTile, a.head_dim_v - d), Sizes::kPartialPitch);
      added = 0;
    }
    if (!kInHalves) cube.Release(weights);
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kPartialReady);
  }

  // Goes on with columns of P V, from d on, until it has the products with the first `end` keys of the step.
  __aicore__ void AddValues(const Step& step, int32_t d, int32_t end) {
    const Task& task = step.task;
    const bool isolates = a.has_intervals() && step.isolates;
    const AscendC::GlobalTensor<T> values =
        isolates ? IsolatedRow<T>(a, Sizes::kIsolatedForward, step.slot * kKeys)
                 : Head<T>(a.v, task.batch, task.head / a.group_size(), task.keys.start + step.key);
    const int64_t pitch = isolates ? a.isolated_pitch() : a.v.row_stride;
    const int32_t n = Lesser(kTile, a.head_dim_v - d);
    if (alternates) cube.ResumeSums(kValueSums);
    for (; added < Lesser(end, step.keys); added += kInner) {
      const int32_t rows = Lesser(kInner, step.keys - added), k = Columns<T>(a, rows), column = added % kWideKeys;
      if (added == 0) BeginValues(d);
      if (d == 0 && column == 0) weights = cube.TakeWide(wides++ % 2, task.rows);
      if (d == 0) cube.LoadColumns(weights, column, workspace.Probabilities(step.slot)[added], k, kKeys);
      const L1Tile<T> tile = cube.LoadTile(values[added * pitch + d], rows, n, pitch, Pairs<T>(a));
      cube.MultiplyPlain({weights, 0, task.rows, column, k, false}, tile, n, added == 0, true);
      if (kInHalves && (column + kInner == kWideKeys || added + kInner >= step.keys)) cube.Release(weights);
    }
  }
  // Begins columns of P V.
  __aicore__ void BeginValues(int32_t d) {
    if (d == 0) AscendC::CrossCoreWaitFlag(kProbabilitiesReady);
    if (alternates)
      cube.BeginSums(kValueSums);
    else
      cube.BeginSums();
  }

  static constexpr bool kInHalves = kKeys > kWideKeys;  // P of a step takes both buffers of L1
  static_assert(!kInHalves || Sizes::kTiles.head_dim <= kTile, "P is multiplied once");
  static constexpr int32_t kScoreSums = 0, kOtherScoreSums = 2, kValueSums = 1;  // where products alternate

  const A& a;
  ForwardWorkspace<T, A> workspace;
  CubeCore<T> cube;
  L1Tile<T> queries, weights;
  bool alternates;    // whether products of S and P V take turns
  int32_t tile_keys;  // keys of a tile of S
  int32_t added = 0;  // keys of P V whose products are in its sums
  int32_t wides = 0;  // buffers that weights were loaded into
};

template <typename T, class A>
class ForwardVector : VectorCore {
  using Sizes = SizesOf<sizeof(T), A::kLongSteps>;
  static constexpr int32_t kKeys = Sizes::kKeys, kChunkRows = Sizes::kChunkRows, kPitch = Sizes::kPitch,
                           kPartialRows = Sizes::kPartialRows, kPartialPitch = Sizes::kPartialPitch;

 public:
  __aicore__ explicit ForwardVector(const A& arguments)
      : a(arguments),
        workspace(arguments),
        width(RoundUp(arguments.head_dim_v, kLanes)),
        biases(arguments),
        intervals(arguments),
        softmax(arguments, &biases, &intervals) {
    using namespace AscendC;
    buffers = kFixedBytes + 4 * kHalf * width + OptionBytes() <= kUbBytes ? 2 : 1;
    scores = Carve<float>(buffers * kChunk);
    rounded = Carve<T>(buffers * kChunk);
    output = Carve<float>(kHalf * width);
    statistics = Carve<float>(kHalf);
    statistics_wide = Carve<float>(kHalf * kWide);
    softmax.SetMemory(Carve<float>(OnlineSoftmax<T, A>::kFloats), statistics_wide);
    if (a.has_bias())
      biases.SetMemory(Carve<float>(Biases<T>::FloatsOf(kChunkRows, kKeys, kPitch)), kChunkRows, kKeys, kPitch);
    if (a.has_intervals()) intervals.SetMemory(Carve<float>(Intervals::FloatsOf(kChunkRows, kKeys)), kChunkRows, kKeys);
    if (a.has_dropout()) {
      dropout.Init(a, Carve<int32_t>(Dropout::kConstantWords));
      constexpr int32_t kStep = Dropout::WordsOf(kStepTiles) + Dropout::PartsOf(kStepGroups, kMaxAcross);
      draws_steps = buffers == 2 && Free<int32_t>() >= kStep;
      const int32_t tiles = draws_steps ? kStepTiles : kChunkTiles;
      const int32_t groups = draws_steps ? kStepGroups : kChunkGroups;
      const LocalTensor<int32_t> words = Carve<int32_t>(Dropout::WordsOf(tiles));
      dropout.SetMemory(Carve<int32_t>(Dropout::PartsOf(groups, kMaxAcross)), groups, kMaxAcross, words, tiles);
    }
    // Lanes beyond the last row and column enter the computation but not the results: they must hold finite values.
    Duplicate(scores, 0.0f, buffers * kChunk);
    Zero(rounded, buffers * kChunk);
    Duplicate(statistics, 0.0f, kHalf);
    Barrier();
    for (int32_t e = 0; e < 2; ++e) {
      SetFlag<HardEvent::V_MTE2>(e);
      SetFlag<HardEvent::MTE3_V>(e);
    }
    SetFlag<HardEvent::MTE3_V>(kStatisticsEvent);
  }

  __aicore__ void Run() {
    using namespace AscendC;
    Steps<A> steps(a, kKeys);
    Step ring[kSlots], step, next;
    int32_t issued = 0;
    for (bool more = Next(&steps, &next); more;) {
      step = next;
      more = Next(&steps, &next);
      if (!step.keys) {
        StoreEmpty(step.task);
        continue;
      }
      Softmax(step, more ? &next : nullptr);
      ring[issued % kSlots] = step;
      if (issued >= kAhead) Accumulate(ring[(issued - kAhead) % kSlots]);
      ++issued;
    }
    for (int32_t t = Greater(0, issued - kAhead); t < issued; ++t) Accumulate(ring[t % kSlots]);
    for (int32_t e = 0; e < 2; ++e) {
      WaitFlag<HardEvent::V_MTE2>(e);
      WaitFlag<HardEvent::MTE3_V>(e);
    }
    WaitFlag<HardEvent::MTE3_V>(kStatisticsEvent);
    if (a.has_bias()) biases.Finish();
    if (a.has_intervals()) intervals.Finish();
  }

 private:
  static constexpr int32_t kHalf = kRows / 2;
  static constexpr int32_t kChunk = kChunkRows * kPitch;  // scores of a buffer
  static constexpr int32_t kWide = 8;                     // a row's value in every lane of one block
  static constexpr int32_t kPitchBlocks = kPitch / 8;
  static constexpr int32_t kStatisticsEvent = 2, kIsolationEvent = 3;
  // Sizes of the generator's draws: groups of rows in a step and in a chunk, tiles across the keys, and their product.
  static constexpr int32_t kStepGroups = kHalf / kGroupRows, kChunkGroups = (kChunkRows + kGroupRows - 1) / kGroupRows;
  static constexpr int32_t kMaxAcross = kKeys / kLanes;
  static constexpr int32_t kStepTiles = kStepGroups * kMaxAcross, kChunkTiles = kChunkGroups * kMaxAcross;

  static constexpr int32_t kFixedBytes = Sizes::kTiles.ub_bytes(0);  // bytes in UB of every call, without O
  // Bytes of UB for biases, a Mask and dropout. Dropout draws the words of one chunk at a time if UB has no room for a
  // whole step.
  static constexpr int32_t kBiasBytes = 4 * Biases<T>::FloatsOf(kChunkRows, kKeys, kPitch);
  static constexpr int32_t kMaskBytes = 4 * Intervals::FloatsOf(kChunkRows, kKeys);
  static constexpr int32_t kDropoutBytes =
      4 * (Dropout::kConstantWords + Dropout::WordsOf(kChunkTiles) + Dropout::PartsOf(kChunkGroups, kMaxAcross));
  static constexpr int32_t kMostBytes =
      Sizes::kTiles.ub_bytes(Sizes::kTiles.head_dim) + kBiasBytes + kMaskBytes + kDropoutBytes;
  static constexpr int32_t kFewestBuffers = kMostBytes <= kUbBytes ? 2 : 1;  // buffers of scores and of P
  static_assert(kMostBytes - (2 - kFewestBuffers) * kChunk * (4 + int32_t(sizeof(T))) <= kUbBytes,
                "there is room for everything");
  __aicore__ int32_t OptionBytes() const {
    return (a.has_bias() ? kBiasBytes : 0) + (a.has_intervals() ? kMaskBytes : 0) +
           (a.has_dropout() ? kDropoutBytes : 0);
  }

  __aicore__ static bool Next(Steps<A>* steps, Step* step) {
    if (!steps->Next(step)) return false;
    TakeHalf(&step->task.row, &step->task.rows);
    return true;
  }

  // The first row of the task in its workspace slot.
  __aicore__ static int32_t SlotRow(const Task& task) { return task.row % kRows; }

  __aicore__ void Softmax(const Step& step, const Step* next) {
    using namespace AscendC;
    const Task& task = step.task;
    if (step.first) softmax.Begin(task);
    if (a.has_intervals() && task.rows > 0) intervals.Begin(task, task.head, step.key, step.keys, task.row, task.rows);
    const bool isolates = a.has_intervals() && step.isolates && task.rows > 0;
    if (isolates) IsolateValues(step);
    if (task.rows == 0) CrossCoreWaitFlag(kScoresReady);  // with rows the first chunk waits
    for (int32_t row = 0; row < task.rows; row += kChunkRows)
      SoftmaxChunk(step, next, row, Lesser(kChunkRows, task.rows - row));
    if (isolates) intervals.GiveBack();
    CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
  }

  // Both vector cores look for values that are not finite, one of them stores them.
  __aicore__ void IsolateValues(const Step& step) {
    const Task& task = step.task;
    static_assert(RowIsolation<T>::FloatsOf(16, kMaxHeadDim) <= kFewestBuffers * kChunk, "the buffers of scores do");
    TakeLoadBuffers();
    not_finite = intervals.Borrow();
    RowIsolation<T> rows(a, a.head_dim_v, scores, buffers * kChunk, kIsolationEvent);
    rows.Run(Head<T>(a.v, task.batch, task.head / a.group_size(), task.keys.start + step.key), a.v.row_stride,
             step.keys, not_finite, IsolatedRow<T>(a, Sizes::kIsolatedForward, step.slot * kKeys),
             AscendC::GetSubBlockIdx() == 0);
    GiveLoadBuffers();
  }

  // Draws the words of a whole step into the buffers of its scores, and begins the words of the next step while the
  // first scores arrive; or draws the words of one chunk of rows. `scratch`: a buffer of P.
  __aicore__ void DrawWords(const Step& step, const Step* next, int32_t row, int32_t rows,
                            const AscendC::LocalTensor<int32_t>& scratch) {
    constexpr int32_t kTiles = kMaxAcross > kStepGroups ? kMaxAcross : kStepGroups;
    static_assert(A::kLongSteps || Dropout::ScratchOf(kStepTiles) <= 2 * kChunk, "scores are large enough");
    static_assert(A::kLongSteps || Dropout::ScratchOf(kTiles) * 4 <= kChunk * int32_t(sizeof(T)), "so is P");
    static_assert(kChunkTiles <= kTiles, "and for a chunk");
    if (draws_steps) {
      TakeLoadBuffers();
      dropout.SetScratch(scores.ReinterpretCast<int32_t>(), kStepTiles);
    } else {
      dropout.SetScratch(scratch, kTiles);
    }
    // A rolled loop over this step and the next one keeps one copy of the code of BeginWords.
    FLASHATTN_ROLLED for (int32_t turn = 0; turn < 2; ++turn) {
      if (turn == 0) {
        if (has_begun) continue;
      } else {
        dropout.Draw();
        if (!draws_steps) return;
        GiveLoadBuffers();
        has_begun = next && next->keys && next->task.rows > 0;
        if (!has_begun) return;
        dropout.SetScratch(scratch, kTiles);
      }
      const Step& begun = turn == 0 ? step : *next;
      BeginWords(begun, row, draws_steps ? begun.task.rows : rows);
    }
  }
  // Rows count from the task's first row.
  __aicore__ void BeginWords(const Step& step, int32_t row, int32_t rows) {
    const Task& task = step.task;
    if (row == 0 && step.first) dropout.BeginHead(task.batch, task.head);
    if (!draws_steps || step.first) dropout.BeginRows(task.row + row, rows);
    if (row == 0) dropout.BeginKeys(step.key, RoundUp(step.keys, kLanes));
  }

  __aicore__ void SoftmaxChunk(const Step& step, const Step* next, int32_t row, int32_t rows) {
    using namespace AscendC;
    const Task& task = step.task;
    const int32_t buffer = chunks++ % buffers, keys = Columns<T>(a, step.keys);
    const int64_t slot_row = SlotRow(task) + row;
    const LocalTensor<T> p = rounded[buffer * kChunk];
    WaitFlag<HardEvent::MTE3_V>(buffer);
    if (a.has_dropout() && (row == 0 || !draws_steps))
      DrawWords(step, next, row, rows, p.template ReinterpretCast<int32_t>());
    if (row == 0) CrossCoreWaitFlag(kScoresReady);
    if (softmax.SeesNothing(step, task.row + row, rows))
      softmax.WeighNothing(step, row, rows, p);
    else
      WeighScores(step, row, rows, buffer, p);
    SetFlag<HardEvent::V_MTE3>(buffer);
    WaitFlag<HardEvent::V_MTE3>(buffer);
    constexpr int32_t kElement = sizeof(T);
    DataCopyPad(workspace.Probabilities(step.slot)[slot_row * kKeys], p,
                DataCopyExtParams(rows, keys * kElement, kPitch * kElement / 32 - Blocks<T>(keys),
                                  (kKeys - keys) * kElement, 0));
    SetFlag<HardEvent::MTE3_V>(buffer);
  }
  // Loads scores from the workspace into a UB buffer.
  __aicore__ void WeighScores(const Step& step, int32_t row, int32_t rows, int32_t buffer,
                              const AscendC::LocalTensor<T>& p) {
    using namespace AscendC;
    const Task& task = step.task;
    const int32_t keys = Columns<T>(a, step.keys);
    const int64_t slot_row = SlotRow(task) + row;
    const LocalTensor<float> s = scores[buffer * kChunk];
    WaitFlag<HardEvent::V_MTE2>(buffer);
    const int32_t copied = RoundUp(keys, 8) / 8;
    DataCopyPad(s, workspace.Scores(step.slot)[slot_row * kKeys],
                DataCopyExtParams(rows, keys * 4, (kKeys - keys) * 4, kPitchBlocks - copied, 0),
                DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);

    static_assert(Dropout::MasksOf(kChunkTiles) / (4 / int32_t(sizeof(T))) <= kChunk,
                  "S's buffer is large enough for the masks");
    const ScoreChunk chunk = {s, {kPitchBlocks, Pairs<T>(a)}, task.row + row, rows, step.key, step.keys};
    softmax.Weigh(step, chunk, row, p, &dropout, draws_steps ? row / kGroupRows : 0, not_finite);
    SetFlag<HardEvent::V_MTE2>(buffer);
  }

  // O = O * decay + P V; after the last block the rows are divided by their sums and stored.
  __aicore__ void Accumulate(const Step& step) {
    using namespace AscendC;
    const Task& task = step.task;
    CrossCoreWaitFlag(kPartialReady);
    const uint8_t pitch = width / 8;
    Brcb(statistics_wide, softmax.Decay(step.slot), kHalf / 8, {1, 8});
    Barrier();
    for (int32_t row = 0; row < task.rows; row += kPartialRows) {
      const int32_t rows = Lesser(kPartialRows, task.rows - row), buffer = chunks++ % buffers;
      const LocalTensor<float> product = scores[buffer * kChunk], o = output[row * width];
      const int32_t copied = RoundUp(a.head_dim_v, 8) / 8;
      WaitFlag<HardEvent::V_MTE2>(buffer);
      DataCopyPad(product, workspace.Partial(step.slot)[(SlotRow(task) + row) * kPartialPitch],
                  DataCopyExtParams(rows, a.head_dim_v * 4, (kPartialPitch - a.head_dim_v) * 4, pitch - copied, 0),
                  DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
      SetFlag<HardEvent::MTE2_V>(buffer);
      WaitFlag<HardEvent::MTE2_V>(buffer);
      if (step.first) {
        Adds(o, product, 0.0f, rows * width);
      } else {
        const LocalTensor<float> wide = statistics_wide[row * kWide];
        for (int32_t c = 0; c < width; c += kLanes)
          FusedMulAdd(o[c], wide, product[c], kLanes, rows, {1, 0, 1, pitch, 1, pitch});
      }
      Barrier();
      SetFlag<HardEvent::V_MTE2>(buffer);
    }
    if (step.last && task.rows > 0) Finish(task);
  }

  __aicore__ void Finish(const Task& task) {
    using namespace AscendC;
    const uint8_t pitch = width / 8;
    constexpr float kSmallest = 1e-30f;  // the sum is 0 (and O too) where a row sees no key, otherwise about 1 or more
    WaitFlag<HardEvent::MTE3_V>(kStatisticsEvent);
    Maxs(statistics, softmax.Sum(task), kSmallest, task.rows);
    Duplicate(statistics_wide, a.inverse_keep, task.rows);
    Barrier();
    Div(statistics, statistics_wide, statistics, task.rows);
    Barrier();
    Brcb(statistics_wide, statistics, RoundUp(task.rows, 8) / 8, {1, 8});
    Barrier();
    for (int32_t c = 0; c < width; c += kLanes)
      Mul(output[c], output[c], statistics_wide, kLanes, task.rows, {1, 1, 0, pitch, pitch, 1});
    Ln(statistics, softmax.Sum(task), task.rows);
    Barrier();
    Add(statistics, statistics, softmax.Maximum(task), task.rows);
    if (a.has_sink && softmax.Sink(task) > kHighest) {  // the maximum saturates at the largest finite number
      Barrier();
      Duplicate(statistics, __builtin_inff(), task.rows);
    }
    StoreStatistics(task);
    StoreOut(task, false);
    Barrier();
  }

  // Fully masked rows: out = 0, and lse = -inf, or the sink.
  __aicore__ void StoreEmpty(const Task& task) {
    using namespace AscendC;
    if (task.rows == 0) return;
    float lse = -__builtin_inff();
    if (a.has_sink) lse = softmax.Sink(task);
    WaitFlag<HardEvent::MTE3_V>(kStatisticsEvent);
    Duplicate(statistics, lse, task.rows);
    StoreStatistics(task);
    StoreOut(task, true);
  }

  __aicore__ void StoreStatistics(const Task& task) {
    using namespace AscendC;
    SetFlag<HardEvent::V_MTE3>(kStatisticsEvent);
    WaitFlag<HardEvent::V_MTE3>(kStatisticsEvent);
    const int64_t at = task.batch * a.lse.batch_stride + task.head * a.lse.head_stride + task.queries.start + task.row;
    DataCopyPad(Global<float>((uint64_t)a.lse.data, at), statistics, DataCopyExtParams(1, task.rows * 4, 0, 0, 0));
    SetFlag<HardEvent::MTE3_V>(kStatisticsEvent);
  }
  // Stores the rounded rows of O, or zeros.
  __aicore__ void StoreOut(const Task& task, bool zeros) {
    using namespace AscendC;
    constexpr int32_t kElement = sizeof(T);
    const int32_t gap = Blocks<T>(width) - Blocks<T>(a.head_dim_v);
    for (int32_t row = 0; row < task.rows; row += kPartialRows) {
      const int32_t rows = Lesser(kPartialRows, task.rows - row), buffer = chunks++ % buffers;
      const LocalTensor<T> o = rounded[buffer * kChunk];
      WaitFlag<HardEvent::MTE3_V>(buffer);
      if (zeros)
        Zero(o, rows * width);
      else
        Round(o, output[row * width], rows * width);
      SetFlag<HardEvent::V_MTE3>(buffer);
      WaitFlag<HardEvent::V_MTE3>(buffer);
      DataCopyPad(
          Head<T>(a.out, task.batch, task.head, task.queries.start + task.row + row), o,
          DataCopyExtParams(rows, a.head_dim_v * kElement, gap, (a.out.row_stride - a.head_dim_v) * kElement, 0));
      SetFlag<HardEvent::MTE3_V>(buffer);
    }
  }

  const A& a;
  ForwardWorkspace<T, A> workspace;
  int32_t width;  // floats of a row of O: whole repeats
  int32_t buffers =
      2;  // buffers of scores and of P: one if head dim, biases, Mask and dropout together leave no room for two
  int32_t chunks = 0;
  Biases<T> biases;
  Intervals intervals;
  OnlineSoftmax<T, A> softmax;
  AscendC::LocalTensor<float> scores, output, statistics, statistics_wide, not_finite;
  AscendC::LocalTensor<T> rounded;
  bool draws_steps = false;  // draws the words of a step at a time
  bool has_begun = false;    // the next step's words are begun
  Dropout dropout;
};

template <typename T, class A>
__aicore__ inline void Forward(const A& arguments) {
  if ASCEND_IS_AIC {
    RunPart<ForwardCube<T, A>>(arguments);
  }
  if ASCEND_IS_AIV {
    RunPart<ForwardVector<T, A>>(arguments);
  }
}

}  // namespace ascend
}  // namespace flashattn_ext
