// Descriptions of tensors for TMA copies, encoded on the host and passed as kernel arguments.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/host/call.h"
#include "cuda/host/device.h"
#include "cuda/host/launch.cuh"

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

// A map of [batch][heads][rows][columns] whose copies are boxes of `box_rows` rows of 128 bytes, 128-byte swizzled: 64
// columns of 16-bit elements, or 32 of fp32. They have the rows of `box_heads` heads. Pointer and strides are
// multiples of 16 bytes, which aligned_rows.h ensures for inputs.
inline CUtensorMap tensor_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                              int64_t batch, int box_rows, DType type, int box_heads = 1) {
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
    throw launch_error("tensor map",
                       std::string(cudaGetErrorString(static_cast<cudaError_t>(result))) + ", strides " +
                           text(t.row_stride) + " (row) " + text(t.head_stride) + " (head) " + text(t.batch_stride) +
                           " (batch)",
                       p);
  }
  return map;
}

inline CUtensorMap query_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, query_rows(p), p.heads_q, batch_entries(p), box_rows, p.dtype);
}
inline CUtensorMap key_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, key_rows(p), p.heads_k, batch_entries(p), box_rows, p.dtype);
}
// A map of a tensor of bytes whose elements are pairs of them: 128 columns of bytes are as many bytes as 64 of 16 bits.
// Strides are even; where the columns are not, a byte follows each row.
inline CUtensorMap pair_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                            int64_t batch, int box_rows) {
  const TensorView pairs{t.data, t.batch_stride / 2, t.row_stride / 2, t.head_stride / 2};
  return tensor_map(p, pairs, (columns + 1) / 2, rows, heads, batch, box_rows, DType::kFloat16);
}
// A bias or its gradient: rows are queries, columns are keys.
inline CUtensorMap bias_map(const AttnParams& p, const BiasView& bias, int box_rows) {
  const TensorView view{bias.data, bias.batch_stride, bias.row_stride, bias.head_stride};
  return tensor_map(p, view, p.seqlen_k, p.seqlen_q, p.heads_q, batch_entries(p), box_rows, bias.dtype);
}

}  // namespace flashattn_ext
