// What the host asks of CUDA's runtime and driver: the functions of launch.cuh. Every source of a kernel would compile
// them again, and the headers of maps and strings, once for each target.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/host/launch.cuh"

namespace flashattn_ext {
namespace {

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

// cuTensorMapEncodeTiled is a function of the driver. It is found through the runtime, so that nothing links with
// libcuda.
auto tensor_map_encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled; update it to one for CUDA 12 or newer");
    }
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

}  // namespace

int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

int most_shared_memory() { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(); }

int shared_memory_of_multiprocessor() { return device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(); }

int compute_capability() {
  return 10 * device_attribute<cudaDevAttrComputeCapabilityMajor>() +
         device_attribute<cudaDevAttrComputeCapabilityMinor>();
}

void launch_fails(const char* kernel, const char* reason, const AttnParams& p) {
  auto text = [](int64_t x) { return std::to_string(x); };
  throw std::runtime_error(std::string("CUDA kernel '") + kernel + "' failed: " + reason + " (B=" + text(p.batch) +
                           ", Sq=" + text(p.seqlen_q) + ", Sk=" + text(p.seqlen_k) + ", Hq=" + text(p.heads_q) +
                           ", Hk=" + text(p.heads_k) + ", D=" + text(p.head_dim) + ", Dv=" + text(p.head_dim_v) + ")");
}

cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  thread_local std::map<std::pair<int, const void*>, int> allowed;
  int& known = allowed[{current_device(), kernel}];
  if (bytes <= known) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) known = bytes;
  return error;
}

int64_t resident_blocks(const void* kernel, const char* name, const AttnParams& p, int threads, int shared_bytes) {
  thread_local std::map<std::pair<int, const void*>, int> known;
  const auto [at, is_new] = known.try_emplace({current_device(), kernel}, 0);
  if (is_new) {
    check_launch(allow_shared_memory(kernel, shared_bytes), name, p);
    check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at->second, kernel, threads, shared_bytes), name, p);
  }
  return std::max(1, at->second) * static_cast<int64_t>(multiprocessors());
}

bool can_start_early(const void* kernel) {
  constexpr int kHopper = 90;
  if (compute_capability() < kHopper) return false;
  thread_local std::map<std::pair<int, const void*>, bool> known;
  const auto [at, is_new] = known.try_emplace({current_device(), kernel}, false);
  if (is_new) {
    cudaFuncAttributes attributes;
    at->second = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= kHopper;
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  return at->second;
}

CUtensorMap tensor_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                       int64_t batch, int box_rows, DType type, int box_heads) {
  const int bytes = type == DType::kFloat32 ? 4 : 2;
  // The stride along an axis of extent 1 means nothing, and may be one that a map does not accept.
  auto stride = [&](int64_t elements, int64_t count) { return count > 1 ? uint64_t(elements * bytes) : uint64_t{16}; };

  auto extent = [](int64_t count) { return uint64_t(std::max<int64_t>(count, 1)); };
  const cuuint64_t extents[] = {extent(columns), extent(rows), extent(heads), extent(batch)};
  const cuuint64_t strides[] = {stride(t.row_stride, rows), stride(t.head_stride, heads),
                                stride(t.batch_stride, batch)};
  const cuuint32_t box[] = {128u / bytes, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_heads), 1},
                   steps[] = {1, 1, 1, 1};
  // The address of an empty tensor may be null, which a map does not accept; it is never read.
  void* const data = t.data ? t.data : reinterpret_cast<void*>(uintptr_t{1024});
  const CUtensorMapDataType element_type = type == DType::kFloat32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                           : type == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  auto encode = [&] {
    return tensor_map_encoder()(&map, element_type, 4, data, extents, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  // PyTorch's thread for backwards has no context until it calls the runtime. The encoder is a function of the driver,
  // which needs a context and does not make one; cudaSetDevice does.
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaSetDevice(current_device()) == cudaSuccess) result = encode();
  if (result != CUDA_SUCCESS) {
    auto text = [](int64_t x) { return std::to_string(x); };
    const std::string reason = std::string(cudaGetErrorString(static_cast<cudaError_t>(result))) + ", strides " +
                               text(t.row_stride) + " (row) " + text(t.head_stride) + " (head) " +
                               text(t.batch_stride) + " (batch)";
    launch_fails("tensor map", reason.c_str(), p);
  }
  return map;
}

}  // namespace flashattn_ext
