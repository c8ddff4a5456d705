// Element types of the tensors and their conversion to and from the compute type.
#pragma once

#include "cpu/vectors/simd.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// e4m3fn. Every value is exact in BFloat16.
struct Float8 {
  uint8_t bits;
};
constexpr float kLargestFloat8 = 448;

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);  // inf, NaN
  // Shifting the fields into place leaves the exponent 112 too small; an exact multiplication corrects it, also for
  // denormals.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

inline float widen(Float8 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7Fu;
  if (magnitude == 0x7Fu) return bits_float(sign | 0x7FC00000u);  // NaN
  // The smallest normal number is 8 units of 2^-9. Of larger ones the exponent's bias grows from 7 to 127.
  const float size =
      magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : bits_float((magnitude << 20) + (120u << 23));
  return bits_float(sign | float_bits(size));
}

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(double x, double* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {
  const uint32_t bits = float_bits(x);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
  to->bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}
inline void narrow(float x, Float16* to) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;  // NaN
  } else if (magnitude >= 0x477FF000u) {
    half = 0x7C00u;  // rounds to infinity
  } else if (magnitude < 0x38800000u) {
    // Denormal: adding 0.5 aligns the last bit of the result with the last bit of the sum, which rounds to nearest
    // even.
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}
// Rounds to nearest even and clamps to the largest values; NaN stays NaN.
inline void narrow(float x, Float8* to) {
  const uint32_t bits = float_bits(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t byte;
  if (magnitude > 0x7F800000u) {
    byte = 0x7Fu;
  } else if (magnitude >= float_bits(kLargestFloat8)) {
    byte = 0x7Eu;
  } else if (magnitude < 0x3C800000u) {
    // Below 2^-6, the smallest normal number: the last bit of 2^14 + |x| is 2^-9.
    byte = float_bits(bits_float(magnitude) + 0x1p14f) - float_bits(0x1p14f);
  } else {
    byte = (magnitude - (120u << 23) + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
  }
  to->bits = static_cast<uint8_t>(sign | byte);
}

// Narrows one vector, bit-identical to narrow().
inline void narrow_vector(const float* from, BFloat16* to) {
  typedef uint32_t Wide __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
  Wide bits;
  std::memcpy(&bits, from, sizeof bits);
  const Wide rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  const Wide result = (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded;
  const Half half = __builtin_convertvector(result, Half);
  std::memcpy(static_cast<void*>(to), &half, sizeof half);
}

// Elements in a vector of BFloat16.
constexpr int64_t kHalves = kVectorBytes / 2;
// Widens kHalves elements, exactly.
#if defined(FLASHATTN_ISA_AVX512)
inline void widen_vector(BFloat16* to, const Float8* from) {
  // NaN, 0, and the numbers of 1 to 7 units of 2^-9, whose exponents are -9, -8 and -7.
  alignas(64) static constexpr uint16_t kSpecial[32] = {0x7FC0, 0,      0x3B00, 0x3B80, 0x3BC0,
                                                        0x3C00, 0x3C20, 0x3C40, 0x3C60};
  const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0x7F0));
  const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(0x3C00));
  const __m512i place = _mm512_and_si512(_mm512_add_epi16(x, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7F));
  const __mmask32 is_special = _mm512_cmplt_epu16_mask(place, _mm512_set1_epi16(9));
  const __m512i size = _mm512_mask_permutexvar_epi16(normal, is_special, place, _mm512_load_si512(kSpecial));
  // (x & sign) | size
  _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(x, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), size, 0xEA));
}
#elif defined(FLASHATTN_ISA_AVX2)
inline void widen_vector(BFloat16* to, const Float8* from) {
  // 0 and the numbers of 1 to 7 units of 2^-9, whose exponents are -9, -8 and -7: their low bytes, then the high ones.
  const __m256i small =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, static_cast<char>(0x80), static_cast<char>(0xC0), 0, 0x20, 0x40,
                                                0x60, 0, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C, 0x3C, 0x3C));
  const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7F));
  const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(0x3C00));
  const __m256i place =
      _mm256_add_epi16(_mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x101)), _mm256_set1_epi16(0x800));
  const __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
  const __m256i size = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(small, place), is_small);
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_and_si256(x, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m256i nan = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(_mm256_or_si256(size, sign), nan));
}
#else
inline void widen_vector(BFloat16* to, const Float8* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 2)));
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const Halves x = __builtin_convertvector(bytes, Halves), magnitude = x & 0x7Fu;
  // As in widen(); a number of 1 to 7 units of 2^-9 has an exponent of -9, -8 or -7.
  const Halves units = magnitude >= 4   ? 0x3B80u + (magnitude << 5)
                       : magnitude >= 2 ? 0x3B00u + (magnitude << 6)
                                        : magnitude * 0x3B00u;
  const Halves size = magnitude < 8 ? units : (magnitude << 4) + 0x3C00u;
  const Halves nan = Halves{} + 0x7FC0u;
  const Halves half = ((x & 0x80u) << 8) | (magnitude == 0x7F ? nan : size);
  std::memcpy(static_cast<void*>(to), &half, sizeof half);
}
#endif
inline void widen_row(BFloat16* to, const Float8* from, int64_t n) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) widen_vector(to + i, from + i);
  for (; i < n; ++i) narrow(widen(from[i]), to + i);
}

