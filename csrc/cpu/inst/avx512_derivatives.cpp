// The kernels of derivatives for AVX-512.
#define FLASHATTN_INSTANTIATED "../instantiate_derivatives.h"
#include "avx512.cpp"
