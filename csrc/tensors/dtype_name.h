// Names of dtypes in messages, as users write them.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace flashattn_ext {

// torch's name in Python, float32, where C++ prints Float.
inline std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

}  // namespace flashattn_ext
