// The kernels of derivatives for AVX-512 with VDPBF16PS.
#define FLASHATTN_INSTANTIATED "../instantiate_derivatives.h"
#include "avx512_bf16.cpp"
