// The forward: out and lse of every query row. Per core one cube core and two vector cores walk through the same steps
// (schedule.h), a step being 128 query rows and up to 512 keys (fp32: 128); everything goes from one to the other
// through slots of the core's workspace:
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
// One flag in each direction and per step is enough. Scores of step t + kSlots overwrite slot t after PV(t), which
// waits for P(t); P(t + kSlots) comes after O(t), which waits for PV(t); and PV(t + kSlots) waits for P(t + kSlots).
//
// With a Mask all three walk once more if a result is not finite, and isolate what is not (isolation.h).
#pragma once

#include "cube.h"
#include "isolation.h"
#include "scores.h"

namespace flashattn_ext {
namespace ascend {

// How many columns of scores a number of keys takes: whole pairs where keys are paired.
template <typename T>
__aicore__ inline int32_t Columns(const Arguments& a, int32_t keys) {
  return Pairs<T>(a) ? RoundUp(keys, 16) : keys;
}

// Whether the vector cores of this block stored something that is not finite.
__aicore__ inline bool StoredNotFinite(const Arguments& a) {
  using namespace AscendC;
  const int64_t core = GetBlockIdx() / GetTaskRation();
  DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(
      Global<float>((uint64_t)a.checks, 2 * core));
  return AnyNotFinite(a, 2 * core, 2 * core + 2);
}

template <typename T>
class ForwardCube {
  using Sizes = SizesOf<sizeof(T)>;
  static constexpr int32_t kKeys = Sizes::kKeys, kInner = Sizes::kInner;

 public:
  __aicore__ explicit ForwardCube(const Arguments& arguments) : a(arguments), workspace(arguments) {}

  __aicore__ void Run() {
    FLASHATTN_ROLLED for (int32_t walk = 0; walk < 2; ++walk) {
      if (walk == 1 && !WalksAgain()) break;
      Walk(walk == 1);
    }
    cube.Finish();
  }

 private:
  __aicore__ bool WalksAgain() const {
    if (!a.has_intervals()) return false;
    AscendC::CrossCoreWaitFlag(kChecksStored);
    return StoredNotFinite(a);
  }
  __aicore__ void Walk(bool isolates) {
    Steps steps(a, kKeys, isolates);
    Step ring[kSlots], step;
    int32_t issued = 0;
    while (steps.Next(&step)) {
      if (!step.keys) continue;
      MultiplyKeys(step);
      ring[issued % kSlots] = step;
      if (issued >= kAhead) MultiplyValues(ring[(issued - kAhead) % kSlots], issued - kAhead);
      ++issued;
    }
    for (int32_t t = Greater(0, issued - kAhead); t < issued; ++t) MultiplyValues(ring[t % kSlots], t);
  }

  // S of a step. The queries of a task stay in L1.
  __aicore__ void MultiplyKeys(const Step& step) {
    const Task& task = step.task;
    const int32_t key_head = task.head / a.group_size();
    if (step.first)
      queries = cube.LoadResident(task.number % 2, Head<T>(a.q, task.batch, task.head, task.queries.start + task.row),
                                  task.rows, a.head_dim, a.q.row_stride);
    const AscendC::GlobalTensor<float> scores = workspace.Scores(step.slot);
    for (int32_t key = 0; key < step.keys; key += kTile) {
      const int32_t rows = Lesser(kTile, step.keys - key), n = Columns<T>(a, rows);
      cube.BeginSums();
      for (int32_t d = 0; d < a.head_dim; d += kInner) {
        const int32_t k = Lesser(kInner, a.head_dim - d);
        const int64_t row = task.keys.start + step.key + key;
        const L1Tile<T> tile =
            cube.LoadTile(Head<T>(a.k, task.batch, key_head, row)[d], rows, k, a.k.row_stride, Pairs<T>(a));
        cube.MultiplyTransposed({queries, 0, task.rows, d, k, false}, tile, 0, n, d == 0, true);
      }
      cube.StoreSums(scores[key], task.rows, n, kKeys);
    }
    if (step.last) cube.Release(queries);
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kScoresReady);
  }

