// The form of a kernel function, for the files in inst/: each defines one, whose name is that of the file behind
// "flash_". They declare no other one: CANN 8 finds the kernel of a file by reading its text.
#pragma once

#include <kernel_operator.h>

#include "arguments.h"

// Which cores a kernel runs on. CANN 9 wants it in the signature, CANN 8 in the body (KERNEL_TASK_TYPE_DEFAULT).
// CANN 9 is about to withdraw the mark in the body: there it is compiled away.
#if defined(FLASHATTN_ASC)
#define FLASHATTN_MIXED __mix__(1, 2)
#define FLASHATTN_VECTOR __vector__
#undef KERNEL_TASK_TYPE_DEFAULT
#define KERNEL_TASK_TYPE_DEFAULT(type)
#else
#define FLASHATTN_MIXED __aicore__
#define FLASHATTN_VECTOR __aicore__
#endif

#define FLASHATTN_KERNEL(cores, name) extern "C" __global__ cores void name(FlashattnBytes arguments)

// Inside: what the caller packed with to_bytes().
#define FLASHATTN_ARGUMENTS(type) (reinterpret_cast<const flashattn_ext::ascend::type&>(arguments))
