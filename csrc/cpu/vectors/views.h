// Row addresses in the tensors of a call.
#pragma once

#include "cpu/vectors/simd.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Row `row` of a [B, S, H, D] tensor; `row` counts from the first row of the batch entry, or of all packed sequences.
template <class In>
inline In* row_of(const TensorView& t, int64_t batch, int64_t head, int64_t row) {
  return static_cast<In*>(t.data) + batch * t.batch_stride + head * t.head_stride + row * t.row_stride;
}

// The row of a [B, H, S] statistic.
template <class Real>
inline Real* row_of(const RowView& t, int64_t batch, int64_t head, int64_t row) {
  return static_cast<Real*>(t.data) + batch * t.batch_stride + head * t.head_stride + row;
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
