// First stage of decoding: appends new keys and values to the KV caches and writes rotated queries to the workspace.
// Rotary position embedding as defined in params.h, computed in the compute type.
#pragma once

#include "cpu/vectors/fp8.h"
#include "cpu/vectors/schedule.h"
#include "cpu/vectors/views.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// to = `from` rotated to a position; elements from p.rotary.dim on are copied. To: In, or the compute type.
template <class Real, class In, class To>
inline void rotate_row(const DecodeParams& p, int64_t position, const In* from, To* to) {
  const Rotary& rotary = p.rotary;
  const int64_t pairs = rotary.dim / 2, row = lesser(position, rotary.rows - 1) * pairs;
  const In* const cos = static_cast<const In*>(rotary.cos) + row;
  const In* const sin = static_cast<const In*>(rotary.sin) + row;
  for (int64_t n = 0; n < pairs; ++n) {
    const int64_t one = rotary.interleaved ? 2 * n : n, other = rotary.interleaved ? one + 1 : n + pairs;
    const Real x = widen(from[one]), y = widen(from[other]), c = widen(cos[n]), s = widen(sin[n]);
    narrow(x * c - y * s, to + one);
    narrow(x * s + y * c, to + other);
  }
  copy_row(to + rotary.dim, from + rotary.dim, p.head_dim - rotary.dim);
}

// to = from / descale, for an fp8 cache.
inline void quantise_row(Float8* to, const float* from, int64_t n, float descale) {
  for (int64_t d = 0; d < n; ++d) narrow(from[d] / descale, to + d);
}

// Number of elements of the rotated q, [B, Sq, Hq, D] contiguous; 0 without rotation of q.
inline int64_t rotated_elements(const DecodeParams& p) {
  return p.rotary.cos ? p.batch * p.seqlen_q * p.heads_q * p.head_dim : 0;
}

// rotated: memory for the rotated q, to which p->q then points.
template <class Real, class In>
void append(DecodeParams* params, Widened<In>* rotated) {
  DecodeParams& p = *params;
  const TensorView q = p.q;
  if (p.rotary.cos) {
    p.q = {rotated, p.seqlen_q * p.heads_q * p.head_dim, p.heads_q * p.head_dim, p.head_dim};
  }
  const auto append_row = [&p](const KeyLocator& keys, int64_t b, int64_t i) {
    const int64_t row = keys.first_new_row + i;
    const KeyRun place = keys.run_of_row(row, 1);
    for (int64_t h = 0; h < p.heads_k; ++h) {
      if constexpr (kIsFloat8<In>) {
        if (p.new_dtype == DType::kBFloat16) {
          float wide[kLargestHeadDim];
          const BFloat16* const k = row_of<const BFloat16>(p.k_new, b, h, i);
          p.rotary.cos ? rotate_row<Real>(p, row, k, wide) : widen_row(wide, k, p.head_dim);
          quantise_row(row_of<In>(p.k, place.entry, h, place.row), wide, p.head_dim, p.descale_k.of(b, h));
          widen_row(wide, row_of<const BFloat16>(p.v_new, b, h, i), p.head_dim_v);
          quantise_row(row_of<In>(p.v, place.entry, h, place.row), wide, p.head_dim_v, p.descale_v.of(b, h));
          continue;
        }
      }
      const In* const k = row_of<const In>(p.k_new, b, h, i);
      In* const to = row_of<In>(p.k, place.entry, h, place.row);
      p.rotary.cos ? rotate_row<Real>(p, row, k, to) : copy_row(to, k, p.head_dim);
      copy_row(row_of<In>(p.v, place.entry, h, place.row), row_of<const In>(p.v_new, b, h, i), p.head_dim_v);
    }
  };
  const auto rotate_query = [&p, &q](const KeyLocator& keys, int64_t b, int64_t i) {
    const int64_t position = keys.first_new_row + (p.rotary.rotates_each_row ? i : 0);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      rotate_row<Real>(p, position, row_of<const Widened<In>>(q, b, h, i), row_of<Widened<In>>(p.q, b, h, i));
    }
  };
  // One work item for each new key and each rotated row of q.
  const int64_t rows = p.cache.new_keys + (p.rotary.cos ? p.seqlen_q : 0);
  for_each_item(p, p.batch * rows, [&](int64_t item) {
    const int64_t b = item / rows, i = item % rows;
    const KeyLocator keys(p, b);
    if (i >= p.cache.new_keys) {
      rotate_query(keys, b, i - p.cache.new_keys);
    } else if (i < keys.new_keys) {
      append_row(keys, b, i);
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
