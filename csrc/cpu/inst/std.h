// What the kernels need from outside, included before an instruction set is chosen so that none of it is compiled for
// one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <utility>

// GCC takes the deliberately undefined operands inside its own AVX-512 intrinsics for mistakes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../../dropout.h"
#include "../../key_locator.h"
#include "../../mask.h"
#include "../../params.h"
#include "../../seqlen.h"
#include "../kernels.h"
