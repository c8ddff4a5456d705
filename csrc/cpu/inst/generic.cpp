// The CPU kernels in the compiler's own vectors, for every CPU that the build targets (SSE2 on x86-64, NEON on Arm).
#include "cpu/inst/std.h"

#define FLASHATTN_ISA generic
#define FLASHATTN_ISA_GENERIC
#define FLASHATTN_KERNELS kGenericKernels

#include "cpu/inst/instantiate.h"
#include "cpu/inst/instantiate_derivatives.h"
