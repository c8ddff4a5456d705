// Instantiates every kernel for the instruction set that the including file (inst/*.cpp) has chosen, and fills the
// table of that set.
#pragma once

#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "peak.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

#if defined(FLASHATTN_ISA_AVX512_BF16)
using BFloat16Op = Bf16DotOp;
#else
using BFloat16Op = FmaOp<float>;
#endif

// Calls body(In{}, Op{}, Accuracy{}) with the types that belong to a dtype.
template <class Body>
inline auto for_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Float16{}, FmaOp<float>{}, Exp2Half{});
    case DType::kBFloat16:
      return body(BFloat16{}, BFloat16Op{}, Exp2Half{});
    case DType::kFloat64:
      return body(double{}, FmaOp<double>{}, Exp2Full{});
    case DType::kFloat32:
      break;
  }
  return body(float{}, FmaOp<float>{}, Exp2Full{});
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

inline TileSize tile_size(const AttnParams& p) {
  return for_dtype(p.dtype, [&](auto, auto op, auto) { return tile_size<decltype(op)>(p); });
}

inline int64_t forward_scratch_bytes(const AttnParams& p) {
  return for_dtype(
      p.dtype, [&](auto in, auto op, auto) { return ForwardScratch<decltype(in), decltype(op)>(p, nullptr).bytes; });
}
inline void forward(const AttnParams& p) {
  for_rule<true>(p, [&](auto in, auto op, auto accuracy, auto* rule) {
    forward<decltype(in), decltype(op), decltype(accuracy), std::decay_t<decltype(*rule)>>(p);
  });
}
inline int64_t backward_scratch_bytes(const AttnGradParams& p) {
  return for_dtype(
      p.dtype, [&](auto in, auto op, auto) { return BackwardScratch<decltype(in), decltype(op)>(p, nullptr).bytes; });
}
inline int64_t backward_workspace_bytes(const AttnGradParams& p) {
  return for_dtype(
      p.dtype, [&](auto in, auto op, auto) { return BackwardWorkspace<decltype(in), decltype(op)>(p, nullptr).bytes; });
}
inline void backward(const AttnGradParams& p) {
  for_rule<false>(p, [&](auto in, auto op, auto accuracy, auto* rule) {
    backward<decltype(in), decltype(op), decltype(accuracy), std::decay_t<decltype(*rule)>>(p);
  });
}

inline int64_t decode_workspace_bytes(const DecodeParams& p, int64_t workers) {
  return for_dtype(
      p.dtype, [&](auto in, auto op, auto) { return decode_workspace_bytes<decltype(in), decltype(op)>(p, workers); });
}
inline void decode(const DecodeParams& p) {
  for_dtype(p.dtype,
            [&](auto in, auto op, auto accuracy) { decode<decltype(in), decltype(op), decltype(accuracy)>(p); });
}

}  // namespace FLASHATTN_ISA

const CpuKernels FLASHATTN_KERNELS = {
    FLASHATTN_STRINGIFY_NAME(FLASHATTN_ISA),
    FLASHATTN_ISA::tile_size,
    FLASHATTN_ISA::forward_scratch_bytes,
    FLASHATTN_ISA::forward,
    FLASHATTN_ISA::backward_scratch_bytes,
    FLASHATTN_ISA::backward_workspace_bytes,
    FLASHATTN_ISA::backward,
    FLASHATTN_ISA::decode_workspace_bytes,
    FLASHATTN_ISA::decode,
    FLASHATTN_ISA::multiply_add_flop,
};

}  // namespace flashattn_ext
