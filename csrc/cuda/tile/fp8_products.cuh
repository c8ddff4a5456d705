// Products of a warp with mma.sync whose B operands are fp8 in shared memory. ldmatrix reads two elements of 8 bits as
// one of 16, and they are widened in registers to float16. So A is in float16 too: rows of q are multiplied by a
// power of two that makes them fit, and weights are rounded to float16, which has three more bits of mantissa than
// bfloat16.
//
// A lane holds four adjacent columns of a key, 4t to 4t + 3 of 16. mma takes them as indices 2t, 2t + 1, 2t + 8 and
// 2t + 9 of the contracted axis, and prepare_query permutes the columns of q alike. Of values, whose matrices are
// transposed, the lane holds columns 2g and 2g + 1 of two keys: the even columns of 16 are one tile of the result and
// the odd ones are another.
#pragma once

#include "cuda/tile/fp8.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// A row of q in bfloat16 becomes A of score_product_fp8: float16 times a power of two. row: kHeadDim columns in shared
// memory. Returns the factor for its products. All lanes of a warp call it.
//
// The largest magnitude of the row becomes 2^14 to 2^15. The elements are then exact down to 2^-32 of the largest one,
// and smaller ones have errors of at most 2^-40 of it: 2^-16 of the error that a product of fp32 with the largest one
// has. Infinities and NaN stay.
template <int kHeadDim>
__device__ __forceinline__ float prepare_query(__half* row) {
  constexpr int kVectors = kHeadDim / 4, kOfLane = (kVectors + 31) / 32;
  const int lane = threadIdx.x % 32;
  uint2 vectors[kOfLane];
  uint32_t largest = 0;  // as bits of a bfloat16
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int vector = lane + 32 * i;
    vectors[i] = kVectors % 32 == 0 || vector < kVectors ? reinterpret_cast<const uint2*>(row)[vector] : uint2{};
    const uint32_t low = vectors[i].x & 0x7FFF7FFFu, high = vectors[i].y & 0x7FFF7FFFu;
    largest = max(largest, max(max(low >> 16, low & 0xFFFFu), max(high >> 16, high & 0xFFFFu)));
  }
  constexpr uint32_t kBias = 127, kTop = 14;
  // Both powers of two are normal numbers; q below 2^-112 stays below 2^14.
  const uint32_t exponent = max(__reduce_max_sync(~0u, largest) >> 7, kTop + 1);
  const float power = __uint_as_float((2 * kBias + kTop - exponent) << 23);
  __syncwarp();  // a lane overwrites columns that other lanes have read; the reduction orders no memory accesses
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int vector = lane + 32 * i;
    if (kVectors % 32 != 0 && vector >= kVectors) continue;
    const float2 x = TensorCore<__nv_bfloat16>::unpack(vectors[i].x),
                 y = TensorCore<__nv_bfloat16>::unpack(vectors[i].y);
    constexpr bool kNeighbours = AnyPairs::kNeighbours;
    __half* const to = row + vector / 4 * 16 + vector % 4 * 2;
    TensorCore<__half>::store_pair(to, x.x * power, (kNeighbours ? x.y : y.x) * power);
    TensorCore<__half>::store_pair(to + 8, (kNeighbours ? y.x : x.y) * power, y.y * power);
  }
  return __uint_as_float((exponent - kTop) << 23) * kOperandUnit;
}

// c = a * b^T. a(i, d): the operand of row tile i for columns [d, d + 16).
// b(words, n, d): words[m][j] has the elements of the 8-row tile n + m for columns from d + 16 j on.
template <int kHeadDim, class A, class B, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score_product_fp8(float (&c)[kRowTiles][kColumnTiles][4], const A& a, const B& b) {
  using Core = TensorCore<__half>;
  constexpr int kSteps = kHeadDim / 32, kUnrolled = kHeadDim > 256 ? 4 : kSteps;  // more take long to compile
  static_assert(kHeadDim % 32 == 0 && kColumnTiles % 2 == 0);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) set_zero(c[i]);
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; ++step) {
    Core::A rows[2][kRowTiles];
    unrolled<2, kRowTiles>([&](int j, int i) { rows[j][i] = a(i, step * 32 + j * 16); });
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      uint32_t words[2][2];
      b(words, n, step * 32);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const TwoPairs wide = AnyPairs::operands(words[m][j]);
          const Core::B operand{{wide.first, wide.second}};
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) Core::mma(c[i][n + m], rows[j][i], operand);
        }
      }
    }
  }
}

// sum += a * b / kOperandUnit. a(i, step): the operand of row tile i for rows [16 step, 16 step + 16) of b. b(words,
// step, c): words[m][j] has the elements of rows [16 step + 8 j, 16 step + 8 j + 8) and of the 16 columns that the
// tiles c + 2 m and c + 2 m + 1 of `sum` stand for, the first for the even ones.
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
        const TwoPairs low = operands_of_alternates(words[m][0]), high = operands_of_alternates(words[m][1]);
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