  __aicore__ void MultiplyValues(const Step& step, int32_t number) {
    const Task& task = step.task;
    AscendC::CrossCoreWaitFlag(kProbabilitiesReady);
    const AscendC::GlobalTensor<T> values =
        step.isolates ? IsolatedRow<T>(a, Sizes::kIsolatedForward, step.slot * kKeys)
                      : Head<T>(a.v, task.batch, task.head / a.group_size(), task.keys.start + step.key);
    const int64_t pitch = step.isolates ? a.isolated_pitch() : a.v.row_stride;
    const L1Tile<T> probabilities =
        cube.LoadWide(number % 2, workspace.Probabilities(step.slot), task.rows, Columns<T>(a, step.keys), kKeys);
    const AscendC::GlobalTensor<float> partial = workspace.Partial(step.slot);
    for (int32_t d = 0; d < a.head_dim_v; d += kTile) {
      const int32_t n = Lesser(kTile, a.head_dim_v - d);
      cube.BeginSums();
      for (int32_t key = 0; key < step.keys; key += kInner) {
        const int32_t rows = Lesser(kInner, step.keys - key), k = Columns<T>(a, rows);
        const L1Tile<T> tile = cube.LoadTile(values[key * pitch + d], rows, n, pitch, Pairs<T>(a));
        cube.MultiplyPlain({probabilities, 0, task.rows, key, k, false}, tile, n, key == 0, true);
      }
      cube.StoreSums(partial[d], task.rows, n, kMaxHeadDim);
    }
    cube.Release(probabilities);
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kPartialReady);
  }

  const Arguments& a;
  ForwardWorkspace<T> workspace;
  CubeCore<T> cube;
  L1Tile<T> queries;
};

template <typename T>
class ForwardVector : VectorCore {
  using Sizes = SizesOf<sizeof(T)>;
  static constexpr int32_t kKeys = Sizes::kKeys, kChunkRows = Sizes::kChunkRows, kPitch = Sizes::kPitch,
                           kPartialRows = Sizes::kPartialRows;

 public:
  __aicore__ explicit ForwardVector(const Arguments& arguments)
      : a(arguments),
        workspace(arguments),
        width(RoundUp(arguments.head_dim_v, kLanes)),
        biases(arguments),
        intervals(arguments),
        softmax(arguments, &biases, &intervals) {
    using namespace AscendC;
    scores = Carve<float>(2 * kChunkRows * kPitch);
    rounded = Carve<T>(2 * kChunkRows * kPitch);
    output = Carve<float>(kHalf * width);
    statistics = Carve<float>(kHalf);
    statistics_wide = Carve<float>(kHalf * kWide);
    softmax.SetMemory(Carve<float>(OnlineSoftmax<T>::kFloats), statistics_wide);
    if (a.has_bias())
      biases.SetMemory(Carve<float>(Biases<T>::FloatsOf(kChunkRows, kKeys, kPitch)), kChunkRows, kKeys, kPitch);
    if (a.has_intervals()) {
      intervals.SetMemory(Carve<float>(Intervals::FloatsOf(kChunkRows, kKeys)), kChunkRows, kKeys);
      check.SetMemory(Carve<float>(FiniteCheck::kFloats));
    }
    if (a.has_dropout()) {
      dropout.Init(a, Carve<int32_t>(Dropout::kConstantWords));
      constexpr int32_t kStep = Dropout::WordsOf(kStepTiles) + Dropout::PartsOf(kStepGroups, kMaxAcross);
      draws_steps = Free<int32_t>() >= kStep;
      const int32_t tiles = draws_steps ? kStepTiles : kChunkTiles;
      const int32_t groups = draws_steps ? kStepGroups : kChunkGroups;
      const LocalTensor<int32_t> words = Carve<int32_t>(Dropout::WordsOf(tiles));
      dropout.SetMemory(Carve<int32_t>(Dropout::PartsOf(groups, kMaxAcross)), groups, kMaxAcross, words, tiles);
    }
    // Lanes behind the last row and column are computed with and never used: they must hold something.
    Duplicate(scores, 0.0f, 2 * kChunkRows * kPitch);
    Zero(rounded, 2 * kChunkRows * kPitch);
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
    FLASHATTN_ROLLED for (int32_t walk = 0; walk < 2; ++walk) {
      if (walk == 1 && !WalksAgain()) break;
      Walk(walk == 1);
    }
    for (int32_t e = 0; e < 2; ++e) {
      WaitFlag<HardEvent::V_MTE2>(e);
      WaitFlag<HardEvent::MTE3_V>(e);
    }
    WaitFlag<HardEvent::MTE3_V>(kStatisticsEvent);
    if (a.has_bias()) biases.Finish();
    if (a.has_intervals()) intervals.Finish();
  }

