// What the current device is and has.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../../params.h"

namespace flashattn_ext {

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Whether a thread block may have 227 KB.
inline bool has_large_shared_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= 227 * 1024;
}

// 90 for 9.0.
inline int compute_capability() {
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) + device_attribute(cudaDevAttrComputeCapabilityMinor);
}

// For Backend::supports: "needs a GPU of compute capability ..., found ...; ...".
inline std::string wrong_device(const std::string& needed, const std::string& instead) {
  const int capability = compute_capability();
  return "needs a GPU of compute capability " + needed + ", found " + std::to_string(capability / 10) + "." +
         std::to_string(capability % 10) + "; " + instead;
}

// Empty when the CUDA kernels take tensors of this type.
inline std::string wrong_dtype(const AttnParams& p) {
  return p.dtype == DType::kFloat64 ? "float64 is supported on the CPU only; use float32" : "";
}

// Empty when the CUDA kernels have head dims this large.
inline std::string refuses_head_dims(const AttnParams& p) {
  const int64_t largest = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  return largest <= 256 ? "" : "head dims above 256 are not implemented by the CUDA kernels; use the CPU backend";
}

}  // namespace flashattn_ext
