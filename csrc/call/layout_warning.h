// The warning for tensors that are probably in another layout than the call says.
#pragma once

#include <cstdint>
#include <functional>

namespace flashattn_ext {

// Calls the Python function that warns (flashattn_ext/layout.py), which module.cpp sets; empty before that. rows, keys:
// the sizes as the call reads its tensors. Throws where Python turns warnings into errors.
inline std::function<void(int64_t rows, int64_t keys)> warn_of_layout;

}  // namespace flashattn_ext
