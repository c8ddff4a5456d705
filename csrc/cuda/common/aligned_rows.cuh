// Copies of tensors whose rows the kernels cannot read in whole 16-byte vectors (head dims that are no multiple of 8,
// views that start anywhere): dense [B or 1][H][rows][columns], zero beyond the head dim.
#pragma once

#include "launch.cuh"
#include "tile.cuh"
#include "vector.cuh"

namespace flashattn_ext {

constexpr int kCopyThreads = 256, kThreadRows = 4;

// A thread copies one vector of some rows, all of which it loads before it stores; blockIdx.y (and those a grid's
// height further) is one head of one batch entry. end: of what `from` may read.
template <class T>
__global__ void __launch_bounds__(kCopyThreads)
    aligned_rows_kernel(const TensorView from, const TensorView to, int64_t rows, int64_t heads, int64_t all_heads,
                        int columns, int row_vectors, const void* end) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  const int block_rows = kCopyThreads / row_vectors, column = static_cast<int>(threadIdx.x) % row_vectors * kElements;
  const int64_t row = int64_t{blockIdx.x} * block_rows * kThreadRows + threadIdx.x / row_vectors;
  if (static_cast<int>(threadIdx.x) >= block_rows * row_vectors) return;
  for (int64_t head = blockIdx.y; head < all_heads; head += gridDim.y) {
    const int64_t b = head / heads, h = head % heads;
    UnalignedVector<T> vectors[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const T* const source = row_pointer<const T>(from, b, h, row + i * block_rows) + column;
      if (row + i * block_rows < rows) vectors[i].load(source, columns - column, end);
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      T* const target = row_pointer<T>(to, b, h, row + i * block_rows) + column;
      if (row + i * block_rows < rows) *reinterpret_cast<uint4*>(target) = vectors[i].get();
    }
  }
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

// Behind the last element.
inline const void* end_of(const TensorView& t, int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                          int64_t element_bytes) {
  const int64_t last = (batch - 1) * t.batch_stride + (heads - 1) * t.head_stride + (rows - 1) * t.row_stride;
  return static_cast<const char*>(t.data) + (last + columns) * element_bytes;
}

}  // namespace flashattn_ext
