// The CPU kernels for AVX2 with FMA and F16C (Haswell, Zen and later).
#if defined(__x86_64__)
#include "cpu/inst/std.h"

#define FLASHATTN_ISA avx2
#define FLASHATTN_ISA_AVX2
#define FLASHATTN_KERNELS kAvx2Kernels
// The target stays in force to the end of the file: templates are instantiated there.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include FLASHATTN_INSTANTIATED

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
