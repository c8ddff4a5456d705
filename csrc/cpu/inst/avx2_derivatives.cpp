// The kernels of derivatives for AVX2.
#define FLASHATTN_INSTANTIATED "cpu/inst/instantiate_derivatives.h"
#include "cpu/inst/avx2.cpp"
