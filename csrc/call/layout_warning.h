// The warning for tensors that are probably in another layout than the call says.
#pragma once

#include <cstdint>

namespace flashattn_ext {

// Calls the Python function that warns (flashattn_ext/layout.py). rows, keys: the sizes as the call reads its tensors.
// Throws where Python turns warnings into errors.
void warn_of_layout(int64_t rows, int64_t keys);

// function: a PyObject, whose reference is taken over.
void set_layout_warning(void* function);

}  // namespace flashattn_ext
