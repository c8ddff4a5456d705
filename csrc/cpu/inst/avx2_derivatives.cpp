// The kernels of derivatives for AVX2.
#define FLASHATTN_INSTANTIATED "../instantiate_derivatives.h"
#include "avx2.cpp"
