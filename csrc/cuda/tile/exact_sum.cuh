// Sums of floats in global memory that have the same bits in whatever order threads add to them: additions of integers
// are exact. A sum is a fixed-point number with a place for every bit a float can have, in words of 64 bits that are 32
// bits apart, so that 2^31 floats can be added before a word overflows.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.cuh"

namespace flashattn_ext {

struct ExactSum {
  static constexpr int kLowestBit = -149;  // the last bit of the smallest float is 2^-149
  static constexpr int kWords = 9;
  int64_t words[kWords];  // word i has the weight 2^(32 i - 149); all are zero at first

  // Adds a finite x if `wanted`, without branches.
  __device__ __forceinline__ void add_if(bool wanted, float x) {
    const uint32_t bits = __float_as_uint(x), exponent = bits >> 23 & 255;
    const uint32_t mantissa = (bits & 0x7FFFFFu) | (exponent != 0 ? 0x800000u : 0u);
    const int position = static_cast<int>(exponent != 0 ? exponent - 1 : 0);  // position of the mantissa's last bit
    int64_t value = static_cast<int64_t>(mantissa) << position % 32;
    if (bits >> 31) value = -value;
    ptx::add_if(wanted, words + position / 32, value & 0xFFFFFFFF);
    ptx::add_if(wanted, words + position / 32 + 1, value >> 32);
  }

  // The sum, rounded as a double is.
  __device__ double total() const {
    const bool negative = is_negative();
    const int64_t sign = negative ? -1 : 1;
    double total = 0;
    int64_t carry = 0;
    for (int i = 0; i < kWords; ++i) {
      const int64_t word = sign * words[i] + carry;
      total += ldexp(static_cast<double>(word & 0xFFFFFFFF), 32 * i + kLowestBit);
      carry = word >> 32;
    }
    total += ldexp(static_cast<double>(carry), 32 * kWords + kLowestBit);
    return negative ? -total : total;
  }

 private:
  __device__ bool is_negative() const {
    int64_t carry = 0;
    for (const int64_t word : words) carry = (word + carry) >> 32;
    return carry < 0;
  }
};

}  // namespace flashattn_ext
