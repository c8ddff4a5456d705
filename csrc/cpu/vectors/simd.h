// Simd<T>: the vector operations that the CPU kernels are written in, for the instruction set of the including file
// (inst/*.cpp). Simd<float> uses intrinsics where the set has them; Simd<double> and the generic set use the compiler's
// own vectors, which become SSE, AVX, AVX-512 or NEON instructions as the target allows.
//
// Every name lives in the namespace of one instruction set, so that no function compiled for a newer CPU can be linked
// into the path of an older one.
#pragma once

namespace flashattn_ext {
namespace FLASHATTN_ISA {

#if defined(__clang__)
#define FLASHATTN_UNROLL(n) _Pragma(FLASHATTN_STRINGIFY(clang loop unroll_count(n)))
#else
#define FLASHATTN_UNROLL(n) _Pragma(FLASHATTN_STRINGIFY(GCC unroll n))
#endif
// For functions of a row or more, whose calls cost nothing beside their work: not inlined, they are compiled once for
// all kernels and element types that call them with the same arguments.
#define FLASHATTN_SHARED __attribute__((noinline))
#define FLASHATTN_STRINGIFY(x) #x
#define FLASHATTN_STRINGIFY_NAME(x) FLASHATTN_STRINGIFY(x)

template <class T>
inline T lesser(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T greater(T a, T b) {
  return a < b ? b : a;
}
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// 2^f on [-0.5, 0.5]: minimax in relative error with 2^0 exact, fitted by reweighted least squares at Chebyshev nodes.
struct Exp2Full {  // relative error 1.6e-7: fp32 inputs
  static constexpr int kDegree = 5;
  static constexpr float kCoefficients[] = {1.0f,          0.693146978f,   0.240222421f,
                                            0.0555073374f, 0.00967151264f, 0.00132647272f};
};
struct Exp2Half {  // relative error 2.9e-6: 16-bit inputs
  static constexpr int kDegree = 4;
  static constexpr float kCoefficients[] = {1.0f, 0.693124193f, 0.240240986f, 0.0559064246f, 0.00958285309f};
};

// Below this, 2^x is 0, also for -inf: the power of two that this integer part stands for has the bits of 0.
constexpr float kExp2Floor = -127.0f;

#if defined(FLASHATTN_ISA_AVX512)
constexpr int kVectorBytes = 64;
#elif defined(FLASHATTN_ISA_AVX2)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int64_t kFloatLanes = kVectorBytes / sizeof(float);

// Instances of a kernel by what its tile has: 4, with and without masked scores and with and without dropout; 2, one
// for tiles with neither and one for all others; or 1 for all tiles, which tests each for both. Beside the std::exp2 of
// each score in fp64 a test takes no time, and the generic set exists to run, not to be fast.
#if defined(FLASHATTN_ISA_GENERIC)
template <class Real>
constexpr int kTileInstances = 1;
#else
template <class Real>
constexpr int kTileInstances = std::is_same<Real, double>::value ? 2 : 4;
#endif

template <class T>
struct GenericSimd {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  typedef T V __attribute__((vector_size(kVectorBytes), may_alias));
  typedef T UnalignedV __attribute__((vector_size(kVectorBytes), may_alias, aligned(alignof(T))));
  static V load(const T* p) { return *reinterpret_cast<const UnalignedV*>(p); }
  static void store(T* p, V x) { *reinterpret_cast<UnalignedV*>(p) = x; }
  static V set1(T x) { return x - V{}; }  // V{} + x would add: it makes +0 of -0
  static V zero() { return V{}; }
  static V fma(V a, V b, V c) { return a * b + c; }
  // Return b if either operand is NaN, like the x86 instructions.
  static V max(V a, V b) { return a > b ? a : b; }
  static V min(V a, V b) { return a < b ? a : b; }
  static V where_in_range(V index, V begin, V end, V x, V otherwise) {
    return ((index >= begin) & (index < end)) ? x : otherwise;
  }
  static V where_less(V a, V b, V x, V otherwise) { return a < b ? x : otherwise; }
  // x in lane l where bit l is set, `otherwise` elsewhere.
  static V where_bits(uint32_t bits, V x, V otherwise) {
    using Lane = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    typedef Lane I __attribute__((vector_size(kVectorBytes)));
    I lane{};
    FLASHATTN_UNROLL(16)
    for (int l = 0; l < kWidth; ++l) lane[l] = Lane{1} << l;
    return ((static_cast<Lane>(bits) - I{}) & lane) != 0 ? x : otherwise;
  }
  // Keeps lane l where bit l is set, zero elsewhere.
  static V keep(V x, uint32_t bits) {
    FLASHATTN_UNROLL(16)
    for (int l = 0; l < kWidth; ++l) x[l] = (bits >> l) & 1 ? x[l] : T(0);
    return x;
  }
  template <class Accuracy>
  static V exp2(V x) {
    FLASHATTN_UNROLL(16)
    for (int l = 0; l < kWidth; ++l) x[l] = std::exp2(x[l]);
    return x;
  }
};

template <class T>
struct Simd : GenericSimd<T> {};

// A product that has been rounded: the compiler may not fuse its multiplication with a later addition.
template <class V>
inline V unfused(V product) {
#if defined(__x86_64__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

#if defined(FLASHATTN_ISA_AVX512)

template <>
struct Simd<float> : GenericSimd<float> {
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V where_in_range(V index, V begin, V end, V x, V otherwise) {
    const __mmask16 inside = _mm512_cmp_ps_mask(index, begin, _CMP_GE_OQ) & _mm512_cmp_ps_mask(index, end, _CMP_LT_OQ);
    return _mm512_mask_mov_ps(otherwise, inside, x);
  }
  static V where_less(V a, V b, V x, V otherwise) {
    return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
  }
  static V where_bits(uint32_t bits, V x, V otherwise) {
    return _mm512_mask_mov_ps(otherwise, static_cast<__mmask16>(bits), x);
  }
  // Relative error 2^-27: an estimate and one Newton step.
  static V reciprocal(V x) {
    const V estimate = _mm512_rcp14_ps(x);
    return fma(estimate, fma(zero() - x, estimate, set1(1.0f)), estimate);
  }
  static V keep(V x, uint32_t bits) { return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), x); }
  template <class Accuracy>
  static V exp2(V x) {
    const __mmask16 above_floor = _mm512_cmp_ps_mask(x, set1(kExp2Floor), _CMP_NLE_UQ);  // true for NaN
    const V n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const V f = _mm512_sub_ps(x, n);
    V p = set1(Accuracy::kCoefficients[Accuracy::kDegree]);
    FLASHATTN_UNROLL(8)
    for (int k = Accuracy::kDegree - 1; k >= 0; --k) p = fma(p, f, set1(Accuracy::kCoefficients[k]));
    return _mm512_maskz_scalef_ps(above_floor, p, n);
  }
};

#elif defined(FLASHATTN_ISA_AVX2)

template <>
struct Simd<float> : GenericSimd<float> {
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V where_in_range(V index, V begin, V end, V x, V otherwise) {
    const V inside = _mm256_and_ps(_mm256_cmp_ps(index, begin, _CMP_GE_OQ), _mm256_cmp_ps(index, end, _CMP_LT_OQ));
    return _mm256_blendv_ps(otherwise, x, inside);
  }
  static V where_less(V a, V b, V x, V otherwise) {
    return _mm256_blendv_ps(otherwise, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static V where_bits(uint32_t bits, V x, V otherwise) { return _mm256_blendv_ps(otherwise, x, lanes_of(bits)); }
  static V reciprocal(V x) { return set1(1.0f) / x; }
  static V keep(V x, uint32_t bits) { return _mm256_and_ps(x, lanes_of(bits)); }
  static V lanes_of(uint32_t bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane));
  }
  template <class Accuracy>
  static V exp2(V x) {
    x = max(set1(kExp2Floor), x);
    const V n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const V f = _mm256_sub_ps(x, n);
    V p = set1(Accuracy::kCoefficients[Accuracy::kDegree]);
    FLASHATTN_UNROLL(8)
    for (int k = Accuracy::kDegree - 1; k >= 0; --k) p = fma(p, f, set1(Accuracy::kCoefficients[k]));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
  }
};

#else

template <>
struct Simd<float> : GenericSimd<float> {
  typedef int32_t I __attribute__((vector_size(kVectorBytes)));
#if defined(FLASHATTN_ISA_NEON)
  static V max(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static V min(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static V where_in_range(V index, V begin, V end, V x, V otherwise) {
    return vbslq_f32(vandq_u32(vcgeq_f32(index, begin), vcltq_f32(index, end)), x, otherwise);
  }
  static V where_less(V a, V b, V x, V otherwise) { return vbslq_f32(vcltq_f32(a, b), x, otherwise); }
  static V where_bits(uint32_t bits, V x, V otherwise) { return vbslq_f32(lanes_of(bits), x, otherwise); }
  static V keep(V x, uint32_t bits) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), lanes_of(bits)));
  }
  static uint32x4_t lanes_of(uint32_t bits) {
    alignas(16) static constexpr uint32_t kLanes[4] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(bits), vld1q_u32(kLanes));
  }
#endif
  static V reciprocal(V x) { return set1(1.0f) / x; }
  template <class Accuracy>
  static V exp2(V x) {
    x = max(set1(kExp2Floor), x);
    const V magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    const V shifted = x + magic;
    const V f = x - (shifted - magic);
    V p = set1(Accuracy::kCoefficients[Accuracy::kDegree]);
    FLASHATTN_UNROLL(8)
    for (int k = Accuracy::kDegree - 1; k >= 0; --k) p = fma(p, f, set1(Accuracy::kCoefficients[k]));
    const I exponent = (reinterpret_cast<I>(shifted) - (reinterpret_cast<I>(magic) - 127)) << 23;
    return p * reinterpret_cast<V>(exponent);
  }
};

#endif

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
