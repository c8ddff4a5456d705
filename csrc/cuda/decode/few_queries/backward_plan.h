// How the backward with few queries divides a call into work (split-KV). A task is one KV head of one sequence. A part
// is one split of its keys. A thread block computes one part, for all rows of the KV head.
#pragma once

#include "cuda/table/rows.h"

namespace flashattn_ext::decode {

constexpr int kBackwardWarps = 4;  // per thread block
// A kernel has at most one row tile (16 rows of a KV head) for each warp.
constexpr int kMostRowTiles = kBackwardWarps;

struct BackwardPlan {
  int group;      // query heads per KV head (GQA)
  int rows;       // rows of a KV head: all heads of query 0, then of query 1, and so on
  int part_keys;  // keys per part, a multiple of the keys per step of a thread block
  int parts;      // parts per KV head
  float* dq;      // partial dq of each part: [B][Hk][parts][rows][kHeadDim]
};

// Bytes of shared memory that a thread block of a row of kFewQueriesBackward takes.
constexpr int shared_bytes_of(const FewQueriesRow& row) {
  const int rows = 16 * row.row_tiles, columns = row.head_dim;
  const bool exchanges = row.row_tiles > 1;  // dS, between the warps
  const int stages = exchanges ? 2 : 3, keys = 16, element = 2;
  const int queries = 2 * rows * columns * element, rings = kBackwardWarps * stages * 2 * keys * columns * element;
  const int dscores = exchanges ? kBackwardWarps * row.row_tiles * 32 * 16 : 8;
  return queries + rings + dscores + rows * (4 + 4 + 8);  // lse, delta and the two words of lse
}

}  // namespace flashattn_ext::decode
