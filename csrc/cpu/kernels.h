// The entry points of one instruction set, as dispatch.cpp and isa.cpp see them.
#pragma once

#include "cpu/tile_size.h"
#include "derivative_params.h"

#if defined(__x86_64__) && ((defined(__clang__) && __clang_major__ >= 10) || (!defined(__clang__) && __GNUC__ >= 11))
#define FLASHATTN_HAVE_AVX512_BF16
#endif
// Clang's arm_neon.h has these intrinsics without -march from version 16 on.
#if defined(__aarch64__) && ((defined(__clang__) && __clang_major__ >= 16) || (!defined(__clang__) && __GNUC__ >= 10))
#define FLASHATTN_HAVE_NEON_BF16
#endif

namespace flashattn_ext {

// The entry points of forward mode and of second derivatives, as in CpuKernels.
struct CpuDerivatives {
  int64_t (*jvp_scratch_bytes)(const JvpParams& params);
  void (*jvp)(const JvpParams& params);
  int64_t (*second_scratch_bytes)(const SecondParams& params);
  int64_t (*second_workspace_bytes)(const SecondParams& params);  // shared by all workers: second.h
  void (*second)(const SecondParams& params);
};

// All entries dispatch on the dtype in the params. Scratch sizes are bytes per worker. The tables of avx512_bf16
// and neon_bf16 serve bf16 and fp8 alone.
struct CpuKernels {
  const char* name;
  int64_t float_lanes;                              // floats of a vector
  TileSize (*tile_size)(const AttnParams& params);  // for the dtype and head dims of the params
  int64_t (*forward_scratch_bytes)(const AttnParams& params);
  void (*forward)(const AttnParams& params);
  int64_t (*backward_scratch_bytes)(const AttnGradParams& params);
  int64_t (*backward_workspace_bytes)(const AttnGradParams& params);  // shared by all workers: backward_workspace.h
  void (*backward)(const AttnGradParams& params);
  int64_t (*decode_workspace_bytes)(const DecodeParams& params, int64_t workers);  // for all workers together
  void (*decode)(const DecodeParams& params);
  // Runs `iterations` rounds of multiply-adds and returns their number of floating point operations (peak.h).
  double (*multiply_add_flop)(int64_t iterations);
  const CpuDerivatives* derivatives;
};

// The table that runs calls of this dtype with the instruction set in use (isa.h). For a dtype other than bf16 and
// fp8 avx512_bf16 has that of avx512, and neon_bf16 that of neon: the kernels would be the same, and they are not
// compiled twice.
const CpuKernels& cpu_kernels(DType dtype);

extern const CpuKernels kGenericKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#if defined(FLASHATTN_HAVE_AVX512_BF16)
extern const CpuKernels kAvx512Bf16Kernels;
#endif
#elif defined(__aarch64__)
extern const CpuKernels kNeonKernels;
#if defined(FLASHATTN_HAVE_NEON_BF16)
extern const CpuKernels kNeonBf16Kernels;
#endif
#endif

}  // namespace flashattn_ext