 private:
  __aicore__ bool WalksAgain() {
    using namespace AscendC;
    if (!a.has_intervals()) return false;
    check.Store(a, kIsolationEvent);
    CrossCoreSetFlag<2, PIPE_MTE3>(kChecksStored);     // the cube core waits for both vector cores,
    CrossCoreSetFlag<1, PIPE_MTE3>(kChecksExchanged);  // and each of them for the other one
    CrossCoreWaitFlag(kChecksExchanged);
    return StoredNotFinite(a);
  }

  __aicore__ void Walk(bool isolates) {
    Steps steps(a, kKeys, isolates);
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
  }

  static constexpr int32_t kHalf = kRows / 2;
  static constexpr int32_t kWide = 8;  // a row's value in every lane of one block
  static constexpr int32_t kPitchBlocks = kPitch / 8;
  static constexpr int32_t kStatisticsEvent = 2, kIsolationEvent = 3;
  // Sizes of the generator's draws: groups of rows in a step and in a chunk, tiles across the keys, and their product.
  static constexpr int32_t kStepGroups = kHalf / kGroupRows, kChunkGroups = (kChunkRows + kGroupRows - 1) / kGroupRows;
  static constexpr int32_t kMaxAcross = kKeys / kLanes;
  static constexpr int32_t kStepTiles = kStepGroups * kMaxAcross, kChunkTiles = kChunkGroups * kMaxAcross;

  __aicore__ static bool Next(Steps* steps, Step* step) {
    if (!steps->Next(step)) return false;
    TakeHalf(&step->task.row, &step->task.rows);
    return true;
  }

  // The first row of the task in its slot of the workspace.
  __aicore__ static int32_t SlotRow(const Task& task) { return task.row % kRows; }

  __aicore__ void Softmax(const Step& step, const Step* next) {
    using namespace AscendC;
    const Task& task = step.task;
    if (step.first) softmax.Begin(task);
    if (a.has_intervals() && task.rows > 0) intervals.Begin(task, task.head, step.key, step.keys, task.row, task.rows);
    const bool isolates = step.isolates && task.rows > 0;
    if (isolates) IsolateValues(step);
    if (task.rows == 0) CrossCoreWaitFlag(kScoresReady);  // otherwise the first chunk waits
    for (int32_t row = 0; row < task.rows; row += kChunkRows)
      SoftmaxChunk(step, next, row, Lesser(kChunkRows, task.rows - row));
    if (isolates) intervals.GiveBack();
    CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
  }

  // Both vector cores look for values that are not finite, one of them stores them.
  __aicore__ void IsolateValues(const Step& step) {
    const Task& task = step.task;
    constexpr int32_t kFloats = 2 * kChunkRows * kPitch;
    static_assert(kForwardAlone || RowIsolation<T>::FloatsOf(16, kMaxHeadDim) <= kFloats, "the buffers of scores do");
    TakeLoadBuffers();
    not_finite = intervals.Borrow();
    RowIsolation<T> rows(a, a.head_dim_v, scores, kFloats, kIsolationEvent);
    rows.Run(Head<T>(a.v, task.batch, task.head / a.group_size(), task.keys.start + step.key), a.v.row_stride,
             step.keys, not_finite, IsolatedRow<T>(a, Sizes::kIsolatedForward, step.slot * kKeys),
             AscendC::GetSubBlockIdx() == 0);
    GiveLoadBuffers();
  }

