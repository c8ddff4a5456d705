// The CPU kernels for AVX-512 (Skylake-X and later).
#if defined(__x86_64__)
#include "cpu/inst/std.h"

#define FLASHATTN_ISA avx512
#define FLASHATTN_ISA_AVX512
#define FLASHATTN_KERNELS kAvx512Kernels
// The target stays in force to the end of the file: templates are instantiated there.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include FLASHATTN_INSTANTIATED

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
