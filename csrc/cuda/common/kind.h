// Kind: what a forward or backward kernel is compiled for. It is the one axis of options among the template arguments:
// every other option is found out at run time.
#pragma once

#include <type_traits>

#include "../../params.h"

namespace flashattn_ext {

enum class Kind {
  kPlain,      // neither of what follows
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

// The same for the gradient of that bias, whose tiles TMA adds or stores. One that rows have in common is summed up in
// registers instead, by kernels that know how.
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

// Whether kernels of a kind run calls whose rows an origin places. All could but for the registers that it takes.
constexpr bool can_be_placed(Kind kind) { return kind == Kind::kGeneral; }

// Whether kernels of a kind can have softcap and biases.
constexpr bool can_score(Kind kind) { return kind == Kind::kGeneral || kind == Kind::kScores || kind == Kind::kBias; }

// The kind whose kernels run another kind where it has none of its own.
constexpr Kind general_kind(Kind kind) { return can_score(kind) ? Kind::kGeneral : kind; }

// Whether kernels of a kind can drop weights.
constexpr bool can_drop(Kind kind) { return kind == Kind::kDropout || kind == Kind::kGeneral; }

// Whether kernels of a kind can read a Mask.
constexpr bool can_mask(Kind kind) { return kind == Kind::kIntervals || kind == Kind::kGeneral; }

// The row of a tile table that serves a kind which has none of its own: one whose keys suit dropout if need be.
constexpr Kind tile_kind(Kind kind) { return can_drop(kind) ? Kind::kDropout : Kind::kPlain; }

// The class of head dims up to 256 whose kernels run another one, for kinds that few calls have: compiling all classes
// of them took a quarter of the build.
constexpr int rare_class(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// Stands for a member that kernels of a kind do not need.
struct Nothing {};

// Calls f(std::integral_constant<Kind, kind>()).
template <class F>
auto with_kind(Kind kind, const F& f) {
  switch (kind) {
    case Kind::kDropout:
      return f(std::integral_constant<Kind, Kind::kDropout>());
    case Kind::kIntervals:
      return f(std::integral_constant<Kind, Kind::kIntervals>());
    case Kind::kGeneral:
      return f(std::integral_constant<Kind, Kind::kGeneral>());
    case Kind::kScores:
      return f(std::integral_constant<Kind, Kind::kScores>());
    case Kind::kBias:
      return f(std::integral_constant<Kind, Kind::kBias>());
    default:
      return f(std::integral_constant<Kind, Kind::kPlain>());
  }
}

}  // namespace flashattn_ext
