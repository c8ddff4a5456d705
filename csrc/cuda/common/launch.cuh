// Launches a kernel on the caller's stream, and names kernel and shape when CUDA refuses it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "../../params.h"
#include "device.h"

namespace flashattn_ext {

inline std::runtime_error launch_error(const std::string& kernel, const std::string& reason, const AttnParams& p) {
  auto text = [](int64_t x) { return std::to_string(x); };
  return std::runtime_error("CUDA kernel '" + kernel + "' failed: " + reason + " (B=" + text(p.batch) +
                            ", Sq=" + text(p.seqlen_q) + ", Sk=" + text(p.seqlen_k) + ", Hq=" + text(p.heads_q) +
                            ", Hk=" + text(p.heads_k) + ", D=" + text(p.head_dim) + ", Dv=" + text(p.head_dim_v) + ")");
}

inline void check_launch(cudaError_t error, const char* kernel, const AttnParams& p) {
  if (error != cudaSuccess) throw launch_error(kernel, cudaGetErrorString(error), p);
}

// Allows the blocks of a kernel more than 48 KB of shared memory, on the current device. The runtime takes two
// microseconds for that, so it is told once.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  thread_local std::map<std::pair<int, const void*>, int> allowed;
  int& known = allowed[{current_device(), kernel}];
  if (bytes <= known) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) known = bytes;
  return error;
}

template <class Params, class... Arguments>
void launch(void (*kernel)(const Params, Arguments...), const char* name, const Params& p, int64_t blocks, int threads,
            int shared_bytes, std::common_type_t<Arguments>... arguments) {
  if (blocks == 0) return;
  if (blocks > std::numeric_limits<int>::max()) check_launch(cudaErrorInvalidConfiguration, name, p);
  if (shared_bytes > 48 * 1024) {
    check_launch(allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes), name, p);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(p.stream)>>>(p,
                                                                                                        arguments...);
  check_launch(cudaGetLastError(), name, p);
}

}  // namespace flashattn_ext
