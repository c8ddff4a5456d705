// Instantiates every kernel but those of derivatives for the instruction set of the including file (inst/*.cpp), and
// fills its CpuKernels table.
#pragma once

#include "cpu/backward/backward.h"
#include "cpu/decode/decode.h"
#include "cpu/forward/forward.h"
#include "cpu/inst/for_types.h"
#include "cpu/vectors/peak.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

inline TileSize tile_size(const AttnParams& p) {
  return for_inputs(p, [&](auto, auto op, auto) { return tile_size<decltype(op)>(p); });
}

inline int64_t forward_scratch_bytes(const AttnParams& p) {
  return for_inputs(
      p, [&](auto in, auto op, auto) { return ForwardScratch<decltype(in), decltype(op)>(p, nullptr).bytes; });
}
inline void forward(const AttnParams& p) {
  for_rule<true>(p, [&](auto in, auto op, auto accuracy, auto* rule) {
    forward<decltype(in), decltype(op), decltype(accuracy), std::decay_t<decltype(*rule)>>(p);
  });
}
inline void backward(const AttnGradParams& p) {
  for_rule<false>(p, [&](auto in, auto op, auto accuracy, auto* rule) {
    backward<decltype(in), decltype(op), decltype(accuracy), std::decay_t<decltype(*rule)>>(p);
  });
}

inline int64_t decode_workspace_bytes(const DecodeParams& p, int64_t workers) {
  return for_inputs(
      p, [&](auto in, auto op, auto) { return decode_workspace_bytes<decltype(in), decltype(op)>(p, workers); });
}
inline void decode(const DecodeParams& p) {
  for_inputs(p, [&](auto in, auto op, auto accuracy) { decode<decltype(in), decltype(op), decltype(accuracy)>(p); });
}

extern const CpuDerivatives kDerivatives;  // instantiate_derivatives.h

}  // namespace FLASHATTN_ISA

const CpuKernels FLASHATTN_KERNELS = {
    FLASHATTN_STRINGIFY_NAME(FLASHATTN_ISA),
    FLASHATTN_ISA::kFloatLanes,
    FLASHATTN_ISA::tile_size,
    FLASHATTN_ISA::forward_scratch_bytes,
    FLASHATTN_ISA::forward,
    FLASHATTN_ISA::bytes_of<FLASHATTN_ISA::BackwardScratch>,
    FLASHATTN_ISA::bytes_of<FLASHATTN_ISA::BackwardWorkspace>,
    FLASHATTN_ISA::backward,
    FLASHATTN_ISA::decode_workspace_bytes,
    FLASHATTN_ISA::decode,
    FLASHATTN_ISA::multiply_add_flop,
    &FLASHATTN_ISA::kDerivatives,
};

}  // namespace flashattn_ext
