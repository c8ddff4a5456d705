// Properties of the current device. The functions are in runtime.cu, so that the sources of kernels need no headers for
// them.
#pragma once

#include <cuda_runtime.h>

namespace flashattn_ext {

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

int multiprocessors();

// Bytes of shared memory that a thread block may have, and bytes of a multiprocessor.
int most_shared_memory();
int shared_memory_of_multiprocessor();
inline bool has_large_shared_memory() { return most_shared_memory() >= 227 * 1024; }

// 90 for 9.0.
int compute_capability();

}  // namespace flashattn_ext
