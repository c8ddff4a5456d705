// Products of bfloat16 with fp32 sums, where the instruction set has them: VDPBF16PS on x86-64, BFDOT and BFMMLA on
// Arm.
#pragma once

#include "cpu/vectors/convert.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

#if defined(FLASHATTN_ISA_BF16)
// A unit is a pair of bfloat16 at adjacent k: two products per lane.
struct Bf16DotOp {
  using Real = float;
  using Unit = uint32_t;
  using Element = BFloat16;
  static constexpr int kPack = 2;
  using S = Simd<float>;
  using V = typename S::V;
  // p may point into a tensor of bfloat16, which is aligned to 2 bytes.
  static Unit unit_at(const Unit* p) {
    Unit unit;
    std::memcpy(&unit, p, sizeof unit);
    return unit;
  }
#if defined(FLASHATTN_ISA_AVX512)
  static constexpr int kStep = 2;
  using Units = __m512i;
  static Units load_units(const Unit* p) { return _mm512_loadu_si512(p); }
  static void store_units(Unit* p, Units x) { _mm512_storeu_si512(p, x); }
  static Units broadcast(const Unit* p) { return _mm512_set1_epi32(static_cast<int32_t>(unit_at(p))); }
  static V multiply_add(V acc, Units a, Units b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  // Rounds two vectors to nearest even: the elements of `low`, then those of `high`.
  static Units narrow(V low, V high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }
  // Lane l is the pair (even[l], odd[l]).
  static Units pairs(V even, V odd) {
    alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                             21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                             11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = narrow(even, odd);
    return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves);
  }
  // Pairs of the elements of two rows: of the first half of the vectors, and of the second.
  static Units first_pairs(Units a, Units b) {
    alignas(64) static constexpr uint16_t kFirst[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return _mm512_permutex2var_epi16(a, _mm512_load_si512(kFirst), b);
  }
  static Units second_pairs(Units a, Units b) {
    alignas(64) static constexpr uint16_t kSecond[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21,
                                                         53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58,
                                                         27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    return _mm512_permutex2var_epi16(a, _mm512_load_si512(kSecond), b);
  }
  // Stores a vector of units of each of kStep rows, row(n), as a row of a panel (row_panels in pack.h).
  template <class Row>
  static void store_rows(Unit* to, Row row) {
    const Units a = row(0), b = row(1);
    store_units(to, first_pairs(a, b));
    store_units(to + 16, second_pairs(a, b));
  }
#else
  static constexpr int kStep = 4;  // elements along k of a BFMMLA
  using Units = uint32x4_t;
  static Units load_units(const Unit* p) {
    return vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  }
  static void store_units(Unit* p, Units x) { vst1q_u32(p, x); }
  static Units broadcast(const Unit* p) { return vdupq_n_u32(unit_at(p)); }
  // BFDOT adds two products to a lane as BFMMLA does, which the architecture defines as two BFDOT: the bits are equal.
  static V multiply_add(V acc, Units a, Units b) {
    return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
  }
  // acc: lanes l and l + 1 of a row, then of the next row. a: 4 elements of each row; b: 4 elements of each lane.
  static V multiply_add_matrix(V acc, Units a, Units b) {
    return vbfmmlaq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
  }
  static Units narrow(V low, V high) {
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
  }
  static Units pairs(V even, V odd) {
    const uint16x8_t halves = vreinterpretq_u16_u32(narrow(even, odd));
    return vreinterpretq_u32_u16(vzip1q_u16(halves, vextq_u16(halves, halves, 4)));
  }
  static Units first_pairs(Units a, Units b) {
    return vreinterpretq_u32_u16(vzip1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  static Units second_pairs(Units a, Units b) {
    return vreinterpretq_u32_u16(vzip2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  // Interleaves the units of the first halves of a and b; of the second halves.
  static Units first_units(Units a, Units b) { return vzip1q_u32(a, b); }
  static Units second_units(Units a, Units b) { return vzip2q_u32(a, b); }
  // The first half of a and that of b; the second halves.
  static Units low_halves(Units a, Units b) {
    return vreinterpretq_u32_u64(vzip1q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
  }
  static Units high_halves(Units a, Units b) {
    return vreinterpretq_u32_u64(vzip2q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
  }
  // Stores a vector of units of each of kStep rows, row(n), as two rows of a panel (row_panels in pack.h).
  template <class Row>
  static void store_rows(Unit* to, Row row) {
    const Units first = first_pairs(row(0), row(1)), second = second_pairs(row(0), row(1));
    const Units next_first = first_pairs(row(2), row(3)), next_second = second_pairs(row(2), row(3));
    store_units(to, first_units(first, next_first));
    store_units(to + 4, second_units(first, next_first));
    store_units(to + 8, first_units(second, next_second));
    store_units(to + 12, second_units(second, next_second));
  }
#endif
};
#endif

// Units along k that one instruction of the matrix product reads. Above 1 the instruction multiplies pairs of rows with
// pairs of lanes (BFMMLA), and both operands have layouts of their own (pack.h): two units of a row or lane are
// adjacent, then the same two of the next.
template <class Op>
constexpr int kUnitsOfStep = Op::kStep / Op::kPack;
template <class Op>
constexpr bool kPairsRows = kUnitsOfStep<Op> > 1;

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
