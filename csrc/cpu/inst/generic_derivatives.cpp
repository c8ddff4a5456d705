// The kernels of derivatives for every CPU.
#define FLASHATTN_INSTANTIATED "../instantiate_derivatives.h"
#include "generic.cpp"
