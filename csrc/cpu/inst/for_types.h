// The choice of a kernel's template arguments by the params of a call.
#pragma once

#include "cpu/score/score_rules.h"
#include "cpu/vectors/convert.h"
#include "cpu/vectors/gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

#if defined(FLASHATTN_ISA_BF16)
using BFloat16Op = Bf16DotOp;
#else
using BFloat16Op = FmaOp<float>;
#endif

// The accuracy of weights of 16-bit inputs: in the generic set that of fp32, so that both run the same instances.
#if defined(FLASHATTN_ISA_GENERIC)
using Exp2Of16Bits = Exp2Full;
#else
using Exp2Of16Bits = Exp2Half;
#endif

// Calls body(In{}, Op{}, Accuracy{}) with the types that belong to a dtype: all but fp8, which has no derivatives.
template <class Body>
inline auto for_dtype(DType dtype, Body body) {
#if defined(FLASHATTN_ISA_BF16)
  (void)dtype;  // bf16: cpu_kernels() chooses another table for the other dtypes
  return body(BFloat16{}, BFloat16Op{}, Exp2Of16Bits{});
#else
  switch (dtype) {
    case DType::kFloat16:
      return body(Float16{}, FmaOp<float>{}, Exp2Of16Bits{});
    case DType::kBFloat16:
      return body(BFloat16{}, BFloat16Op{}, Exp2Of16Bits{});
    case DType::kFloat64:
      return body(double{}, FmaOp<double>{}, Exp2Full{});
    default:
      return body(float{}, FmaOp<float>{}, Exp2Full{});
  }
#endif
}

// for_dtype() of the forward and decoding, where In is the type of keys and values (fp8.h).
template <class Body>
inline auto for_inputs(const AttnParams& p, Body body) {
  if (p.is_fp8) return body(Float8{}, BFloat16Op{}, Exp2Of16Bits{});
  return for_dtype(p.dtype, body);
}

// The bytes of Memory<In, Op> for a call: the workspace that all workers share, or the scratch memory of one.
template <template <class In, class Op> class Memory, class Params>
inline int64_t bytes_of(const Params& p) {
  return for_dtype(p.dtype,
                   [&](auto in, auto op, auto) { return Memory<decltype(in), decltype(op)>(p, nullptr).bytes; });
}

// Calls body(In{}, Op{}, Accuracy{}, rule) with the rule of the call as a null pointer to its type. kOrdered: of the
// forward; see PlainProducts. Accuracy: of derivatives, in place of that of the dtype. Those of fp64, which serve
// numerical checks, have GeneralScore alone: it computes the same.
template <bool kOrdered, class Accuracy = void, class Body>
inline void for_rule(const AttnParams& p, Body body) {
  const auto with_rule = [&](auto in, auto op, auto of_dtype) {
    std::conditional_t<std::is_void<Accuracy>::value, decltype(of_dtype), Accuracy> accuracy{};
    using Real = typename decltype(op)::Real;
    constexpr bool kGeneralAlone = !std::is_void<Accuracy>::value && std::is_same<Real, double>::value;
    if (kGeneralAlone || p.has_score_option() || p.has_bias()) {
      body(in, op, accuracy, static_cast<GeneralScore<Real, decltype(accuracy)>*>(nullptr));
    } else if constexpr (!kGeneralAlone) {
      body(in, op, accuracy, static_cast<ScoreRule<Real, PlainProducts<kOrdered>>*>(nullptr));
    }
  };
  if constexpr (kOrdered) {
    for_inputs(p, with_rule);
  } else {
    for_dtype(p.dtype, with_rule);
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
