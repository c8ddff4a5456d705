// External headers of the kernels. They are included before the instruction set is chosen, so that their inline
// functions are not compiled for it.
#pragma once

// What the sources of the largest instruction sets instantiate. Each *_derivatives.cpp defines it before it includes
// the source of its instruction set; the two compile in parallel. The other sources, which take less time, have
// everything: both parts use the same products.
#if !defined(FLASHATTN_INSTANTIATED)
#define FLASHATTN_INSTANTIATED "cpu/inst/instantiate.h"
#endif

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

// GCC warns about deliberately undefined operands inside its own AVX-512 intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "backend/key_locator.h"
#include "cpu/kernels.h"
#include "derivative_params.h"
#include "params.h"
#include "rules/dropout.h"
#include "rules/mask.h"
