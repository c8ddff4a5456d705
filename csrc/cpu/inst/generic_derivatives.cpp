// The kernels of derivatives for every CPU.
#define FLASHATTN_INSTANTIATED "cpu/inst/instantiate_derivatives.h"
#include "cpu/inst/generic.cpp"
