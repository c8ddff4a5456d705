// Rows of results, from accumulators to global memory.
#pragma once

#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// Writes up to 8 elements of a row from `column` on, of the first `columns`.
template <class T>
__device__ __forceinline__ void store_part(T* row, int column, int columns, const uint4& vector) {
  if (column >= columns) return;
  if (column + 8 > columns) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (column + e < columns) row[column + e] = reinterpret_cast<const T*>(&vector)[e];
    }
  } else if (reinterpret_cast<uintptr_t>(row) % kVectorBytes == 0) {
    *reinterpret_cast<uint4*>(row + column) = vector;
  } else {
    store_unaligned(row + column, vector);
  }
}

// The 16-byte vectors of row g (r = 0) or g + 8 (r = 1) of accumulators, times a factor; `zero`: zeros instead. Four
// lanes hold a row, two of every eight columns each. They transpose them with shuffles: vector i of lane t then has the
// columns from 8 t + 32 i on. All lanes of the warp call it.
template <class T, int N>
__device__ __forceinline__ void pack_row(uint4 (&vectors)[(N + 3) / 4], const float (&x)[N][4], int r, float factor,
                                         bool zero) {
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&tile)[4] = x[n + i < N ? n + i : n];
      words[i] = zero ? 0 : TensorCore<T>::pack(tile[2 * r] * factor, tile[2 * r + 1] * factor);
    }
    transpose_quad(words);
    vectors[n / 4] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
// Writes the vectors of a whole aligned row.
template <class T, int kVectors>
__device__ __forceinline__ void store_vectors(T* to, const uint4 (&vectors)[kVectors]) {
  to += static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) *reinterpret_cast<uint4*>(to + i * 32) = vectors[i];
}

// Writes row g or g + 8, of pack_row. exists: whether the row is within the sequence. All lanes of the warp call it.
// Whole aligned rows have no branch for each vector: together with them the code would be many times as long.
template <class T, int N>
__device__ __forceinline__ void store_row(T* to, const float (&x)[N][4], int r, float factor, bool zero, bool exists,
                                          int columns) {
  uint4 vectors[(N + 3) / 4];
  pack_row<T>(vectors, x, r, factor, zero);
  if (!exists) return;
  if (N % 4 == 0 && columns >= 8 * N && reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0) {
    store_vectors(to, vectors);
  } else {
    const int column = static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
    for (int i = 0; i < (N + 3) / 4; ++i) store_part(to, column + i * 32, columns, vectors[i]);
  }
}

// Writes both rows. apart: from the first one to the other, in elements. Nearly always all rows of a warp are
// whole, aligned and not zero: then the two do not wait for each other.
template <class T, int N>
__device__ __forceinline__ void store_rows(T* to, int64_t apart, const float (&x)[N][4], const float (&factors)[2],
                                           const bool (&zero)[2], const bool (&exist)[2], int columns) {
  T* const rows[2] = {to, to + apart};
  bool simple = N % 4 == 0 && columns >= 8 * N;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    simple = simple && exist[r] && !zero[r] && reinterpret_cast<uintptr_t>(rows[r]) % kVectorBytes == 0;
  }
  if (__all_sync(~0u, simple)) {
    uint4 vectors[2][(N + 3) / 4];
#pragma unroll
    for (int r = 0; r < 2; ++r) pack_row<T>(vectors[r], x, r, factors[r], false);
#pragma unroll
    for (int r = 0; r < 2; ++r) store_vectors(rows[r], vectors[r]);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_row(rows[r], x, r, factors[r], zero[r], exist[r], columns);
  }
}

// Writes row g or g + 8 in fp32. Each lane writes its own columns, two at a time.
template <int N>
__device__ __forceinline__ void store_row_fp32(float* to, const float (&x)[N][4], int r, float factor, bool zero,
                                               bool exists, int columns) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % sizeof(float2) == 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = n * 8 + 2 * lane_in_quad();
    const float2 pair = zero ? float2{} : make_float2(x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
    if (exists && aligned && column + 1 < columns) {
      *reinterpret_cast<float2*>(to + column) = pair;
    } else if (exists && column < columns) {
      to[column] = pair.x;
      if (column + 1 < columns) to[column + 1] = pair.y;
    }
  }
}
// Writes row `at` of head h of out, whose dtype is AttnParams::out_dtype.
template <int N>
__device__ __forceinline__ void store_row_of_fp8(const AttnParams& p, int b, int h, int64_t at, const float (&x)[N][4],
                                                 int r, float factor, bool zero, bool exists, int columns) {
  if (p.out_dtype == DType::kBFloat16) {
    store_row(row_pointer<__nv_bfloat16>(p.out, b, h, at), x, r, factor, zero, exists, columns);
  } else if (p.out_dtype == DType::kFloat16) {
    store_row(row_pointer<__half>(p.out, b, h, at), x, r, factor, zero, exists, columns);
  } else {
    store_row_fp32(row_pointer<float>(p.out, b, h, at), x, r, factor, zero, exists, columns);
  }
}

}  // namespace flashattn_ext
