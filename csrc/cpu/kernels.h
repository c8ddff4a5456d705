// The entry points of one instruction set, as dispatch.cpp and isa.cpp see them.
#pragma once

#include "../params.h"
#include "tile_size.h"

#if defined(__x86_64__) && ((defined(__clang__) && __clang_major__ >= 10) || (!defined(__clang__) && __GNUC__ >= 11))
#define FLASHATTN_HAVE_AVX512_BF16
#endif

namespace flashattn_ext {

// All entries take the dtype from the params. Scratch sizes are bytes per worker.
struct CpuKernels {
  const char* name;
  TileSize (*tile_size)(const AttnParams& params);  // of calls with its dtype and head dims
  int64_t (*forward_scratch_bytes)(const AttnParams& params);
  void (*forward)(const AttnParams& params);
  int64_t (*backward_scratch_bytes)(const AttnGradParams& params);
  int64_t (*backward_workspace_bytes)(const AttnGradParams& params);  // what all workers share: backward_workspace.h
  void (*backward)(const AttnGradParams& params);
  int64_t (*decode_workspace_bytes)(const DecodeParams& params, int64_t workers);  // of all workers
  void (*decode)(const DecodeParams& params);
  // Computes that many rounds of multiply-adds and returns the number of their floating point operations (peak.h).
  double (*multiply_add_flop)(int64_t iterations);
};

// The table of the instruction set in use (isa.h).
const CpuKernels& cpu_kernels();

extern const CpuKernels kGenericKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#if defined(FLASHATTN_HAVE_AVX512_BF16)
extern const CpuKernels kAvx512Bf16Kernels;
#endif
#endif

}  // namespace flashattn_ext
