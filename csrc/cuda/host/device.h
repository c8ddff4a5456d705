// Properties of the current device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "params.h"

namespace flashattn_ext {

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// An attribute of the current device, cached: a query of the driver takes half a microsecond.
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

// Bytes of shared memory that a thread block may have.
inline int most_shared_memory() { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(); }
inline bool has_large_shared_memory() { return most_shared_memory() >= 227 * 1024; }

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

}  // namespace flashattn_ext
