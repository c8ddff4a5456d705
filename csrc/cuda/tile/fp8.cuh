// Conversions of e4m3, a floating-point format of 8 bits: to 16 bits, which is exact, and from fp32. NaN stays NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

struct Float8 {
  uint8_t bits;
};

template <class T>
constexpr bool kIsFloat8 = std::is_same_v<T, Float8>;
// The type of q, and of rotated rows, of a kernel that reads keys and values of type T.
template <class T>
using Widened = std::conditional_t<kIsFloat8<T>, __nv_bfloat16, T>;

// Two words of two 16-bit numbers each.
struct TwoPairs {
  uint32_t first, second;
};

// The elements in the high bytes of both halves of a word, divided by 2^8, as float16, by bit arithmetic: as bits of a
// float16 the magnitude of an element is its value divided by 2^8.
__device__ __forceinline__ uint32_t small_half_of_high_bytes(uint32_t x) {
  const uint32_t magnitude = x >> 1 & 0x3F803F80u;
  // NaN has the largest magnitude. Adding 1 to its last bit carries into the top exponent bit, which makes a float16
  // NaN.
  const uint32_t nan = magnitude + 0x00800080u & 0x40004000u;
  return magnitude | nan | (x & 0x80008000u);
}
__device__ __forceinline__ uint32_t half_of_high_bytes(uint32_t x) {
  const uint32_t small = small_half_of_high_bytes(x);
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&small), __float2half2_rn(256.f));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// float16 of bytes 0 and 1, and of bytes 2 and 3, of a word.
__device__ __forceinline__ TwoPairs halves_of_neighbours(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  TwoPairs halves;
  ptx::halves_of_e4m3x4(x, &halves.first, &halves.second);
  return halves;
#else
  return {half_of_high_bytes(ptx::permute_bytes(x, 0, 0x1404)), half_of_high_bytes(ptx::permute_bytes(x, 0, 0x3424))};
#endif
}
// Operands of products, which are multiplied by kOperandUnit afterwards: as float16, elements divided by that.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr float kOperandUnit = 1;
#else
constexpr float kOperandUnit = 256;
#endif
// Bytes 0 and 2, and bytes 1 and 3, as operands.
__device__ __forceinline__ TwoPairs operands_of_alternates(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return halves_of_neighbours(ptx::permute_bytes(x, 0, 0x3120));
#else
  return {small_half_of_high_bytes(x << 8), small_half_of_high_bytes(x)};
#endif
}
// All four bytes as operands. kNeighbours: the pairs are bytes 0 and 1, and bytes 2 and 3; otherwise 0 and 2, and 1
// and 3, which take fewer instructions where they are made by bit arithmetic.
struct AnyPairs {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  static constexpr bool kNeighbours = true;
  static __device__ __forceinline__ TwoPairs operands(uint32_t x) { return halves_of_neighbours(x); }
#else
  static constexpr bool kNeighbours = false;
  static __device__ __forceinline__ TwoPairs operands(uint32_t x) { return operands_of_alternates(x); }
#endif
};
// bfloat16 of bytes 0 and 1, and of bytes 2 and 3.
__device__ __forceinline__ TwoPairs bfloats_of_neighbours(uint32_t x) {
  const auto narrower = [](uint32_t pair) {
    const float2 wide = TensorCore<__half>::unpack(pair);
    return TensorCore<__nv_bfloat16>::pack(wide.x, wide.y);
  };
  const TwoPairs halves = halves_of_neighbours(x);
  return {narrower(halves.first), narrower(halves.second)};
}

__device__ __forceinline__ float widen(Float8 x) {
  return TensorCore<__half>::unpack(halves_of_neighbours(x.bits).first).x;
}
// Rounds to nearest even, and numbers above the largest one, 448, to that one.
__device__ __forceinline__ void narrow(float x, Float8* to) {
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t byte;
  if (magnitude > 0x7F800000u) {
    byte = 0x7F;
  } else if (magnitude >= __float_as_uint(448.f)) {
    byte = 0x7E;
  } else if (magnitude < __float_as_uint(0x1p-6f)) {
    // The smallest normal number is 2^-6. The last bit of 2^14 + |x| is 2^-9, the unit of smaller numbers.
    byte = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - __float_as_uint(0x1p14f);
  } else {
    constexpr uint32_t kBias = 120u << 23;  // the difference of both exponents' biases
    byte = (magnitude - kBias + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20;
  }
  to->bits = static_cast<uint8_t>(sign | byte);
}

// Eight elements as bfloat16. from: any address; `count` of them exist, the others become zero.
__device__ __forceinline__ uint4 widen_vector(const Float8* from, int count) {
  uint32_t words[2] = {};
  if (count >= 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    words[0] = both.x, words[1] = both.y;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e < count) words[e / 4] |= static_cast<uint32_t>(from[e].bits) << e % 4 * 8;
    }
  }
  const TwoPairs low = bfloats_of_neighbours(words[0]), high = bfloats_of_neighbours(words[1]);
  return make_uint4(low.first, low.second, high.first, high.second);
}

}  // namespace flashattn_ext