// Loads one vector of elements, widened to the compute type.
template <class Real, class In>
struct WideVector {
  using S = Simd<Real>;
  static constexpr bool kIsFast = false;
  static typename S::V load(const In* from) {
    alignas(64) Real lanes[S::kWidth];
    FLASHATTN_UNROLL(16)
    for (int l = 0; l < S::kWidth; ++l) lanes[l] = widen(from[l]);
    return S::load(lanes);
  }
};
template <class Real>
struct WideVector<Real, Real> {
  static constexpr bool kIsFast = true;
  static typename Simd<Real>::V load(const Real* from) { return Simd<Real>::load(from); }
};
template <>
struct WideVector<float, Float8> {
  static constexpr bool kIsFast = true;
  static typename Simd<float>::V load(const Float8* from) {
    typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
    typedef uint32_t Wide __attribute__((vector_size(kVectorBytes)));
    typedef int32_t Signed __attribute__((vector_size(kVectorBytes)));
    typedef float Reals __attribute__((vector_size(kVectorBytes)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const Wide x = __builtin_convertvector(bytes, Wide), magnitude = x & 0x7Fu;
    const Wide units = (Wide)(__builtin_convertvector((Signed)magnitude, Reals) * 0x1p-9f);
    const Wide size = magnitude < 8 ? units : (magnitude << 20) + (120u << 23);
    const Wide nan = Wide{} + 0x7FC00000u;
    return (Simd<float>::V)(((x & 0x80u) << 24) | (magnitude == 0x7F ? nan : size));
  }
};
#if defined(FLASHATTN_ISA_AVX512)
template <>
struct WideVector<float, BFloat16> {
  static constexpr bool kIsFast = true;
  static __m512 load(const BFloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
};
template <>
struct WideVector<float, Float16> {
  static constexpr bool kIsFast = true;
  static __m512 load(const Float16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
};
#elif defined(FLASHATTN_ISA_AVX2)
template <>
struct WideVector<float, BFloat16> {
  static constexpr bool kIsFast = true;
  static __m256 load(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
};
template <>
struct WideVector<float, Float16> {
  static constexpr bool kIsFast = true;
  static __m256 load(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
};
#elif defined(FLASHATTN_ISA_NEON)
template <>
struct WideVector<float, BFloat16> {
  static constexpr bool kIsFast = true;
  static float32x4_t load(const BFloat16* from) {
    const uint16x8_t bits = vcombine_u16(vld1_u16(&from->bits), vdup_n_u16(0));
    return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), bits));  // one instruction; SHLL runs on fewer pipes
  }
};
template <>
struct WideVector<float, Float16> {
  static constexpr bool kIsFast = true;
  static float32x4_t load(const Float16* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }
};
#endif

// Widens whole vectors if the instruction set can convert them; returns the number of converted elements.
template <class Real, class In>
inline int64_t widen_vectors(Real* to, const In* from, int64_t n) {
  constexpr int W = Simd<Real>::kWidth;
  int64_t i = 0;
  if constexpr (WideVector<Real, In>::kIsFast) {
    for (; i + W <= n; i += W) Simd<Real>::store(to + i, WideVector<Real, In>::load(from + i));
  }
  return i;
}
#if defined(FLASHATTN_ISA_AVX512)
inline void narrow_vector(const float* from, Float16* to) {
  const __m256i half = _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
}
#elif defined(FLASHATTN_ISA_AVX2)
inline void narrow_vector(const float* from, Float16* to) {
  const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
}
#elif defined(FLASHATTN_ISA_NEON)
inline void narrow_vector(const float* from, Float16* to) {
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from))));
}
#endif

// Narrows whole vectors to the types that kNarrows names; returns the number of converted elements.
template <class To, class From>
inline int64_t narrow_vectors([[maybe_unused]] To* to, [[maybe_unused]] const From* from, [[maybe_unused]] int64_t n) {
  int64_t i = 0;
#if defined(FLASHATTN_ISA_NEON)
  constexpr bool kNarrows = std::is_same<To, Float16>::value || std::is_same<To, BFloat16>::value;
#else
  constexpr bool kNarrows = std::is_same<To, Float16>::value && kVectorBytes > 16;
#endif
  if constexpr (kNarrows) {
    for (; i + kFloatLanes <= n; i += kFloatLanes) narrow_vector(from + i, to + i);
  }
  return i;
}

template <class Real, class In>
FLASHATTN_SHARED void widen_row(Real* to, const In* from, int64_t n) {
  for (int64_t i = widen_vectors(to, from, n); i < n; ++i) to[i] = widen(from[i]);
}
// to = from, widened where its type is wider.
template <class To, class From>
inline void copy_row(To* to, const From* from, int64_t n) {
  if constexpr (std::is_same<To, From>::value) {
    std::memcpy(static_cast<void*>(to), from, n * sizeof(To));
  } else {
    widen_row(to, from, n);
  }
}
// to = narrow(scale * from); scales `from` in place on the way. A zero becomes positive: its sign says whether padding
// was added to it, which differs between the kernels of an invariant call.
template <class Real, class In>
FLASHATTN_SHARED void narrow_row(In* to, Real* from, int64_t n, Real scale) {
  for (int64_t i = 0; i < n; ++i) from[i] = from[i] * scale + Real(0);
  for (int64_t i = narrow_vectors(to, from, n); i < n; ++i) narrow(from[i], to + i);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
