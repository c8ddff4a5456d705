// How a prefill (prefill.h) finds its queries, keys and values: which rows it reads in place, and which it copies.
#pragma once

#include <limits>

#include "cuda/host/call.h"

namespace flashattn_ext::decode {

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // rows of a packed tensor

// Distance between cache entries in rows; 0 if it is not a whole number of rows, or if entries overlap.
inline int64_t entry_rows(const DecodeParams& p, const TensorView& t) {
  if (p.cache.entries == 1) return p.cache.page_size;
  if (t.row_stride <= 0 || t.batch_stride % t.row_stride != 0) return 0;
  const int64_t rows = t.batch_stride / t.row_stride;
  return rows >= p.cache.page_size ? rows : 0;
}

// Whether the rows of all batch entries are equally spaced, so that the batch can be read as one packed tensor.
inline bool has_even_rows(const DecodeParams& p, const TensorView& t) {
  return p.is_varlen() || p.batch == 1 || t.batch_stride == p.seqlen_q * t.row_stride;
}

// Whether rows of k and v can be read in place in 16-byte vectors.
inline bool is_aligned(const DecodeParams& p) {
  const int64_t bytes = element_bytes(p);
  return rows_are_aligned(p.k, p.head_dim, bytes) && rows_are_aligned(p.v, p.head_dim_v, bytes);
}

// Whether keys and values are copied to contiguous rows of each sequence. Those in fp8 are, from any cache, and widened
// on the way. An invariant call also copies what cannot be read as one packed tensor, and with a Mask everything: each
// sequence has own intervals, even if two sequences have the same entry of the cache.
inline bool gathers(const DecodeParams& p) {
  if (p.cache.block_table || p.is_fp8) return true;
  if (!p.invariant) return false;
  const int64_t rows = entry_rows(p, p.k);
  return p.has_intervals() || p.cache.entries == 0 || rows == 0 || rows != entry_rows(p, p.v) || !is_aligned(p);
}
// Whether queries are copied. Only invariant calls come here with queries that have no common distance.
inline bool copies_queries(const DecodeParams& p) { return p.rotary.cos || !has_even_rows(p, p.q); }

// Rows between the starts of successive sequences (gathered keys) or cache entries in the keys of the varlen call, and
// the total number of rows.
inline int64_t sequence_rows(const DecodeParams& p) { return gathers(p) ? p.cache.capacity() : entry_rows(p, p.k); }
inline int64_t all_rows(const DecodeParams& p) {
  if (gathers(p)) return p.batch * p.cache.capacity();
  return (p.cache.entries - 1) * entry_rows(p, p.k) + p.cache.page_size;
}

inline int64_t packed_queries(const DecodeParams& p) { return p.is_varlen() ? p.total_q : p.batch * p.seqlen_q; }

}  // namespace flashattn_ext::decode
