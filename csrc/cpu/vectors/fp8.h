// What fp8 inputs change in the forward and in decoding, whose In is then Float8, the type of keys and values. Products
// read them as BFloat16, in which every element is exact, and descales stay factors of their own: those of q and k
// multiply softmax_scale, that of v the finished rows of out. For every other In these functions do what kernels do
// without fp8.
#pragma once

#include "cpu/vectors/convert.h"
#include "cpu/vectors/views.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In>
constexpr bool kIsFloat8 = std::is_same<In, Float8>::value;

// The type in which decoding stages keys and values and rotates q.
template <class In>
using Widened = std::conditional_t<kIsFloat8<In>, BFloat16, In>;

// Calls body(element) with an element of the type of q. It is In, except that an fp8 cache also takes q in BFloat16.
template <class In, class Body>
inline auto with_type_of_q(const AttnParams& p, Body body) {
  if constexpr (kIsFloat8<In>) {
    if (p.dtype == DType::kBFloat16) return body(BFloat16{});
  }
  return body(In{});
}

// The factor of the products of a KV head, and the factor of its out.
template <class In>
inline double descale_of_products(const AttnParams& p, int64_t batch, int64_t key_head) {
  if constexpr (!kIsFloat8<In>) return 1;
  return static_cast<double>(p.descale_q.of(batch, key_head)) * p.descale_k.of(batch, key_head);
}
template <class In>
inline float descale_of_values(const AttnParams& p, int64_t batch, int64_t key_head) {
  return kIsFloat8<In> ? p.descale_v.of(batch, key_head) : 1.0f;
}

// Writes row `row` of out: scale * from, which is scaled in place.
template <class In, class Real>
inline void write_out(const AttnParams& p, int64_t batch, int64_t head, int64_t row, Real* from, Real scale) {
  const auto write = [&](auto element) {
    narrow_row(row_of<decltype(element)>(p.out, batch, head, row), from, p.head_dim_v, scale);
  };
  if constexpr (kIsFloat8<In>) {
    if (p.out_dtype == DType::kFloat16) return write(Float16{});
    if (p.out_dtype == DType::kFloat32) return write(float{});
    write(BFloat16{});
  } else {
    write(In{});
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
