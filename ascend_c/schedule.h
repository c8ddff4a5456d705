// Assigns tasks to cores and orders them. Tasks (128 query rows of one head)
// are counted through batch entries, row blocks from the last to the first, and
// heads, and dealt out to the cores in alternating direction. Under a causal
// mask the long tasks come first and tasks of similar length are adjacent,
// which balances the triangle over the cores. Packed sequences differ in
// length: there all tasks are counted in classes of similar visible area, the
// largest first. The cube core and the vector cores of a block process the same
// list.
#pragma once

#include <kernel_operator.h>  // before the shared headers: it defines what they compile to

#include "../csrc/rules/mask.h"
#include "interval_tiles.h"
#include "tiles.h"

namespace flashattn_ext {
namespace ascend {

using TileMask = BasicMask<int32_t>;

__aicore__ inline int32_t Lesser(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t Greater(int32_t a, int32_t b) { return a > b ? a : b; }
__aicore__ inline int32_t RoundUp(int32_t x, int32_t to) { return (x + to - 1) / to * to; }

template <typename T>
__aicore__ inline AscendC::GlobalTensor<T> Global(uint64_t address, int64_t offset = 0) {
  AscendC::GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer((__gm__ T*)address + offset);
  return tensor;
}

// Rows of one head of a [B, S, H, D] tensor.
template <typename T>
__aicore__ inline AscendC::GlobalTensor<T> Head(const TensorView& view, int32_t batch, int32_t head, int64_t row) {
  return Global<T>((uint64_t)view.data, batch * view.batch_stride + head * view.head_stride + row * view.row_stride);
}

// Columns of scores are paired if dropout reads the bytes of its words in 16
// bits (philox.h): of 16 keys, the k-th and the (8 + k)-th are adjacent, from
// the rows of K and V in L1 on. Biases and intervals are in the order of the
// keys: with them dropout works on fp32.
template <typename T, class A>
__aicore__ inline bool Pairs(const A& a) {
  return sizeof(T) == 2 && a.has_dropout_alone();
}
__aicore__ inline int32_t PairedIndex(int32_t key) { return key / 16 * 16 + key % 8 * 2 + key / 8 % 2; }

struct Task {
  int32_t number = 0;  // among this core's tasks that are not fully masked
  int32_t batch = 0, head = 0;
  int32_t row = 0,
          rows = 0;  // within the sequence: of queries, in the backward of keys
  Sequence queries = {0, 0}, keys = {0, 0};
};

// The position of batch entry b.
__aicore__ inline Sequence SequenceOf(const int32_t* cu_seqlens, int64_t length, int64_t total, int32_t b) {
  if (!cu_seqlens) return {0, length};
  AscendC::GlobalTensor<int32_t> starts = Global<int32_t>((uint64_t)cu_seqlens);
  return clamped_sequence(starts.GetValue(b), starts.GetValue(b + 1), total);
}
__aicore__ inline Sequence QueriesOf(const Arguments& a, int32_t b) {
  return SequenceOf(a.cu_seqlens_q, a.seqlen_q, a.total_q, b);
}
__aicore__ inline Sequence KeysOf(const Arguments& a, int32_t b) {
  return SequenceOf(a.cu_seqlens_k, a.seqlen_k, a.total_k, b);
}

enum class Side { queries, keys };

// `whole_heads`: all tasks of a head go to one core, in a fixed order. kByArea:
// whether packed sequences are counted in classes of area.
template <bool kByArea>
class Tasks {
 public:
  __aicore__ Tasks(const Arguments& arguments, Side side, bool whole_heads)
      : a(arguments), side(side), heads(side == Side::queries ? a.heads_q : a.heads_k), whole_heads(whole_heads) {
    cores = AscendC::GetBlockNum();
    core = AscendC::GetBlockIdx() / AscendC::GetTaskRation();
    mine = core;
    entry.batch = -1;
    if (!InClasses()) return;
    const int64_t longest = side == Side::queries ? a.seqlen_k : a.seqlen_q;  // the other side of a task, at most
    while (longest >> shift > kUpper) ++shift;
  }

  __aicore__ bool Next(Task* task) {
    if (rest == 0) {
      if (!NextMine()) return false;
      rest = whole_heads ? blocks : 1;
    }
    --rest;
    const int32_t at = whole_heads ? rest : block;
    *task = entry;
    task->row = Row(at);
    task->rows = Lesser(kRows, Length() - task->row);
    return true;
  }

 private:
  // Two classes an octave: areas whose two leading bits are `leading`, which
  // are followed by `shift` more. Areas below the last classes belong to the
  // last one, areas that are larger than the caller said to the first one. The
  // classes of many sequences cost more than they gain: each is a walk through
  // all of them.
  static constexpr int32_t kUpper = 3, kLower = 2, kLowestShift = 6;
  static constexpr int64_t kMostSequences = 256;

  __aicore__ bool InClasses() const { return kByArea && a.is_varlen() && a.batch <= kMostSequences; }
  __aicore__ int64_t Length() const { return side == Side::queries ? entry.queries.length : entry.keys.length; }
  // The long tasks of a causal mask come first: the last queries, the first
  // keys.
  __aicore__ int32_t Row(int32_t at) const { return (side == Side::queries ? at : blocks - 1 - at) * kRows; }
  // Whether a block of the sequence, or all of it, is in the class that is
  // counted now. Its area is what a row of it may see.
  __aicore__ bool IsOfClass() const {
    if (!InClasses()) return true;
    const TileMask mask(a, entry.queries.length, entry.keys.length);
    const int32_t row = whole_heads ? 0 : Row(block), end = whole_heads ? Length() : Lesser(row + kRows, Length());
    const TileMask::Range seen = side == Side::queries ? mask.keys_of(row, end) : mask.rows_of(row, end);
    const int32_t part = Greater(0, seen.end - seen.begin) >> shift;
    const bool last = shift == kLowestShift && leading == kLower;
    return part == leading || (last && part < kLower) || (is_first && part > kUpper);
  }
  __aicore__ bool NextClass() {
    if (!InClasses() || (shift == kLowestShift && leading == kLower)) return false;
    is_first = false;
    shift -= leading == kLower;
    leading = leading == kLower ? kUpper : kLower;
    entry.batch = -1;
    return true;
  }

  // The next task of this core: its head and block.
  __aicore__ bool NextMine() {
    for (;;) {
      if (block < 0) {
        if (++entry.batch >= a.batch) {
          if (!NextClass()) return false;
          continue;
        }
        entry.queries = QueriesOf(a, entry.batch);
        entry.keys = KeysOf(a, entry.batch);
        blocks = (Length() + kRows - 1) / kRows;
        block = (whole_heads ? Lesser(blocks, 1) : blocks) - 1;
        continue;
      }
      if (!IsOfClass()) {
        --block;
        continue;
      }
      if (mine < first + heads) break;
      first += heads;
      --block;
    }
    entry.head = mine - first;
    ++round;
    mine = round * cores + (round % 2 ? cores - 1 - core : core);
    return true;
  }

  const Arguments& a;
  Side side;
  int64_t heads;
  bool whole_heads;
  int64_t cores, core;
  int64_t first = 0;  // number of this block of rows of head 0, counted over all
                      // tasks of the call
  int64_t mine = 0, round = 0;
  int32_t blocks = 0, block = -1, rest = 0;
  int32_t shift = kLowestShift, leading = kUpper;
  bool is_first = true;
  Task entry;
};

// A task and one of its blocks of keys. A task that sees no key has one step,
// with `keys` 0.
struct Step {
  Task task;
  int32_t key = 0, keys = 0;  // within the sequence
  bool first = false, last = false;
  bool isolates = false;  // isolation.h: the step hides a pair, and an input may
                          // have a non-finite value
  int32_t slot = 0;       // slot of the workspace
};

// Whether a check of any vector core failed (isolation.h).
__aicore__ inline bool AnyNotFinite(const Arguments& a) {
  const AscendC::GlobalTensor<int32_t> checks = Global<int32_t>((uint64_t)a.checks);
  constexpr int32_t kExponent = 0x7f800000;
  bool any = false;
  for (int64_t core = 0; core < a.check_count; ++core) any |= (checks.GetValue(core) & kExponent) == kExponent;
  return any;
}

// Whether any of the rows [row, row_end) does not see all of the keys [key,
// key_end), which are not empty.
__aicore__ inline bool HidesAny(const TileMask& mask, const IntervalTiles& tiles, int32_t row, int32_t row_end,
                                int32_t key, int32_t key_end) {
  return mask.visibility(row, row_end, key, key_end) != Visibility::kAll || !tiles.Whole(key, key_end, row, row_end);
}

// A: Arguments, or ArgumentsWith.
template <class A>
class Steps {
 public:
  __aicore__ Steps(const A& arguments, int32_t keys_of_step)
      : a(arguments),
        tasks(arguments, Side::queries, false),
        keys_of_step(keys_of_step),
        isolates(a.has_intervals() && AnyNotFinite(a)) {}

  __aicore__ bool Next(Step* step) {
    const bool begins = key >= end;
    if (begins) {
      if (!tasks.Next(&task)) return false;
      const TileMask mask(a, task.queries.length, task.keys.length);
      const TileMask::Range visible = mask.keys_of(task.row, task.row + task.rows);
      key = visible.begin / kLanes * kLanes;  // the generator works on 64 keys at a time
      end = visible.end;
      if (visible.begin == visible.end) key = end;
      SkipUnseen();
      if (key < end) task.number = tasks_begun++;
    }
    step->task = task;
    step->key = key;
    const int32_t left = end - key, steps_left = (left + keys_of_step - 1) / keys_of_step;
    // Steps are of equal length, in whole tiles: after a short one the cube
    // would wait for flags.
    step->keys = steps_left > 1 ? Lesser(keys_of_step, RoundUp((left + steps_left - 1) / steps_left, kTile)) : left;
    if (a.has_intervals() && step->keys > 0)
      step->keys = Tiles().EndOfSeen(key, key + step->keys, task.row, RowsEnd()) - key;
    step->first = begins;
    step->isolates = a.has_intervals() && isolates && step->keys > 0 &&
                     HidesAny(TileMask(a, task.queries.length, task.keys.length), Tiles(), task.row, RowsEnd(), key,
                              key + step->keys);
    key += step->keys;
    // The next step begins with 64 keys, too.
    if (key < end) key = RoundUp(key, kLanes);
    SkipUnseen();
    step->last = key >= end;
    step->slot = number % kSlots;
    if (step->keys) ++number;
    return true;
  }

 private:
  __aicore__ IntervalTiles Tiles() const { return IntervalTiles(a, task.batch, task.head, task.keys.start); }
  __aicore__ int32_t RowsEnd() const { return task.row + task.rows; }
  // Advances to the next 64 keys of which the Mask lets any row of the task see
  // one.
  __aicore__ void SkipUnseen() {
    if (!a.has_intervals() || key >= end) return;
    const int32_t seen = Tiles().FirstSeen(key, end, task.row, RowsEnd());
    key = seen < end ? seen / kLanes * kLanes : end;
  }

  const A& a;
  Tasks<A::kDealsByArea> tasks;
  Task task;
  int32_t keys_of_step;
  bool isolates;  // V may have a non-finite value
  int32_t key = 0, end = 0;
  int32_t number = 0, tasks_begun = 0;
};

// The slots of a core's workspace in the forward. A: Arguments, or ArgumentsWith.
template <typename T, class A>
class ForwardWorkspace {
  using Sizes = SizesOf<sizeof(T), A::kLongSteps>;

 public:
  __aicore__ explicit ForwardWorkspace(const Arguments& a)
      : base((uint64_t)a.workspace +
             AscendC::GetBlockIdx() / AscendC::GetTaskRation() * Sizes::kForwardWorkspaceBytes) {}
  __aicore__ AscendC::GlobalTensor<float> Scores(int32_t slot) const {
    return Global<float>(base + slot * Sizes::kScoreBytes);
  }
  __aicore__ AscendC::GlobalTensor<T> Probabilities(int32_t slot) const {
    return Global<T>(base + kSlots * Sizes::kScoreBytes + slot * Sizes::kProbabilityBytes);
  }
  __aicore__ AscendC::GlobalTensor<float> Partial(int32_t slot) const {
    return Global<float>(base + kSlots * (Sizes::kScoreBytes + Sizes::kProbabilityBytes) + slot * Sizes::kPartialBytes);
  }

 private:
  uint64_t base;
};

}  // namespace ascend
}  // namespace flashattn_ext
