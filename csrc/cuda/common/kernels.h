// Kernels: what a folder of kernels (sm80/, sm90/) offers to dispatch.cuh.
#pragma once

#include <cstddef>

#include "../../params.h"

namespace flashattn_ext {

// The entry points of one element type, class of head dims and kind.
struct Kernels {
  size_t forward_bytes;  // of workspace
  void (*forward)(const AttnParams&);
  size_t (*backward_bytes)(const AttnGradParams&);
  void (*backward)(const AttnGradParams&);
};

}  // namespace flashattn_ext
