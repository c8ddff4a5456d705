// The rate of multiply-adds that one core can reach at all: what the benchmark compares the kernels with.
#pragma once

#include "gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Floating point operations of `iterations` rounds of independent fp32 multiply-adds in registers.
inline double multiply_add_flop(int64_t iterations) {
  using S = Simd<float>;
  constexpr int kChains = 12;  // covers latency times throughput of every current core
  typename S::V acc[kChains];
  for (int c = 0; c < kChains; ++c) acc[c] = S::set1(static_cast<float>(c));
  const typename S::V a = S::set1(0.999f), b = S::set1(0.001f);
  for (int64_t i = 0; i < iterations; ++i) {
    FLASHATTN_UNROLL(12)
    for (int c = 0; c < kChains; ++c) acc[c] = S::fma(acc[c], a, b);
  }
  float sink[S::kWidth];
  for (int c = 0; c < kChains; ++c) {
    S::store(sink, acc[c]);
    volatile float keep = sink[0];  // the loop has an effect
    (void)keep;
  }
  return 2.0 * static_cast<double>(iterations) * kChains * S::kWidth;
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
