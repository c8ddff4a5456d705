// What the current device is and has.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <string>

#include "../../params.h"

namespace flashattn_ext {

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// An attribute of the current device, asked for once: the driver takes half a microsecond for each.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices] = {};  // plus 1
  const int device = current_device();
  int value = device < kDevices ? known[device].load(std::memory_order_relaxed) - 1 : -1;
  if (value >= 0) return value;
  if (cudaDeviceGetAttribute(&value, kAttribute, device) != cudaSuccess) return 0;
  if (device < kDevices) known[device].store(value + 1, std::memory_order_relaxed);
  return value;
}

inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

// Whether a thread block may have 227 KB.
inline bool has_large_shared_memory() {
  return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= 227 * 1024;
}

// 90 for 9.0.
inline int compute_capability() {
  return 10 * device_attribute<cudaDevAttrComputeCapabilityMajor>() +
         device_attribute<cudaDevAttrComputeCapabilityMinor>();
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

}  // namespace flashattn_ext
