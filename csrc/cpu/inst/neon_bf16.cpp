// The CPU kernels for NEON with BFDOT and BFMMLA (Armv8.6: Neoverse V1, N2, V2 and later).
#if defined(__aarch64__)
#include "cpu/inst/std.h"

#if defined(FLASHATTN_HAVE_NEON_BF16)

#define FLASHATTN_ISA neon_bf16
#define FLASHATTN_ISA_NEON
#define FLASHATTN_ISA_BF16
#define FLASHATTN_KERNELS kNeonBf16Kernels
// The target stays in force to the end of the file: templates are instantiated there.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+bf16")
#endif

#include "cpu/inst/instantiate.h"
#include "cpu/inst/instantiate_derivatives.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
#endif
