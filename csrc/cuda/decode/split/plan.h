// How the decoding kernels divide a call into work (split-KV). The names of the code:
//   - A task is one work tile: a tile of query rows, one KV head and one sequence.
//   - A part is one split of a task's keys. A thread block computes one part at a time. combine.cu combines the partial
//     results of a task that has several parts.
//   - A slot is the place of one partial result in the workspace.
//   - A unit is the granule in which keys are divided: a block of kUnitKeys adjacent keys of one task.
//
// Sequence lengths are in device memory, so the device divides the work (plan.cuh), in one of three ways:
//   - Fixed: every task has `splits` parts, each with a thread block of its own. num_splits > 0 selects this way. So do
//     calls with enough tasks to fill the GPU, with one part each.
//   - Shares (stream-K): the units of all tasks are numbered consecutively, and every thread block gets a contiguous
//     range of equal size, its share. Different sequence lengths then cause no load imbalance. Only a task that extends
//     past the end of a share is split: the following thread blocks continue it.
//   - Shares with fixed parts, for the forward with few queries, whose results must be bit-identical in every batch. A
//     unit has part_keys keys, which depend only on the shapes of one sequence, and every unit is a part of its own.
//     The number of the unit is its slot. The result does not depend on which thread block computes a part.
#pragma once

#include "cuda/host/call.h"
#include "params.h"

namespace flashattn_ext::decode {

// A task whose partial results combine.cu combines. Part 0 is in slot `first`, part n > 0 in slot next + n.
struct SplitTask {
  int b, head_k, row_tile;
  int parts;  // number of splits; 0: the entry is unused
  int first, next;
};

// The maximum that the weights of a row are relative to, in units of log2, and their sum, for some of its keys. One
// word for both would lose a sum of weights beside a large maximum, which other keys may have too.
struct RowSum {
  float max, sum;
};

struct Plan {
  int splits;     // fixed: parts per task; 0: shares
  int part_keys;  // shares with fixed parts: keys per part; 0: a unit has kUnitKeys keys. pack_gqa.cu sets it too
  int blocks;     // thread blocks of the launch
  int group;      // query heads per KV head (GQA)
  int row_tiles;  // row tiles per sequence, from the shapes (varlen: max_seqlen_q or total_q)
  // by_task: one entry per task, in task order. Otherwise one entry per thread block: the task whose first part the
  // block computes, if another block continues that task.
  SplitTask* split_tasks;
  bool by_task;
  int head_tasks;  // shares with fixed parts: entries of split_tasks per KV head
  // Shares: whether the host knows the lengths of all sequences, so that a thread block finds its first part before the
  // previous kernel has ended.
  bool knows_lengths;
  int most_parts;          // maximum parts per task, from the shapes; 0: unknown
  int slots, slot_rows;    // slot_rows: rows of a tile; with fixed parts at most the rows of a sequence for a KV head
  float* partial_out;      // [slots][slot_rows][kHeadDim], normalised
  RowSum* partial_sums;    // [slots][slot_rows]
  float* partial_largest;  // [slots][slot_rows]: largest logits, base 2; unallocated without row_maxima

  // Sets the pointers into the workspace and returns the size of the workspace in bytes. q: the rotated queries, of
  // q_bytes bytes. tasks: entries of split_tasks; columns: of partial_out.
  size_t place(const DecodeParams& p, int64_t q_bytes, int64_t tasks, int columns, TensorView* q) {
    Carver carver(p.workspace);
    const int64_t row = p.heads_q * p.head_dim, rows = int64_t{slots} * slot_rows;
    *q = {carver.take<char>(q_bytes), p.is_varlen() ? 0 : p.seqlen_q * row, row, p.head_dim};
    split_tasks = carver.take<SplitTask>(tasks);
    partial_sums = carver.take<RowSum>(rows);
    partial_largest = carver.take<float>(p.row_maxima.data ? rows : 0);
    partial_out = carver.take<float>(rows * columns);
    return carver.bytes();
  }
};

}  // namespace flashattn_ext::decode
