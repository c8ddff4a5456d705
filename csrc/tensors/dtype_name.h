// Names of dtypes in messages, as users write them.
#pragma once

#include <c10/core/ScalarType.h>

#include <cctype>
#include <string>

namespace flashattn_ext {

// torch's name in Python, float32, where C++ prints Float.
inline std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return "float16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kComplexHalf:
      return "complex32";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:  // bfloat16, bool, float8_e4m3fn, ...
      std::string name = c10::toString(dtype);
      for (char& letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      return name;
  }
}

}  // namespace flashattn_ext
