// The walk of the backward over its tasks and steps, which cube and vector cores take alike, and its slots of the
// workspace (backward.h).
#pragma once

#include "isolation.h"
#include "schedule.h"

namespace flashattn_ext {
namespace ascend {

struct GradStep {
  Task task;                            // its keys
  int32_t head = 0, row = 0, rows = 0;  // queries, within the sequence
  bool first = false, last = false;     // whether it is the task's first or last step
  bool last_of_head = false;
  bool isolates = false;  // isolation.h: the step hides a pair, and an operand may have a non-finite value
  int32_t slot = 0;
  __aicore__ int64_t FirstOf(const Arguments& a, const Sequence& sequence, int64_t length) const {
    return a.is_varlen() ? sequence.start : task.batch * length;
  }
  // Row index in the sums and in delta.
  __aicore__ int64_t QueryRow(const Arguments& a) const { return FirstOf(a, task.queries, a.seqlen_q) + row; }
  __aicore__ int64_t KeyRow(const Arguments& a) const { return FirstOf(a, task.keys, a.seqlen_k) + task.row; }
};

// A: Arguments, or ArgumentsWith.
template <class A>
class GradSteps {
 public:
  __aicore__ GradSteps(const A& arguments, int32_t queries_of_step)
      : a(arguments),
        tasks(arguments, Side::keys, arguments.deterministic),
        queries_of_step(queries_of_step),
        isolates(a.has_intervals() && AnyNotFinite(a)) {}

  __aicore__ bool Next(GradStep* step) {
    step->first = false;
    while (row >= end) {
      if (heads_left == last_head) {
        if (!tasks.Next(&task)) return false;
        if (!BeginTask()) continue;
        step->first = true;
      }
      --heads_left;
      const TileMask::Range seen = RowsOf(heads_left);
      row = seen.begin / kGroupRows * kGroupRows;
      end = seen.begin < seen.end ? seen.end : row;
    }
    step->task = task;
    step->head = HeadOf(heads_left);
    step->row = row;
    step->rows = Lesser(queries_of_step, end - row);
    row += step->rows;
    step->isolates = a.has_intervals() && isolates &&
                     HidesAny(TileMask(a, task.queries.length, task.keys.length),
                              IntervalTiles(a, task.batch, step->head, task.keys.start), step->row, row, task.row,
                              task.row + task.rows);
    step->last_of_head = row >= end;
    step->last = step->last_of_head && heads_left == last_head;
    step->slot = number++ % kGradSlots;
    return true;
  }

 private:
  // Heads descend.
  __aicore__ int32_t HeadOf(int32_t left) const { return (task.head + 1) * a.group_size() - 1 - left; }
  // The rows of a query head that see any key of the task.
  __aicore__ TileMask::Range RowsOf(int32_t left) const {
    if (!a.has_intervals()) return visible;
    const IntervalTiles tiles(a, task.batch, HeadOf(left), task.keys.start);
    const IntervalExtremes seen = tiles.Of(task.row, task.row + task.rows);
    return {Greater(visible.begin, seen.any_first), Lesser(visible.end, seen.any_last)};
  }
  // Whether a head has any rows. The last such head is the last of the task.
  __aicore__ bool BeginTask() {
    const TileMask mask(a, task.queries.length, task.keys.length);
    visible = mask.rows_of(task.row, task.row + task.rows);
    const int32_t heads = a.group_size(), of_its_own = a.has_intervals() && a.intervals.heads == a.heads_q ? heads : 1;
    for (last_head = 0; last_head < of_its_own; ++last_head) {
      const TileMask::Range seen = RowsOf(last_head);
      if (seen.begin >= seen.end) continue;
      heads_left = heads;
      return true;
    }
    heads_left = last_head;
    return false;
  }

  const A& a;
  Tasks<A::kDealsByArea> tasks;
  Task task;
  TileMask::Range visible = {0, 0};
  int32_t queries_of_step;
  bool isolates;  // an input may have a non-finite value
  int32_t heads_left = 0, last_head = 0, row = 0, end = 0, number = 0;
};

template <typename T>
class BackwardWorkspace {
  using Sizes = SizesOf<sizeof(T)>;

 public:
  __aicore__ explicit BackwardWorkspace(const Arguments& a)
      : base((uint64_t)a.workspace +
             AscendC::GetBlockIdx() / AscendC::GetTaskRation() * Sizes::kBackwardWorkspaceBytes) {}
  // 0: S, 1: dP
  __aicore__ AscendC::GlobalTensor<float> Scores(int32_t slot, int32_t which) const {
    return Global<float>(base + (slot * 2 + which) * Sizes::kBackwardScoreBytes);
  }
  // 0: P, 1: dS
  __aicore__ AscendC::GlobalTensor<T> Rounded(int32_t slot, int32_t which) const {
    return Global<T>(base + kGradSlots * 2 * Sizes::kBackwardScoreBytes +
                     (slot * 2 + which) * Sizes::kBackwardRoundedBytes);
  }

 private:
  uint64_t base;
};

// The rows that isolation.h copies for a step: queries, gradients of out, keys.
template <typename T>
class IsolatedStep {
  using Sizes = SizesOf<sizeof(T)>;

 public:
  __aicore__ static AscendC::GlobalTensor<T> Queries(const Arguments& a, int32_t slot, int32_t row) {
    return At(a, slot, row);
  }
  __aicore__ static AscendC::GlobalTensor<T> Gradients(const Arguments& a, int32_t slot, int32_t row) {
    return At(a, slot, Sizes::kQueries + row);
  }
  __aicore__ static AscendC::GlobalTensor<T> Keys(const Arguments& a, int32_t slot) {
    return At(a, slot, 2 * Sizes::kQueries);
  }

 private:
  __aicore__ static AscendC::GlobalTensor<T> At(const Arguments& a, int32_t slot, int32_t row) {
    return IsolatedRow<T>(a, Sizes::kIsolatedBackward, slot * (2 * Sizes::kQueries + kTile) + row);
  }
};

}  // namespace ascend
}  // namespace flashattn_ext
