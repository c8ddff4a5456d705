// Descriptions of tensors for TMA copies, encoded on the host and passed as kernel arguments.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "call.h"
#include "launch.cuh"

namespace flashattn_ext {

// cuTensorMapEncodeTiled is a function of the driver. It is found through the runtime, so that nothing links with
// libcuda.
inline auto tensor_map_encoder() {
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

// A map of [batch][heads][rows][columns] whose copies are boxes of `box_rows` rows and 64 columns of 16-bit elements,
// 128-byte swizzled. Pointer and strides are multiples of 16 bytes, which aligned_rows.h sees to.
inline CUtensorMap tensor_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                              int box_rows) {
  constexpr int kBytes = 2;
  // The stride along an axis of extent 1 means nothing, and may be one that a map does not take.
  auto stride = [](int64_t elements, int64_t count) { return count > 1 ? uint64_t(elements * kBytes) : uint64_t{16}; };

  auto extent = [](int64_t count) { return uint64_t(std::max<int64_t>(count, 1)); };
  const cuuint64_t extents[] = {extent(columns), extent(rows), extent(heads), extent(batch_entries(p))};
  const cuuint64_t strides[] = {stride(t.row_stride, rows), stride(t.head_stride, heads),
                                stride(t.batch_stride, batch_entries(p))};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  // An empty tensor may have no address, which a map does not take; it is never read.
  void* const data = t.data ? t.data : reinterpret_cast<void*>(uintptr_t{1024});
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, p.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, data,
      extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    auto text = [](int64_t x) { return std::to_string(x); };
    throw launch_error("tensor map",
                       std::string(cudaGetErrorString(static_cast<cudaError_t>(result))) + ", strides " +
                           text(t.row_stride) + " (row) " + text(t.head_stride) + " (head) " + text(t.batch_stride) +
                           " (batch)",
                       p);
  }
  return map;
}

inline CUtensorMap query_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, query_rows(p), p.heads_q, box_rows);
}
inline CUtensorMap key_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, key_rows(p), p.heads_k, box_rows);
}

}  // namespace flashattn_ext
