// Products of a warp with mma.sync, on tiles in shared memory (common/tile.cuh) of rows of kHeadDim elements.
#pragma once

#include "../common/tensor_core.cuh"
#include "../common/tile.cuh"

namespace flashattn_ext::sm80 {

// c = a * b^T. a(i, d): the operand of row tile i for the columns from d on. b(pair, n, d): those of the tiles n and
// n + 1 of eight rows.
template <class T, int kHeadDim, class A, class B, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score_product(float (&c)[kRowTiles][kColumnTiles][4], const A& a, const B& b) {
  using Core = TensorCore<T>;
  constexpr int kSteps = kHeadDim / Core::kK, kUnrolled = kHeadDim > 256 ? 16 : kSteps;  // more take long to compile
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) set_zero(c[i]);
#pragma unroll kUnrolled
  for (int d = 0; d < kHeadDim; d += Core::kK) {
    typename Core::A rows[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) rows[i] = a(i, d);
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      typename Core::B pair[2];
      b(pair, n, d);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        Core::mma(c[i][n], rows[i], pair[0]);
        Core::mma(c[i][n + 1], rows[i], pair[1]);
      }
    }
  }
}

// The same for 16-row tiles of `a` from a_row on and 8-row tiles of `b` from b_row on.
template <int kHeadDim, class T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score_product(float (&c)[kRowTiles][kColumnTiles][4], const T* a, int a_row, const T* b,
                                              int b_row) {
  using Core = TensorCore<T>;
  constexpr int kStride = kTileStride<T, kHeadDim>;
  score_product<T, kHeadDim>(
      c, [&](int i, int d) { return Core::load_a(a, kStride, a_row + i * 16, d); },
      [&](typename Core::B(&pair)[2], int n, int d) { Core::load_b(pair, b, kStride, b_row + n * 8, d); });
}

// sum += a * b. a(i, step): the operand of row tile i for the rows of `b` from step * Core::kK on. b(pair, step, c):
// those of the tiles c and c + 1 of eight columns.
template <class T, int kSteps, class A, class B, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void accumulate(float (&sum)[kRowTiles][kColumnTiles][4], const A& a, const B& b) {
  using Core = TensorCore<T>;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    typename Core::A rows[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) rows[i] = a(i, step);
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 2) {
      typename Core::B pair[2];
      b(pair, step, c);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        Core::mma(sum[i][c], rows[i], pair[0]);
        Core::mma(sum[i][c + 1], rows[i], pair[1]);
      }
    }
  }
}

// The same for 8-column tiles of `b` from b_column on.
template <int kHeadDim, int kSteps, class A, class T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void accumulate(float (&sum)[kRowTiles][kColumnTiles][4], const A& a, const T* b,
                                           int b_column) {
  using Core = TensorCore<T>;
  accumulate<T, kSteps>(sum, a, [&](typename Core::B(&pair)[2], int step, int c) {
    Core::load_b_transposed(pair, b, kTileStride<T, kHeadDim>, step * Core::kK, b_column + c * 8);
  });
}

}  // namespace flashattn_ext::sm80
