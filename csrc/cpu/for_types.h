// The choice of a kernel's template arguments by the params of a call.
#pragma once

#include "convert.h"
#include "gemm.h"
#include "score_rules.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Calls body(In{}, Op{}, Accuracy{}) with the types that belong to a dtype.
template <class Body>
inline auto for_dtype(DType dtype, Body body) {
#if defined(FLASHATTN_ISA_AVX512_BF16)
  (void)dtype;  // bf16: cpu_kernels() chooses the table of avx512 for every other dtype
  return body(BFloat16{}, Bf16DotOp{}, Exp2Half{});
#else
  switch (dtype) {
    case DType::kFloat16:
      return body(Float16{}, FmaOp<float>{}, Exp2Half{});
    case DType::kBFloat16:
      return body(BFloat16{}, FmaOp<float>{}, Exp2Half{});
    case DType::kFloat64:
      return body(double{}, FmaOp<double>{}, Exp2Full{});
    case DType::kFloat32:
      break;
  }
  return body(float{}, FmaOp<float>{}, Exp2Full{});
#endif
}

// Calls body(In{}, Op{}, Accuracy{}, rule) with the rule of the call as a null pointer to its type. kOrdered: see
// PlainScore.
template <bool kOrdered, class Body>
inline void for_rule(const AttnParams& p, Body body) {
  for_dtype(p.dtype, [&](auto in, auto op, auto accuracy) {
    using Real = typename decltype(op)::Real;
    if (p.softcap > 0 || p.has_bias()) {
      body(in, op, accuracy, static_cast<GeneralScore<Real, decltype(accuracy)>*>(nullptr));
    } else {
      body(in, op, accuracy, static_cast<PlainScore<Real, kOrdered>*>(nullptr));
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
