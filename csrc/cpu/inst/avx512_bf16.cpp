// The CPU kernels for AVX-512 with VDPBF16PS (Cooper Lake, Sapphire Rapids, Zen 4 and later).
#include "cpu/inst/std.h"

#if defined(FLASHATTN_HAVE_AVX512_BF16)

#define FLASHATTN_ISA avx512_bf16
#define FLASHATTN_ISA_AVX512
#define FLASHATTN_ISA_BF16
#define FLASHATTN_KERNELS kAvx512Bf16Kernels
// The target stays in force to the end of the file: templates are instantiated there.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#endif

#include "cpu/inst/instantiate.h"
#include "cpu/inst/instantiate_derivatives.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
