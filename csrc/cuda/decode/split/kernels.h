// The kernels of decoding beside those of the table, and the call as they see it.
#pragma once

#include "cuda/decode/split/plan.h"

namespace flashattn_ext::decode {

// The call as a kernel sees it in whose tasks `heads` adjacent KV heads (Tile::heads) are one.
inline DecodeParams in_groups(DecodeParams p, int heads) {
  p.heads_k /= heads;
  p.k.head_stride *= heads;
  p.v.head_stride *= heads;
  return p;
}

// Combines the partial results of split tasks. T: the type of out. rows, columns: dimensions of a slot.
template <class T>
void combine(const DecodeParams& p, const Plan& plan, int64_t tasks, int rows, int columns);
// Combines tasks of two KV heads.
template <class T>
void combine_pairs(const DecodeParams& p, const Plan& plan, int64_t tasks, int rows, int columns) {
  combine<T>(in_groups(p, 2), plan, tasks, rows, columns);
}

// Appends new keys and values to the KV cache, and copies the queries to `q` unless it has no data. With rotary
// embeddings both the new keys and the copies are rotated.
void append(const DecodeParams& p, const TensorView& q);

}  // namespace flashattn_ext::decode
