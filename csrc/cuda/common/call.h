// Sizes of a call that dense and packed calls answer differently, and its parts.
#pragma once

#include <algorithm>

#include "../../params.h"

namespace flashattn_ext {

inline int64_t element_bytes(const AttnParams& p) { return p.dtype == DType::kFloat32 ? 4 : 2; }

// A tensor has this many batch entries of this many rows: a packed one is a single entry.
inline int64_t batch_entries(const AttnParams& p) { return p.is_varlen() ? 1 : p.batch; }
inline int64_t query_rows(const AttnParams& p) { return p.is_varlen() ? p.total_q : p.seqlen_q; }
inline int64_t key_rows(const AttnParams& p) { return p.is_varlen() ? p.total_k : p.seqlen_k; }

// Calls run(part) for every kColumns columns of v and out: `part` is the call with no other columns. lse is the same in
// all parts.
template <int kColumns, class Run>
void for_columns(const AttnParams& p, const Run& run) {
  for (int64_t first = 0; first < p.head_dim_v; first += kColumns) {
    AttnParams part = p;
    part.v.data = static_cast<char*>(p.v.data) + first * element_bytes(p);
    part.out.data = static_cast<char*>(p.out.data) + first * element_bytes(p);
    part.head_dim_v = std::min<int64_t>(kColumns, p.head_dim_v - first);
    run(part);
  }
}

}  // namespace flashattn_ext
