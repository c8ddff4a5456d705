// Sizes that dense and packed calls define differently.
#pragma once

#include "../../params.h"

namespace flashattn_ext {

inline int64_t element_bytes(const AttnParams& p) { return p.dtype == DType::kFloat32 ? 4 : 2; }

// A tensor has this many batch entries of this many rows: a packed one is a single entry.
inline int64_t batch_entries(const AttnParams& p) { return p.is_varlen() ? 1 : p.batch; }
inline int64_t query_rows(const AttnParams& p) { return p.is_varlen() ? p.total_q : p.seqlen_q; }
inline int64_t key_rows(const AttnParams& p) { return p.is_varlen() ? p.total_k : p.seqlen_k; }

}  // namespace flashattn_ext
