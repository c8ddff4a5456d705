// The peak rate of multiply-adds of one core, with which the benchmark compares the kernels.
#pragma once

#include "cpu/vectors/gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Runs `iterations` rounds of independent fp32 multiply-adds in registers; returns their floating point operations.
inline double multiply_add_flop(int64_t iterations) {
  using S = Simd<float>;
  constexpr int kChains = 12;  // covers latency times throughput of every current core
  typename S::V acc[kChains];
  for (int c = 0; c < kChains; ++c) acc[c] = S::set1(static_cast<float>(c));
  const typename S::V a = S::set1(0.999f), b = S::set1(0.001f);
  for (int64_t i = 0; i < iterations; ++i) {
    FLASHATTN_UNROLL(12)
    for (int c = 0; c < kChains; ++c) acc[c] = S::fma(a, b, acc[c]);  // the chain that Arm's cores shorten
  }
  float sink[S::kWidth];
  for (int c = 0; c < kChains; ++c) {
    S::store(sink, acc[c]);
    volatile float keep = sink[0];  // keeps the compiler from removing the loop
    (void)keep;
  }
  return 2.0 * static_cast<double>(iterations) * kChains * S::kWidth;
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
