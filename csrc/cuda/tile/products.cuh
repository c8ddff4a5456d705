// Products of a warp with mma.sync, on tiles in shared memory (operand_tile.cuh) of rows of kHeadDim
// elements.
#pragma once

#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// Tiles of q, k, v and dout in a kernel of a class of head dims. Wide rows are swizzled, for the L2 cache; at 64
// columns of 16 bits, and 128 of fp32, the forward was measured to be up to 2 % faster with padded ones, which spill
// nothing (docs/sm80.md).
template <class T, int kHeadDim, int kColumns = kHeadDim>
using InputTile = OperandTile<T, kColumns, (kHeadDim > (sizeof(T) == 2 ? 64 : 128))>;

// c += a * b^T. a(i, d): the operand of row tile i for the columns from d on. b(pair, n, d): the operands of the 8-row
// tiles n and n + 1. Consecutive steps are 128 bytes apart in a row: then their places in swizzled tiles differ by 128
// bytes as well. Above 256 columns they follow each other, as in forward_large.cuh, whose scores a backward repeats.
// kTransposed: c has the bits of the transposed b * a^T, so that a backward recomputes the scores of the forward.
template <class T, int kHeadDim, bool kTransposed = false, class A, class B, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_score_product(float (&c)[kRowTiles][kColumnTiles][4], const A& a, const B& b) {
  using Core = TensorCore<T>;
  constexpr int kSteps = kHeadDim / Core::kK, kUnrolled = kHeadDim > 256 ? 16 : kSteps;  // more take long to compile
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  constexpr int kLines = kHeadDim % kLine == 0 && kHeadDim <= 256 ? kHeadDim / kLine : 1;
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; ++step) {
    const int d = step % kLines * kLine + step / kLines * Core::kK;
    typename Core::A rows[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) rows[i] = a(i, d);
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      typename Core::B pair[2];
      b(pair, n, d);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        Core::template mma<kTransposed>(c[i][n], rows[i], pair[0]);
        Core::template mma<kTransposed>(c[i][n + 1], rows[i], pair[1]);
      }
    }
  }
}

// Adds the product of 16-row tiles of `a` from a_row on and 8-row tiles of `b` from b_row on.
template <class Tile, bool kTransposed = false, class Places, class T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_score_product(float (&c)[kRowTiles][kColumnTiles][4], const Places& places,
                                                  const T* a, int a_row, const T* b, int b_row) {
  constexpr int kStride = Tile::kStride;
  add_score_product<T, Tile::kColumns, kTransposed>(
      c, [&](int i, int d) { return Tile::load_a(a + (a_row + i * 16) * kStride, Tile::moved(places.a, d)); },
      [&](typename TensorCore<T>::B(&pair)[2], int n, int d) {
        Tile::load_b(pair, b + n * 8 * kStride, Tile::moved(places.b + b_row * Tile::kRowBytes, d));
      });
}

// c = a * b^T, of the same operands.
template <class T, int kHeadDim, class A, class B, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score_product(float (&c)[kRowTiles][kColumnTiles][4], const A& a, const B& b) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) set_zero(c[i]);
  add_score_product<T, kHeadDim>(c, a, b);
}
template <class Tile, bool kTransposed = false, class Places, class T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score_product(float (&c)[kRowTiles][kColumnTiles][4], const Places& places, const T* a,
                                              int a_row, const T* b, int b_row) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) set_zero(c[i]);
  add_score_product<Tile, kTransposed>(c, places, a, a_row, b, b_row);
}

// sum += a * b. a(i, step): the operand of row tile i for the rows of `b` from step * Core::kK on. b(pair, step, c):
// the operands of the 8-column tiles c and c + 1.
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

// Adds the product with 8-column tiles of `b` from b_column on, a multiple of their columns.
template <class Tile, int kSteps, class Places, class A, class T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void accumulate(float (&sum)[kRowTiles][kColumnTiles][4], const Places& places, const A& a,
                                           const T* b, int b_column) {
  // Whether the places from b_column on follow from the first of them.
  constexpr int kPart = kColumnTiles * 8;
  constexpr bool kFollow = kPart % Tile::kGroup == 0 || Tile::kGroup % kPart == 0;
  const int place = Tile::moved(places.transposed, kFollow ? b_column : 0);
  accumulate<T, kSteps>(sum, a, [&](typename TensorCore<T>::B(&pair)[2], int step, int c) {
    const T* const rows = b + step * TensorCore<T>::kK * Tile::kStride;
    Tile::load_b_transposed(pair, rows, Tile::moved(place, c * 8 + (kFollow ? 0 : b_column)));
  });
}

}  // namespace flashattn_ext
