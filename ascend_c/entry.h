// The form of a kernel function, for the files in inst/. Each defines one, named after its file with "flash_" in front.
// A file declares no other kernel: CANN 8 finds it by reading the text.
#pragma once

#include <kernel_operator.h>

#include "arguments.h"
#include "kernel_list.h"

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

// Inside: the arguments that the caller packed with to_bytes(), for a kernel with the options of its row.
#define FLASHATTN_ARGUMENTS(name) \
  (reinterpret_cast<const flashattn_ext::ascend::ArgumentsWith<flashattn_ext::ascend::OptionsOf::name>&>(arguments))

namespace flashattn_ext {
namespace ascend {

struct OptionsOf {
#define FLASHATTN_OPTIONS(cores, stage, type, options, name) static constexpr uint32_t name = options;
  FLASHATTN_KERNELS(FLASHATTN_OPTIONS)
#undef FLASHATTN_OPTIONS
};

}  // namespace ascend
}  // namespace flashattn_ext
