// Sizes that dense and packed calls define differently.
#pragma once

#include "params.h"

namespace flashattn_ext {

inline int64_t bytes_of(DType type) { return type == DType::kFloat32 ? 4 : type == DType::kFloat8 ? 1 : 2; }
inline int64_t element_bytes(const AttnParams& p) { return bytes_of(p.dtype); }  // of q
inline int64_t out_bytes(const AttnParams& p) { return bytes_of(p.is_fp8 ? p.out_dtype : p.dtype); }
// The element size of the keys and values of a decoding call, which may be fp8 where q is not.
inline int64_t key_bytes(const AttnParams& p) { return bytes_of(p.is_fp8 ? DType::kFloat8 : p.dtype); }

// A tensor has this many batch entries of this many rows: a packed one is a single entry.
inline int64_t batch_entries(const AttnParams& p) { return p.is_varlen() ? 1 : p.batch; }
inline int64_t query_rows(const AttnParams& p) { return p.is_varlen() ? p.total_q : p.seqlen_q; }
inline int64_t key_rows(const AttnParams& p) { return p.is_varlen() ? p.total_k : p.seqlen_k; }

}  // namespace flashattn_ext
