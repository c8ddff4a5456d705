// Products of a warp with mma.sync whose B operands are fp8 in shared memory. ldmatrix reads two elements of 8 bits as
// one of 16, and they are widened in registers: keys to bfloat16, as q is; values to float16, so that weights are
// rounded to float16, which has three more bits of mantissa than bfloat16.
//
// A lane then holds four adjacent columns of a key, 4t to 4t + 3 of 16. mma takes them as indices 2t, 2t + 1, 2t + 8
// and 2t + 9 of the contracted axis, and load_query permutes A alike. Of values, whose matrices are transposed, the
// lane holds columns 2g and 2g + 1 of two keys: the even columns of 16 are one tile of the result and the odd ones are
// another.
#pragma once

#include "fp8.cuh"
#include "tensor_core.cuh"

namespace flashattn_ext {

// A of 16 rows of q for columns [d, d + 16), in the order that score_product_fp8 needs. tile: points to the first row.
__device__ __forceinline__ TensorCore<__nv_bfloat16>::A load_query(const __nv_bfloat16* tile, int stride, int d) {
  const __nv_bfloat16* const at = tile + g() * stride + d + 4 * t();
  const uint2 low = *reinterpret_cast<const uint2*>(at), high = *reinterpret_cast<const uint2*>(at + 8 * stride);
  return {{low.x, high.x, low.y, high.y}};
}

// c = a * b^T. a(i, d): the operand of row tile i for columns [d, d + 16). b(words, n, d): words[m][j] has the elements
// of the 8-row tile n + m for columns from d + 16 j on.
template <int kHeadDim, class A, class B, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score_product_fp8(float (&c)[kRowTiles][kColumnTiles][4], const A& a, const B& b) {
  using Core = TensorCore<__nv_bfloat16>;
  constexpr int kSteps = kHeadDim / 32, kUnrolled = kHeadDim > 256 ? 4 : kSteps;  // more take long to compile
  static_assert(kHeadDim % 32 == 0 && kColumnTiles % 2 == 0);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) set_zero(c[i]);
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; ++step) {
    Core::A rows[2][kRowTiles];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) rows[j][i] = a(i, step * 32 + j * 16);
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      uint32_t words[2][2];
      b(words, n, step * 32);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const TwoPairs wide = bfloats_of_neighbours(words[m][j]);
          const Core::B operand{{wide.first, wide.second}};
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) Core::mma(c[i][n + m], rows[j][i], operand);
        }
      }
    }
  }
}

// sum += a * b. a(i, step): the operand of row tile i for rows [16 step, 16 step + 16) of b. b(words, step, c):
// words[m][j] has the elements of rows [16 step + 8 j, 16 step + 8 j + 8) and of the 16 columns that the tiles c + 2 m
// and c + 2 m + 1 of `sum` stand for, the first for the even ones.
template <int kSteps, class A, class B, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void accumulate_fp8(float (&sum)[kRowTiles][kColumnTiles][4], const A& a, const B& b) {
  using Core = TensorCore<__half>;
  static_assert(kColumnTiles % 4 == 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 4) {
      uint32_t words[2][2];
      b(words, step, c);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const TwoPairs low = halves_of_alternates(words[m][0]), high = halves_of_alternates(words[m][1]);
        const Core::B even{{low.first, high.first}}, odd{{low.second, high.second}};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          Core::mma(sum[i][c + 2 * m], a(i, step), even);
          Core::mma(sum[i][c + 2 * m + 1], a(i, step), odd);
        }
      }
    }
  }
}

}  // namespace flashattn_ext
