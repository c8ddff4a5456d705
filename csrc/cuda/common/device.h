// What the current device is and has.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
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

// Empty when the CUDA kernels take tensors of this type and, on the current device, of these head dims. wide_shared:
// bytes of shared memory that the kernels of fp32 need for head dims above 384.
inline std::string wrong_tensors(const AttnParams& p, int wide_shared) {
  if (p.dtype == DType::kFloat64) return "float64 is supported on the CPU only; use float32";
  const bool wide = p.dtype == DType::kFloat32 && std::max(p.head_dim, p.head_dim_v) > 384;
  if (!wide || most_shared_memory() >= wide_shared) return "";
  auto kilobytes = [](int bytes) { return std::to_string(bytes / 1024) + " KB"; };
  return "head dims above 384 of float32 need a GPU that gives a thread block " + kilobytes(wide_shared) +
         " of shared memory (A100, H100 and newer data centre GPUs), found " + kilobytes(most_shared_memory()) +
         "; use float16 or bfloat16, or the CPU backend";
}

}  // namespace flashattn_ext
