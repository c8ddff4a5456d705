// Descriptions of tensors for TMA copies, encoded on the host and passed as kernel arguments.
#pragma once

#include <cuda.h>

#include "cuda/host/call.h"

namespace flashattn_ext {

// A map of [batch][heads][rows][columns] whose copies are boxes of `box_rows` rows of 128 bytes, 128-byte swizzled: 64
// columns of 16-bit elements, or 32 of fp32. They have the rows of `box_heads` heads. Pointer and strides are
// multiples of 16 bytes, which aligned_rows.h ensures for inputs.
CUtensorMap tensor_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                       int64_t batch, int box_rows, DType type, int box_heads = 1);

inline CUtensorMap query_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, query_rows(p), p.heads_q, batch_entries(p), box_rows, p.dtype);
}
inline CUtensorMap key_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, key_rows(p), p.heads_k, batch_entries(p), box_rows, p.dtype);
}
// A map of a tensor of bytes whose elements are pairs of them: 128 columns of bytes are as many bytes as 64 of 16 bits.
// Strides are even; where the columns are not, a byte follows each row.
inline CUtensorMap pair_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                            int64_t batch, int box_rows) {
  const TensorView pairs{t.data, t.batch_stride / 2, t.row_stride / 2, t.head_stride / 2};
  return tensor_map(p, pairs, (columns + 1) / 2, rows, heads, batch, box_rows, DType::kFloat16);
}
// A bias or its gradient: rows are queries, columns are keys.
inline CUtensorMap bias_map(const AttnParams& p, const BiasView& bias, int box_rows) {
  const TensorView view{bias.data, bias.batch_stride, bias.row_stride, bias.head_stride};
  return tensor_map(p, view, p.seqlen_k, p.seqlen_q, p.heads_q, batch_entries(p), box_rows, bias.dtype);
}

}  // namespace flashattn_ext
