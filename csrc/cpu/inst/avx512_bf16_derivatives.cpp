// The kernels of derivatives for AVX-512 with VDPBF16PS.
#define FLASHATTN_INSTANTIATED "cpu/inst/instantiate_derivatives.h"
#include "cpu/inst/avx512_bf16.cpp"
