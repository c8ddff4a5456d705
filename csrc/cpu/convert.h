// Element types of the tensors and their conversion to and from the compute type.
#pragma once

#include "simd.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

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

// Loads one vector of elements, widened to the compute type.
template <class Real, class In>
struct WideVector {
  using S = Simd<Real>;
  static constexpr bool kIsFast = false;
  static typename S::V load(const In* from) {
    alignas(64) Real lanes[S::kWidth];
    for (int l = 0; l < S::kWidth; ++l) lanes[l] = widen(from[l]);
    return S::load(lanes);
  }
};
template <class Real>
struct WideVector<Real, Real> {
  static constexpr bool kIsFast = true;
  static typename Simd<Real>::V load(const Real* from) { return Simd<Real>::load(from); }
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
inline int64_t narrow_vectors(Float16* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i half = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), half);
  }
  return i;
}
#elif defined(FLASHATTN_ISA_AVX2)
inline int64_t narrow_vectors(Float16* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  return i;
}
#endif

template <class To, class From>
inline int64_t narrow_vectors(To*, const From*, int64_t) {
  return 0;
}

template <class Real, class In>
inline void widen_row(Real* to, const In* from, int64_t n) {
  for (int64_t i = widen_vectors(to, from, n); i < n; ++i) to[i] = widen(from[i]);
}
// to = narrow(scale * from); scales `from` in place on the way.
template <class Real, class In>
inline void narrow_row(In* to, Real* from, int64_t n, Real scale) {
  for (int64_t i = 0; i < n; ++i) from[i] *= scale;
  for (int64_t i = narrow_vectors(to, from, n); i < n; ++i) narrow(from[i], to + i);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
