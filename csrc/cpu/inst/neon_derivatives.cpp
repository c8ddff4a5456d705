// The kernels of derivatives for NEON.
#define FLASHATTN_INSTANTIATED "cpu/inst/instantiate_derivatives.h"
#include "cpu/inst/neon.cpp"
