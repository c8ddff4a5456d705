// Products of a warp with mma.sync, on tiles in shared memory (common/tile.cuh) of rows of kHeadDim elements.
#pragma once

#include "../common/tensor_core.cuh"
#include "../common/tile.cuh"

namespace flashattn_ext::sm80 {

// How B is read from a tile of padded rows. Kernels whose tiles have another layout give the products a type of their
// own with these functions.
template <class T, int kColumns>
struct PaddedTile {
  using Core = TensorCore<T>;
  static __device__ __forceinline__ void load_b(typename Core::B (&b)[2], const T* tile, int n0, int k0) {
    Core::load_b(b, tile, kTileStride<T, kColumns>, n0, k0);
  }
  static __device__ __forceinline__ void load_b_transposed(typename Core::B (&b)[2], const T* tile, int k0, int n0) {
    Core::load_b_transposed(b, tile, kTileStride<T, kColumns>, k0, n0);
  }
};

// c = a * b^T, for 8-row tiles of `b` from b_row on. a(i, d): the operand of row tile i for the columns from d on.
template <int kHeadDim, template <class, int> class TileOfB = PaddedTile, class A, class T, int kRowTiles,
          int kColumnTiles>
__device__ __forceinline__ void score_product(float (&c)[kRowTiles][kColumnTiles][4], const A& a, const T* b,
                                              int b_row) {
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
      TileOfB<T, kHeadDim>::load_b(pair, b, b_row + n * 8, d);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        Core::mma(c[i][n], rows[i], pair[0]);
        Core::mma(c[i][n + 1], rows[i], pair[1]);
      }
    }
  }
}

// The same for 16-row tiles of `a` from a_row on.
template <int kHeadDim, class T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score_product(float (&c)[kRowTiles][kColumnTiles][4], const T* a, int a_row, const T* b,
                                              int b_row) {
  auto operand = [&](int i, int d) { return TensorCore<T>::load_a(a, kTileStride<T, kHeadDim>, a_row + i * 16, d); };
  score_product<kHeadDim>(c, operand, b, b_row);
}

// sum += a * b, for 8-column tiles of `b` from b_column on. a(i, step): the operand of row tile i for the rows of `b`
// from step * Core::kK on.
template <int kHeadDim, int kSteps, template <class, int> class TileOfB = PaddedTile, class A, class T, int kRowTiles,
          int kColumnTiles>
__device__ __forceinline__ void accumulate(float (&sum)[kRowTiles][kColumnTiles][4], const A& a, const T* b,
                                           int b_column) {
  using Core = TensorCore<T>;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    typename Core::A rows[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) rows[i] = a(i, step);
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 2) {
      typename Core::B pair[2];
      TileOfB<T, kHeadDim>::load_b_transposed(pair, b, step * Core::kK, b_column + c * 8);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        Core::mma(sum[i][c], rows[i], pair[0]);
        Core::mma(sum[i][c + 1], rows[i], pair[1]);
      }
    }
  }
}

}  // namespace flashattn_ext::sm80
