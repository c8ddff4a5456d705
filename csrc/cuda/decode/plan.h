// Who computes what in a call with a cache. A task is one tile of packed rows of one key head of one sequence; its keys
// are computed in one part or in several, which combine.cu adds up.
//
// Lengths of sequences are in the memory of the device, so the division happens there (plan.cuh). It is of one of two
// kinds. Fixed: every task has `splits` parts, of one thread block each. That is what num_splits asks for, and one part
// where there are enough tasks without splitting. Shares: all units of keys (kUnitKeys) of all tasks form one line,
// which thread blocks share equally, so that it does not matter how much lengths differ. Only the task at the end of a
// share continues in the next one.
#pragma once

#include "../../params.h"

namespace flashattn_ext::decode {

// A task whose parts are to be added up. Part n is in slot `first` when n is 0, else in slot next + n.
struct SplitTask {
  int b, head_k, row_tile;
  int parts;  // 0: there is no such task
  int first, next;
};

struct Plan {
  int splits;     // of the fixed kind; 0: shares
  int blocks;     // thread blocks
  int group;      // query heads that share a key head
  int row_tiles;  // fixed: tiles of a sequence, as far as the host knows
  // One for each task, in their order. Shares of so many tasks that thread blocks are fewer: for each thread block the
  // task that it begins and does not end.
  SplitTask* split_tasks;
  bool by_task;
  float* partial_out;  // [slots][rows of a tile][class of head dims]
  float* partial_lse;  // [slots][rows of a tile], in units of log2
};

}  // namespace flashattn_ext::decode
