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
//   cube     S0  S1  S2 PV0 S3 PV1 S4 PV2 ...
//   vector       P0  P1  P2 O0  P3 O1  P4 O2 ...
//
// One flag in each direction and per step is enough. Scores of step t + kSlots overwrite slot t after PV(t), which
// waits for P(t); P(t + kSlots) comes after O(t), which waits for PV(t); and PV(t + kSlots) waits for P(t + kSlots).
#pragma once

#include "cube.h"
#include "philox.h"
#include "vector.h"

namespace flashattn_ext {
namespace ascend {

// Of so many keys: whole pairs where they are paired.
template <typename T>
__aicore__ inline int32_t Columns(const Arguments& a, int32_t keys) {
  return Pairs<T>(a) ? RoundUp(keys, 16) : keys;
}

template <typename T>
class ForwardCube {
  using Sizes = SizesOf<sizeof(T)>;
  static constexpr int32_t kKeys = Sizes::kKeys, kInner = Sizes::kInner;

 public:
  __aicore__ explicit ForwardCube(const Arguments& arguments) : a(arguments), workspace(arguments) {}

  __aicore__ void Run() {
    Steps steps(a, kKeys);
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
    cube.Finish();
  }

 private:
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
    const int32_t key_head = task.head / a.group_size();
    AscendC::CrossCoreWaitFlag(kProbabilitiesReady);
    const L1Tile<T> probabilities =
        cube.LoadWide(number % 2, workspace.Probabilities(step.slot), task.rows, Columns<T>(a, step.keys), kKeys);
    const AscendC::GlobalTensor<float> partial = workspace.Partial(step.slot);
    for (int32_t d = 0; d < a.head_dim_v; d += kTile) {
      const int32_t n = Lesser(kTile, a.head_dim_v - d);
      cube.BeginSums();
      for (int32_t key = 0; key < step.keys; key += kInner) {
        const int32_t rows = Lesser(kInner, step.keys - key), k = Columns<T>(a, rows);
        const int64_t row = task.keys.start + step.key + key;
        const L1Tile<T> tile =
            cube.LoadTile(Head<T>(a.v, task.batch, key_head, row)[d], rows, n, a.v.row_stride, Pairs<T>(a));
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
      : a(arguments), workspace(arguments), width(RoundUp(arguments.head_dim_v, kLanes)) {
    using namespace AscendC;
    scores = Carve<float>(2 * kChunkRows * kPitch);
    rounded = Carve<T>(2 * kChunkRows * kPitch);
    output = Carve<float>(kHalf * width);
    row_shift = Carve<float>(kStatisticsRing * kHalf);
    row_sum = Carve<float>(kStatisticsRing * kHalf);
    decay = Carve<float>(kSlots * kHalf);
    chunk_shift = Carve<float>(kChunkRows);
    chunk_sum = Carve<float>(kChunkRows);
    chunk_wide = Carve<float>(kChunkRows * kWide);
    factor = Carve<float>(kWide);
    statistics = Carve<float>(kHalf);
    statistics_wide = Carve<float>(kHalf * kWide);
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
    Duplicate(chunk_shift, 0.0f, kChunkRows);
    Duplicate(factor, Factor(), kWide);
    Duplicate(statistics, 0.0f, kHalf);
    Duplicate(decay, 0.0f, kSlots * kHalf);
    Barrier();
    for (int32_t e = 0; e < 2; ++e) {
      SetFlag<HardEvent::V_MTE2>(e);
      SetFlag<HardEvent::MTE3_V>(e);
    }
    SetFlag<HardEvent::MTE3_V>(kStatisticsEvent);
  }

  __aicore__ void Run() {
    using namespace AscendC;
    Steps steps(a, kKeys);
    Step ring[kSlots], step, next;
    int32_t issued = 0;
    for (bool more = Next(&steps, &next); more;) {
      step = next;
      more = Next(&steps, &next);
      if (!step.keys) {
        StoreEmpty(step.task);
        continue;
      }
      if (draws_steps && step.task.rows > 0) DrawStep(step, more ? &next : nullptr);
      Softmax(step);
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
  }

 private:
  static constexpr int32_t kHalf = kRows / 2;
  static constexpr int32_t kWide = 8;  // a row's value in every lane of one block
  static constexpr int32_t kPitchBlocks = kPitch / 8;
  static constexpr int32_t kStatisticsEvent = 2;
  // Of the generator: groups of rows in a step and in a chunk, tiles across the keys, and both together.
  static constexpr int32_t kStepGroups = kHalf / kGroupRows, kChunkGroups = (kChunkRows + kGroupRows - 1) / kGroupRows;
  static constexpr int32_t kMaxAcross = kKeys / kLanes;
  static constexpr int32_t kStepTiles = kStepGroups * kMaxAcross, kChunkTiles = kChunkGroups * kMaxAcross;

  __aicore__ static bool Next(Steps* steps, Step* step) {
    if (!steps->Next(step)) return false;
    TakeHalf(&step->task.row, &step->task.rows);
    return true;
  }

  // First of them in the workspace.
  __aicore__ static int32_t SlotRow(const Task& task) { return task.row % kRows; }

  __aicore__ void Softmax(const Step& step) {
    using namespace AscendC;
    const Task& task = step.task;
    if (step.first) BeginStatistics(task);
    CrossCoreWaitFlag(kScoresReady);
    for (int32_t row = 0; row < task.rows; row += kChunkRows)
      SoftmaxChunk(step, row, Lesser(kChunkRows, task.rows - row));
    CrossCoreSetFlag<2, PIPE_MTE3>(kProbabilitiesReady);
  }

  // Words of a step, in the buffers of its scores, and what the next one begins with while the first scores come.
  __aicore__ void DrawStep(const Step& step, const Step* next) {
    using namespace AscendC;
    static_assert(kForwardAlone || Dropout::ScratchOf(kStepTiles) <= 2 * kChunkRows * kPitch, "they are large enough");
    TakeLoadBuffers();
    dropout.SetScratch(scores.ReinterpretCast<int32_t>(), kStepTiles);
    if (!has_begun) BeginDraw(step);
    dropout.Draw();
    GiveLoadBuffers();
    has_begun = next && next->keys && next->task.rows > 0;
    if (!has_begun) return;
    constexpr int32_t kTiles = kMaxAcross > kStepGroups ? kMaxAcross : kStepGroups;
    static_assert(kForwardAlone || Dropout::ScratchOf(kTiles) * 4 <= kChunkRows * kPitch * int32_t(sizeof(T)),
                  "a buffer of P is large enough");
    WaitFlag<HardEvent::MTE3_V>(0);
    dropout.SetScratch(rounded.template ReinterpretCast<int32_t>(), kTiles);
    BeginDraw(*next);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    SetFlag<HardEvent::MTE3_V>(0);
  }
  __aicore__ void BeginDraw(const Step& step) {
    const Task& task = step.task;
    if (step.first) {
      dropout.BeginHead(task.batch, task.head);
      dropout.BeginRows(task.row, task.rows);
    }
    dropout.BeginKeys(step.key, RoundUp(step.keys, kLanes));
  }

  // Those of a chunk, `row` rows behind the step's first.
  __aicore__ void DrawChunk(const Step& step, int32_t row, int32_t rows, const AscendC::LocalTensor<int32_t>& scratch) {
    const Task& task = step.task;
    dropout.SetScratch(scratch, kChunkTiles);
    if (row == 0) {
      if (step.first) dropout.BeginHead(task.batch, task.head);
      dropout.BeginKeys(step.key, RoundUp(step.keys, kLanes));
    }
    dropout.BeginRows(task.row + row, rows);
    dropout.Draw();
  }

  // The sink is a score that every row has seen before the first key.
  __aicore__ void BeginStatistics(const Task& task) {
    float logit = kLowest, sum = 0.0f;
    if (a.has_sink) {
      const float sink = a.sink ? Global<float>((uint64_t)a.sink).GetValue(task.head) : 0.0f;
      const bool counts = !(sink < kLowest);
      logit = counts ? sink : kLowest;
      sum = counts ? 1.0f : 0.0f;
    }
    const int32_t at = task.number % kStatisticsRing * kHalf;
    AscendC::Duplicate(row_shift[at], -logit, kHalf);
    AscendC::Duplicate(row_sum[at], sum, kHalf);
    Barrier();
  }

  __aicore__ void SoftmaxChunk(const Step& step, int32_t row, int32_t rows) {
    using namespace AscendC;
    const Task& task = step.task;
    const int32_t buffer = chunks++ % 2, keys = Columns<T>(a, step.keys), columns = RoundUp(keys, kLanes);
    const int64_t slot_row = SlotRow(task) + row;
    const LocalTensor<float> s = scores[buffer * kChunkRows * kPitch];
    const LocalTensor<T> p = rounded[buffer * kChunkRows * kPitch];
    const LocalTensor<float> tree = p.template ReinterpretCast<float>();  // until P is made
    WaitFlag<HardEvent::MTE3_V>(buffer);
    if (a.has_dropout() && !draws_steps) {
      static_assert(kForwardAlone || Dropout::ScratchOf(kChunkTiles) * 4 <= kChunkRows * kPitch * int32_t(sizeof(T)),
                    "P's buffer is free here");
      DrawChunk(step, row, rows, p.template ReinterpretCast<int32_t>());
    }
    WaitFlag<HardEvent::V_MTE2>(buffer);
    const int32_t copied = RoundUp(keys, 8) / 8;
    DataCopyPad(s, workspace.Scores(step.slot)[slot_row * kKeys],
                DataCopyExtParams(rows, keys * 4, (kKeys - keys) * 4, kPitchBlocks - copied, 0),
                DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);

    // The chunk is one piece of memory: an operation without an operand per row takes all of it at once.
    const uint8_t all = ((rows - 1) * kPitchBlocks + columns / 8 + 7) / 8;
    const UnaryRepeatParams dense(1, 1, 8, 8);
    if (a.scale <= 0) {  // the largest product has not the largest score
      Muls(s, s, a.scale, kLanes, all, dense);
      Barrier();
    }
    HideScores(TileMask(a, task.queries.length, task.keys.length), task.row + row, rows, step.key, step.keys, s,
               {kPitchBlocks, Pairs<T>(a)});
    UpdateStatistics(step, row, rows, s, columns, tree);
    for (int32_t c = 0; c < columns; c += kLanes)
      FusedMulAdd(s[c], factor, chunk_wide, kLanes, rows, {1, 0, 0, kPitchBlocks, 0, 1});
    Barrier();
    const LocalTensor<float> sum = row_sum[task.number % kStatisticsRing * kHalf + row];
    Exp(s, s, kLanes, all, dense);
    Barrier();
    Reduce<false>(chunk_sum, s, rows, columns, tree);
    FusedMulAdd(sum, decay[step.slot * kHalf + row], chunk_sum, rows, 1, {1, 1, 1, 8, 8, 8});
    RoundRepeats(p, s, all);
    if (a.has_dropout()) {
      static_assert(kForwardAlone || Dropout::MasksOf(kChunkTiles) / (4 / int32_t(sizeof(T))) <= kChunkRows * kPitch,
                    "S's buffer is free here");
      const LocalTensor<int32_t> masks = s.template ReinterpretCast<int32_t>();
      const int32_t group = draws_steps ? row / kGroupRows : 0;
      if constexpr (sizeof(T) == 2)
        dropout.ApplyRounded(p.template ReinterpretCast<uint16_t>(), kPitchBlocks / 2, masks, group);
      else
        dropout.Apply(p, kPitchBlocks, masks, group, (rows + kGroupRows - 1) / kGroupRows);
    }
    SetFlag<HardEvent::V_MTE2>(buffer);
    SetFlag<HardEvent::V_MTE3>(buffer);
    WaitFlag<HardEvent::V_MTE3>(buffer);
    constexpr int32_t kElement = sizeof(T);
    DataCopyPad(workspace.Probabilities(step.slot)[slot_row * kKeys], p,
                DataCopyExtParams(rows, keys * kElement, kPitch * kElement / 32 - Blocks<T>(keys),
                                  (kKeys - keys) * kElement, 0));
    SetFlag<HardEvent::MTE3_V>(buffer);
  }

  // What the scores in UB are multiplied with: they are the products themselves, unless the scale turns their order
  // round.
  __aicore__ float Factor() const { return a.scale > 0 ? a.scale : 1.0f; }

  // A row's shift is its maximum with the sign turned round, which is added to its scores. It becomes that of old and
  // new ones, chunk_wide the same in whole blocks, and decay exp(old - new maximum): the last two instructions go
  // beside the caller's next ones.
  __aicore__ void UpdateStatistics(const Step& step, int32_t row, int32_t rows, const AscendC::LocalTensor<float>& s,
                                   int32_t columns, const AscendC::LocalTensor<float>& tree) {
    using namespace AscendC;
    const LocalTensor<float> shift = row_shift[step.task.number % kStatisticsRing * kHalf + row];
    const LocalTensor<float> chunk_decay = decay[step.slot * kHalf + row];
    Reduce<true>(chunk_shift, s, rows, columns, tree);
    Muls(chunk_shift, chunk_shift, -Factor(), rows);
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
    } else if (sizeof(T) == 4 || a.has_dropout()) {  // no pairs, or the blocks hold them
      AscendC::BlockReduceSum(blocks, last, rows, all, 1, 1, last_pitch);
      Barrier();
      ReduceRows<maximum>(result, blocks, rows, all[0]);
    } else {
      // In the same order as dropout, for the same bits: first the k-th and the (8 + k)-th of 16.
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

  // O = O * decay + P V; after the last block the rows are divided by their sums and leave.
  __aicore__ void Accumulate(const Step& step) {
    using namespace AscendC;
    const Task& task = step.task;
    CrossCoreWaitFlag(kPartialReady);
    const uint8_t pitch = width / 8;
    Brcb(statistics_wide, decay[step.slot * kHalf], kHalf / 8, {1, 8});
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
    const int32_t at = task.number % kStatisticsRing * kHalf;
    const uint8_t pitch = width / 8;
    constexpr float kSmallest = 1e-30f;  // the sum is 0 (and O too) where a row sees no key, otherwise at least 1
    WaitFlag<HardEvent::MTE3_V>(kStatisticsEvent);
    Maxs(statistics, row_sum[at], kSmallest, task.rows);
    Duplicate(statistics_wide, a.inverse_keep, task.rows);
    Barrier();
    Div(statistics, statistics_wide, statistics, task.rows);
    Barrier();
    Brcb(statistics_wide, statistics, RoundUp(task.rows, 8) / 8, {1, 8});
    Barrier();
    for (int32_t c = 0; c < width; c += kLanes)
      Mul(output[c], output[c], statistics_wide, kLanes, task.rows, {1, 1, 0, pitch, pitch, 1});
    Ln(statistics, row_sum[at], task.rows);
    Barrier();
    Sub(statistics, statistics, row_shift[at], task.rows);
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
    if (a.has_sink) lse = a.sink ? Global<float>((uint64_t)a.sink).GetValue(task.head) : 0.0f;
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
  AscendC::LocalTensor<float> scores, output, row_shift, row_sum, decay;
  AscendC::LocalTensor<float> chunk_shift, chunk_sum, chunk_wide, factor, statistics, statistics_wide;
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
