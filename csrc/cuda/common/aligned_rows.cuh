// Copies of tensors whose rows the kernels cannot read in whole 16-byte vectors (head dims that are no multiple of 8,
// views that start anywhere): dense [B or 1][H][rows][columns], zero beyond the head dim.
#pragma once

#include "launch.cuh"
#include "tile.cuh"

namespace flashattn_ext {

constexpr int kCopyThreads = 256;

template <class T>
__global__ void __launch_bounds__(kCopyThreads)
    aligned_rows_kernel(const TensorView from, const TensorView to, int64_t rows, int64_t heads, int columns,
                        int to_columns, int64_t vectors) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  const int64_t index = blockIdx.x * int64_t{kCopyThreads} + threadIdx.x;
  if (index >= vectors) return;
  const int row_vectors = to_columns / kElements, column = static_cast<int>(index % row_vectors) * kElements;
  const int64_t flat = index / row_vectors, row = flat % rows, h = flat / rows % heads, b = flat / rows / heads;
  const T* source = row_pointer<const T>(from, b, h, row) + column;
  uint4 vector = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    if (column + e < columns) reinterpret_cast<T*>(&vector)[e] = source[e];
  }
  *reinterpret_cast<uint4*>(row_pointer<T>(to, b, h, row) + column) = vector;
}

inline int64_t padded_columns(int64_t columns, int64_t element_bytes) {
  const int64_t elements = kVectorBytes / element_bytes;
  return (columns + elements - 1) / elements * elements;
}

// Whether rows of `columns` elements can be read in place.
inline bool rows_are_aligned(const TensorView& t, int64_t columns, int64_t element_bytes) {
  auto aligned = [](int64_t bytes) { return bytes % kVectorBytes == 0; };
  return aligned(reinterpret_cast<int64_t>(t.data)) && aligned(columns * element_bytes) &&
         aligned(t.batch_stride * element_bytes) && aligned(t.head_stride * element_bytes) &&
         aligned(t.row_stride * element_bytes);
}

}  // namespace flashattn_ext
