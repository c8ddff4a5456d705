// Instantiates the kernels of derivatives for the instruction set of the including file (inst/*_derivatives.cpp), and
// fills the table to which its CpuKernels point.
#pragma once

#include "cpu/derivatives/jvp.h"
#include "cpu/derivatives/second.h"
#include "cpu/inst/for_types.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The accuracy of weights in derivatives: the same for 16-bit inputs as for fp32, with which they then share the
// kernels between the products. A table of bf16 alone has nothing to share.
#if defined(FLASHATTN_ISA_BF16)
using DerivativeAccuracy = Exp2Half;
#else
using DerivativeAccuracy = Exp2Full;
#endif

inline void jvp(const JvpParams& p) {
  for_rule<false, DerivativeAccuracy>(p, [&](auto in, auto op, auto accuracy, auto* rule) {
    jvp<decltype(in), decltype(op), decltype(accuracy), std::decay_t<decltype(*rule)>>(p);
  });
}
inline void second(const SecondParams& p) {
  for_rule<false, DerivativeAccuracy>(p, [&](auto in, auto op, auto accuracy, auto* rule) {
    second<decltype(in), decltype(op), decltype(accuracy), std::decay_t<decltype(*rule)>>(p);
  });
}

extern const CpuDerivatives kDerivatives;
const CpuDerivatives kDerivatives = {bytes_of<JvpScratch>, jvp, bytes_of<SecondScratch>, bytes_of<SecondWorkspace>,
                                     second};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