  // Words of a whole step, in the buffers of its scores, and what the next one begins with while the first scores come;
  // or those of a chunk of its rows alone. `scratch`: a buffer of P.
  __aicore__ void DrawWords(const Step& step, const Step* next, int32_t row, int32_t rows,
                            const AscendC::LocalTensor<int32_t>& scratch) {
    constexpr int32_t kTiles = kMaxAcross > kStepGroups ? kMaxAcross : kStepGroups;
    static_assert(kForwardAlone || Dropout::ScratchOf(kStepTiles) <= 2 * kChunkRows * kPitch,
                  "scores are large enough");
    static_assert(kForwardAlone || Dropout::ScratchOf(kTiles) * 4 <= kChunkRows * kPitch * int32_t(sizeof(T)),
                  "so is P");
    static_assert(kForwardAlone || kChunkTiles <= kTiles, "and for a chunk");
    if (draws_steps) {
      TakeLoadBuffers();
      dropout.SetScratch(scores.ReinterpretCast<int32_t>(), kStepTiles);
    } else {
      dropout.SetScratch(scratch, kTiles);
    }
    // This step and the next one take turns, so that the code of BeginWords is there once.
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
  // Rows are counted from the task's first one.
  __aicore__ void BeginWords(const Step& step, int32_t row, int32_t rows) {
    const Task& task = step.task;
    if (row == 0 && step.first) dropout.BeginHead(task.batch, task.head);
    if (!draws_steps || step.first) dropout.BeginRows(task.row + row, rows);
    if (row == 0) dropout.BeginKeys(step.key, RoundUp(step.keys, kLanes));
  }

  __aicore__ void SoftmaxChunk(const Step& step, const Step* next, int32_t row, int32_t rows) {
    using namespace AscendC;
    const Task& task = step.task;
    const int32_t buffer = chunks++ % 2, keys = Columns<T>(a, step.keys);
    const int64_t slot_row = SlotRow(task) + row;
    const LocalTensor<T> p = rounded[buffer * kChunkRows * kPitch];
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
  // Scores come from the workspace, into a buffer of UB.
  __aicore__ void WeighScores(const Step& step, int32_t row, int32_t rows, int32_t buffer,
                              const AscendC::LocalTensor<T>& p) {
    using namespace AscendC;
    const Task& task = step.task;
    const int32_t keys = Columns<T>(a, step.keys);
    const int64_t slot_row = SlotRow(task) + row;
    const LocalTensor<float> s = scores[buffer * kChunkRows * kPitch];
    WaitFlag<HardEvent::V_MTE2>(buffer);
    const int32_t copied = RoundUp(keys, 8) / 8;
    DataCopyPad(s, workspace.Scores(step.slot)[slot_row * kKeys],
                DataCopyExtParams(rows, keys * 4, (kKeys - keys) * 4, kPitchBlocks - copied, 0),
                DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);

    static_assert(kForwardAlone || Dropout::MasksOf(kChunkTiles) / (4 / int32_t(sizeof(T))) <= kChunkRows * kPitch,
                  "S's buffer is large enough for the masks");
    const ScoreChunk chunk = {s, {kPitchBlocks, Pairs<T>(a)}, task.row + row, rows, step.key, step.keys};
    softmax.Weigh(step, chunk, row, p, &dropout, draws_steps ? row / kGroupRows : 0, not_finite);
    SetFlag<HardEvent::V_MTE2>(buffer);
  }

  // O = O * decay + P V; after the last block the rows are divided by their sums and leave.
  __aicore__ void Accumulate(const Step& step) {
    using namespace AscendC;
    const Task& task = step.task;
    CrossCoreWaitFlag(kPartialReady);
    const uint8_t pitch = width / 8;
    Brcb(statistics_wide, softmax.Decay(step.slot), kHalf / 8, {1, 8});
    Barrier();
    for (int32_t row = 0; row < task.rows; row += kPartialRows) {
      const int32_t rows = Lesser(kPartialRows, task.rows - row), buffer = chunks++ % 2;
      const LocalTensor<float> product = scores[buffer * kChunkRows * kPitch], o = output[row * width];
      const int32_t copied = RoundUp(a.head_dim_v, 8) / 8;
      WaitFlag<HardEvent::V_MTE2>(buffer);
      DataCopyPad(product, workspace.Partial(step.slot)[(SlotRow(task) + row) * kMaxHeadDim],
                  DataCopyExtParams(rows, a.head_dim_v * 4, (kMaxHeadDim - a.head_dim_v) * 4, pitch - copied, 0),
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
    if (a.has_intervals()) check.Add(output, 1, a.head_dim_v, pitch);
    Sub(statistics, statistics, softmax.Shift(task), task.rows);
    if (a.has_sink && softmax.Sink(task) > kHighest) {  // its maximum is the largest number
      Barrier();
      Duplicate(statistics, __builtin_inff(), task.rows);
    }
    StoreStatistics(task);
    for (int32_t row = 0; row < task.rows; row += kPartialRows) {
      const int32_t rows = Lesser(kPartialRows, task.rows - row), buffer = chunks++ % 2;
      const LocalTensor<T> o = BeginStore(buffer);
      Round(o, output[row * width], rows * width);
      Store(task, row, rows, o, buffer);
    }
    Barrier();
  }

  // out = 0 and lse = log of the sum of nothing, or of the sink alone.
  __aicore__ void StoreEmpty(const Task& task) {
    using namespace AscendC;
    if (task.rows == 0) return;
    float lse = -__builtin_inff();
    if (a.has_sink) lse = softmax.Sink(task);
    WaitFlag<HardEvent::MTE3_V>(kStatisticsEvent);
    Duplicate(statistics, lse, task.rows);
    StoreStatistics(task);
    for (int32_t row = 0; row < task.rows; row += kPartialRows) {
      const int32_t rows = Lesser(kPartialRows, task.rows - row), buffer = chunks++ % 2;
      const LocalTensor<T> o = BeginStore(buffer);
      Zero(o, rows * width);
      Store(task, row, rows, o, buffer);
    }
  }

  __aicore__ void StoreStatistics(const Task& task) {
    using namespace AscendC;
    SetFlag<HardEvent::V_MTE3>(kStatisticsEvent);
    WaitFlag<HardEvent::V_MTE3>(kStatisticsEvent);
    const int64_t at = task.batch * a.lse.batch_stride + task.head * a.lse.head_stride + task.queries.start + task.row;
    DataCopyPad(Global<float>((uint64_t)a.lse.data, at), statistics, DataCopyExtParams(1, task.rows * 4, 0, 0, 0));
    SetFlag<HardEvent::MTE3_V>(kStatisticsEvent);
  }
  __aicore__ AscendC::LocalTensor<T> BeginStore(int32_t buffer) {
    AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(buffer);
    return rounded[buffer * kChunkRows * kPitch];
  }
  __aicore__ void Store(const Task& task, int32_t row, int32_t rows, const AscendC::LocalTensor<T>& o, int32_t buffer) {
    using namespace AscendC;
    SetFlag<HardEvent::V_MTE3>(buffer);
    WaitFlag<HardEvent::V_MTE3>(buffer);
    constexpr int32_t kElement = sizeof(T);
    const int32_t gap = Blocks<T>(width) - Blocks<T>(a.head_dim_v);
    DataCopyPad(Head<T>(a.out, task.batch, task.head, task.queries.start + task.row + row), o,
                DataCopyExtParams(rows, a.head_dim_v * kElement, gap, (a.out.row_stride - a.head_dim_v) * kElement, 0));
    SetFlag<HardEvent::MTE3_V>(buffer);
  }

  const Arguments& a;
  ForwardWorkspace<T> workspace;
  int32_t width;  // floats of a row of O: whole repeats
  int32_t chunks = 0;
  Biases<T> biases;
  Intervals intervals;
  OnlineSoftmax<T> softmax;
  FiniteCheck check;
  AscendC::LocalTensor<float> scores, output, statistics, statistics_wide, not_finite;
  AscendC::LocalTensor<T> rounded;
  bool draws_steps = false;  // words of a step at a time
  bool has_begun = false;    // the next step's
  Dropout dropout;
};

template <typename T>
__aicore__ inline void Forward(const Arguments& arguments) {
  if ASCEND_IS_AIC {
    ForwardCube<T> cube(arguments);
    cube.Run();
  }
  if ASCEND_IS_AIV {
    ForwardVector<T> vector(arguments);
    vector.Run();
  }
}

}  // namespace ascend
}  // namespace flashattn_ext
