// The kernels of derivatives for NEON with BFDOT and BFMMLA.
#define FLASHATTN_INSTANTIATED "cpu/inst/instantiate_derivatives.h"
#include "cpu/inst/neon_bf16.cpp"
