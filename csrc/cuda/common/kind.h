// Kind: what a forward or backward kernel is compiled for. It is the one axis of options among the template arguments:
// every other option is found out at run time.
#pragma once

#include "../../params.h"

namespace flashattn_ext {

enum class Kind {
  kPlain,      // none of the options below
  kDropout,    // dropout alone
  kIntervals,  // a Mask alone
  kGeneral,    // softcap or biases, a Mask with dropout, or an origin that places rows; found out at run time
  kScores,     // softcap, ALiBi or a relative bias and nothing else; which of them is found out at run time
  kBias,       // a bias of any shape in the inputs' 16 bits and nothing else, whose tiles TMA can copy
};

// Whether TMA can copy tiles of the bias: addresses and strides are multiples of 16 bytes, and elements have the
// inputs' type. The stride of a dimension of extent 1 means nothing.
inline bool has_copyable_bias(const AttnParams& p) {
  auto aligned = [](int64_t stride, int64_t count) { return count <= 1 || stride % 8 == 0; };
  return p.bias.dtype == p.dtype && p.dtype != DType::kFloat32 && reinterpret_cast<uintptr_t>(p.bias.data) % 16 == 0 &&
         aligned(p.bias.row_stride, p.seqlen_q) && aligned(p.bias.head_stride, p.heads_q) &&
         aligned(p.bias.batch_stride, p.batch);
}

// The same for the gradient of that bias, whose tiles TMA adds or stores. A gradient that all rows share is summed up
// in registers instead, which only the sm_80 kernels do.
inline bool has_copyable_bias_gradient(const AttnGradParams& p) {
  const int vector = p.dbias.dtype == DType::kFloat32 ? 4 : 8;
  auto aligned = [&](int64_t stride, int64_t count) { return count <= 1 || stride % vector == 0; };
  return reinterpret_cast<uintptr_t>(p.dbias.data) % 16 == 0 && (p.seqlen_q <= 1 || p.dbias.row_stride != 0) &&
         aligned(p.dbias.row_stride, p.seqlen_q) && aligned(p.dbias.head_stride, p.heads_q) &&
         aligned(p.dbias.batch_stride, p.batch);
}

inline Kind kind_of(const AttnParams& p) {
  if (p.origin.length_mask == 0) return Kind::kGeneral;  // an origin places the rows
  if (p.softcap > 0 || p.has_bias()) {
    if (p.has_intervals() || p.has_dropout()) return Kind::kGeneral;
    if (!p.bias.data) return Kind::kScores;
    const bool alone = p.softcap == 0 && !p.alibi_slopes && !p.relative_bias;
    return alone && has_copyable_bias(p) ? Kind::kBias : Kind::kGeneral;
  }
  if (p.has_intervals() && p.has_dropout()) return Kind::kGeneral;
  return p.has_intervals() ? Kind::kIntervals : p.has_dropout() ? Kind::kDropout : Kind::kPlain;
}

// The same for the backward: the kernels of scores and biases lack exact sums of a relative bias's gradient
// (RelativeGradient), and the gradient of a bias whose tiles TMA cannot add or store.
inline Kind kind_of(const AttnGradParams& p) {
  const Kind kind = kind_of(static_cast<const AttnParams&>(p));
  const bool exact = p.drelative_bias && p.deterministic, apart = p.dbias.data && !has_copyable_bias_gradient(p);
  return (kind == Kind::kScores || kind == Kind::kBias) && (exact || apart) ? Kind::kGeneral : kind;
}

// Whether kernels of a kind run calls whose rows an origin places. The other kernels lack the registers for it.
constexpr bool can_be_placed(Kind kind) { return kind == Kind::kGeneral; }

// Whether kernels of a kind can have softcap and biases.
constexpr bool can_score(Kind kind) { return kind == Kind::kGeneral || kind == Kind::kScores || kind == Kind::kBias; }

// Whether kernels of a kind can drop weights.
constexpr bool can_drop(Kind kind) { return kind == Kind::kDropout || kind == Kind::kGeneral; }

// Whether kernels of a kind can read a Mask.
constexpr bool can_mask(Kind kind) { return kind == Kind::kIntervals || kind == Kind::kGeneral; }

// Stands in for a member that kernels of a kind do not need.
struct Nothing {};

// For error messages.
constexpr const char* words(Kind kind) {
  switch (kind) {
    case Kind::kPlain:
      return "no option";
    case Kind::kDropout:
      return "dropout";
    case Kind::kIntervals:
      return "a Mask";
    case Kind::kScores:
      return "softcap, ALiBi or a relative bias";
    case Kind::kBias:
      return "a bias";
    default:
      return "several options, a bias that is not copyable or an origin";
  }
}

}  // namespace flashattn_ext
