// The CPU kernels for NEON (every AArch64 core).
#if defined(__aarch64__)
#include "cpu/inst/std.h"

#define FLASHATTN_ISA neon
#define FLASHATTN_ISA_NEON
#define FLASHATTN_KERNELS kNeonKernels

#include FLASHATTN_INSTANTIATED
#endif
