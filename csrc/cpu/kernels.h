// The entry points of one instruction set, as dispatch.cpp sees them.
#pragma once

#include "../params.h"

#if defined(__x86_64__) && ((defined(__clang__) && __clang_major__ >= 10) || (!defined(__clang__) && __GNUC__ >= 11))
#define FLASHATTN_HAVE_AVX512_BF16
#endif

namespace flashattn_ext {

// All entries take the dtype from the params. Scratch sizes are bytes per worker.
struct CpuKernels {
  const char* name;
  CpuTile forward_tile;  // tiles.h: of fp32
  int64_t (*forward_scratch_bytes)(const AttnParams& params);
  void (*forward)(const AttnParams& params);
  int64_t (*backward_scratch_bytes)(const AttnGradParams& params);
  // Bytes that all workers share: fp32 gradient accumulators and per-row statistics.
  int64_t (*backward_shared_bytes)(const AttnGradParams& params);
  void (*backward)(const AttnGradParams& params);
  // peak.h: floating point operations of that many rounds of multiply-adds.
  double (*multiply_add_flop)(int64_t iterations);
};

extern const CpuKernels kGenericKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#if defined(FLASHATTN_HAVE_AVX512_BF16)
extern const CpuKernels kAvx512Bf16Kernels;
#endif
#endif

}  // namespace flashattn_ext
