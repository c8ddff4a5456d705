// How the forwards of short sequences (sm80/whole_heads, sm90/forward_short) divide a call into thread blocks. Host
// code, and the argument of these kernels.
#pragma once

#include <algorithm>

#include "params.h"

namespace flashattn_ext {

// Whether a call may run the kernels for short sequences, forward or backward: not if a sequence is to have the same
// bits in every call (docs/deterministic.md). Units of rows are numbered in 32 bits; one packed sequence may have all
// rows.
inline bool may_run_short_kernels(const AttnParams& p) {
  constexpr int64_t kMostQueries = 1 << 20, kMostRows = 1 << 26;
  const bool has_many_rows = p.is_varlen() && std::max(p.total_q, p.total_k) > kMostRows;
  return !has_many_rows && !p.deterministic && p.batch * p.heads_q > 0 && p.seqlen_q > 0 && p.seqlen_q <= kMostQueries;
}

// A unit is some adjacent rows of a query head. The units of a KV head are those of all its query heads, and a thread
// block has `share` of them. Thread blocks are numbered in the order of KV heads.
struct UnitPlan {
  int parts;  // thread blocks of a KV head
  int share;  // units of a thread block
  int units;  // units of a query head
  int group;  // query heads of a KV head
  int keys;   // rows of a tile of keys in shared memory

  int64_t blocks(const AttnParams& p) const { return p.batch * p.heads_k * parts; }
  // The query head, within its KV head, of a unit by its number. of_head: units of a query head of its sequence. Most
  // calls have one query head for each KV head and need no division.
  FLASHATTN_HOST_DEVICE int head_of(int number, int of_head) const {
    return group == 1 ? 0 : static_cast<int>(static_cast<unsigned>(number) / static_cast<unsigned>(of_head));
  }
};

}  // namespace flashattn_ext
