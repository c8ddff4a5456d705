// Which inputs of a call have tangents, as a type: ptxas serialises products behind run-time branches.
#pragma once

#include <array>
#include <utility>

#include "params.h"

namespace flashattn_ext::sm90 {

template <bool kOfQ, bool kOfK, bool kOfV>
struct GivenTangents {
  static constexpr bool kQ = kOfQ, kK = kOfK, kV = kOfV, kLogits = kQ || kK, kAny = kLogits || kV;
};

template <class Call, class Params, size_t... kBits>
constexpr auto runs_of(std::index_sequence<kBits...>) {
  return std::array{&Call::template run<GivenTangents<(kBits & 1) != 0, (kBits & 2) != 0, (kBits & 4) != 0>>...};
}

// Calls Call::run<GivenTangents>(p) with the tangents that the call has.
template <class Call, class Params>
void run_with_tangents(const Params& p) {
  static constexpr auto kRuns = runs_of<Call, Params>(std::make_index_sequence<8>());
  const AttnParams& tangents = p.tangents;
  kRuns[(tangents.q.data ? 1 : 0) + (tangents.k.data ? 2 : 0) + (tangents.v.data ? 4 : 0)](p);
}

}  // namespace flashattn_ext::sm90
