// The kernels of derivatives for AVX-512.
#define FLASHATTN_INSTANTIATED "cpu/inst/instantiate_derivatives.h"
#include "cpu/inst/avx512.cpp"
