// half and bfloat16_t as the vector unit has them: storage of 16 bits, arithmetic in float, one rounding at the end.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__ARM_NEON)
// The compiler's header for Arm has a type of this name outside any namespace, and torch's headers include it.
#include <arm_neon.h>
#define bfloat16_t emulated_bfloat16_t
#endif

namespace AscendC {
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
}  // namespace AscendC

namespace ascend_emulator {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Whether the magnitude moves away from zero, given the kept bits and what lies below them (`half` = half of the last
// bit).
inline bool rounds_up(AscendC::RoundMode mode, bool negative, uint32_t kept, uint32_t rest, uint32_t half) {
  using AscendC::RoundMode;
  switch (mode) {
    case RoundMode::CAST_FLOOR:
      return negative && rest != 0;
    case RoundMode::CAST_CEIL:
      return !negative && rest != 0;
    case RoundMode::CAST_ROUND:
      return rest >= half;
    case RoundMode::CAST_TRUNC:
      return false;
    case RoundMode::CAST_ODD:
      return rest != 0 && kept % 2 == 0;
    default:  // nearest, ties to even
      return rest > half || (rest == half && kept % 2 == 1);
  }
}

// float -> a 16-bit format with `mantissa` stored bits.
inline uint16_t narrow_float(float value, int mantissa, AscendC::RoundMode mode) {
  const uint32_t bits = float_bits(value);
  const bool negative = bits >> 31;
  const uint16_t sign = negative ? 0x8000 : 0;
  const int bias = (1 << (14 - mantissa)) - 1;
  const uint32_t infinity = ((1u << (15 - mantissa)) - 1) << mantissa;
  const int exponent_field = int(bits >> 23 & 0xff);
  uint32_t fraction = bits & 0x7fffff;
  if (exponent_field == 0xff) return uint16_t(sign | infinity | (fraction ? 1u << (mantissa - 1) : 0));

  const int exponent = exponent_field ? exponent_field - 127 : -126;
  if (exponent_field) fraction |= 1u << 23;
  const int below = 1 - bias - exponent;  // > 0: the result is subnormal
  int shift = 23 - mantissa + (below > 0 ? below : 0);
  if (shift > 25) shift = 25;  // the whole value is below half of the last bit
  uint32_t kept = fraction >> shift;
  if (rounds_up(mode, negative, kept, fraction & ((1u << shift) - 1), 1u << (shift - 1))) ++kept;
  // The hidden bit of `kept` adds one to the exponent field, and so does a carry.
  uint32_t result = below > 0 ? kept : kept + (uint32_t(exponent + bias - 1) << mantissa);
  if (result >= infinity) {
    using AscendC::RoundMode;
    const bool stays = mode == RoundMode::CAST_TRUNC || mode == RoundMode::CAST_ODD ||
                       (mode == RoundMode::CAST_FLOOR && !negative) || (mode == RoundMode::CAST_CEIL && negative);
    result = stays ? infinity - 1 : infinity;
  }
  return uint16_t(sign | result);
}

inline float widen_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 0x1f) return bits_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

}  // namespace ascend_emulator

struct half {
  uint16_t bits;
  half() = default;
  half(float value) : bits(ascend_emulator::narrow_float(value, 10, AscendC::RoundMode::CAST_RINT)) {}
  operator float() const { return ascend_emulator::widen_half(bits); }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float value) : bits(ascend_emulator::narrow_float(value, 7, AscendC::RoundMode::CAST_RINT)) {}
  operator float() const { return ascend_emulator::bits_float(uint32_t(bits) << 16); }
};
