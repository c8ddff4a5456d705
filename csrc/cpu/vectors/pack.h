// Packs tiles of the input tensors into the layouts that gemm.h reads.
//
// stage_rows: rows that can be read in whole vectors of units. In place if the tensor already has that layout;
//   otherwise a widened or padded copy in scratch memory (fp8 inputs, 16-bit inputs of a float product, head dims that
//   end inside a vector).
// transposed_panels: [units][rows] from staged rows, the B operand of Q K^T and dO V^T.
// row_panels: the B operand of products along rows: the staged rows, in place unless they are far apart; for bfloat16,
//   interleaved pairs of rows.
// PanelForms: the layouts of a panel's weights or dS as A operands.
#pragma once

#include "cpu/vectors/convert.h"
#include "cpu/vectors/gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class Op>
struct StagedElement {
  using Type = typename Op::Real;
};
#if defined(FLASHATTN_ISA_AVX512_BF16)
template <>
struct StagedElement<Bf16DotOp> {
  using Type = BFloat16;
};
#endif

// Rows that a product can read: padded_units(head_dim) units each, zero beyond the head dim; stride in units.
template <class Op>
struct StagedRows {
  const typename Op::Unit* data;
  int64_t stride;
};

template <class Op>
inline int64_t padded_units(int64_t head_dim) {
  return round_up(ceil_div(head_dim, Op::kPack), Op::S::kWidth);
}

inline void copy_row(float* to, const float* from, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
inline void copy_row(double* to, const double* from, int64_t n) { std::memcpy(to, from, n * sizeof(double)); }
inline void copy_row(BFloat16* to, const BFloat16* from, int64_t n) { std::memcpy(to, from, n * sizeof(BFloat16)); }
inline void copy_row(float* to, const BFloat16* from, int64_t n) { widen_row(to, from, n); }
inline void copy_row(float* to, const Float16* from, int64_t n) { widen_row(to, from, n); }
inline void copy_row(float* to, const Float8* from, int64_t n) { widen_row(to, from, n); }
inline void copy_row(BFloat16* to, const Float8* from, int64_t n) { widen_row(to, from, n); }

template <class Op, class In>
inline bool reads_in_place(int64_t head_dim, int64_t row_stride) {
  using Element = typename StagedElement<Op>::Type;
  return std::is_same<In, Element>::value && head_dim % (Op::S::kWidth * Op::kPack) == 0 && row_stride % Op::kPack == 0;
}

// scratch: [rows][padded_units(head_dim)], used only where the rows cannot be read in place.
template <class Op, class In>
FLASHATTN_SHARED StagedRows<Op> stage_rows(const In* from, int64_t row_stride, int64_t rows, int64_t head_dim,
                                           typename Op::Unit* scratch) {
  using Unit = typename Op::Unit;
  using Element = typename StagedElement<Op>::Type;
  if (reads_in_place<Op, In>(head_dim, row_stride)) {
    return {reinterpret_cast<const Unit*>(from), row_stride / Op::kPack};
  }
  const int64_t units = padded_units<Op>(head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    Element* to = reinterpret_cast<Element*>(scratch + r * units);
    copy_row(to, from + r * row_stride, head_dim);
    std::memset(static_cast<void*>(to + head_dim), 0, (units * Op::kPack - head_dim) * sizeof(Element));
  }
  return {scratch, units};
}

// In-register transposition of a kWidth x kWidth block of units in log2(kWidth) exchange rounds.
template <class Unit>
struct Transpose {
  static constexpr int W = kVectorBytes / sizeof(Unit);
  using Index = std::conditional_t<sizeof(Unit) == 8, int64_t, int32_t>;
  typedef Index V __attribute__((vector_size(kVectorBytes), may_alias));
  typedef Index UnalignedV __attribute__((vector_size(kVectorBytes), may_alias, aligned(2)));

  static V load(const Unit* p) { return *reinterpret_cast<const UnalignedV*>(p); }
  static void store(Unit* p, V x) { *reinterpret_cast<UnalignedV*>(p) = x; }

  // low: a, with lane l - H of b in every lane l that has bit H. high: b, with lane l + H of a in every lane l that
  // lacks bit H.
#if defined(__clang__)
  template <int H, int... L>
  static V low(V a, V b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, (L & H ? W + L - H : L)...);
  }
  template <int H, int... L>
  static V high(V a, V b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, (L & H ? W + L : L + H)...);
  }
#else
  template <int H, int... L>
  static V low(V a, V b, std::integer_sequence<int, L...>) {
    return __builtin_shuffle(a, b, V{(L & H ? W + L - H : L)...});
  }
  template <int H, int... L>
  static V high(V a, V b, std::integer_sequence<int, L...>) {
    return __builtin_shuffle(a, b, V{(L & H ? W + L : L + H)...});
  }
#endif

#if defined(FLASHATTN_ISA_AVX512)
  // The same as single instructions that stay within 16-byte lanes or need no index vector.
  template <int H>
  static V low16(V a, V b) {
    const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
    if constexpr (H == 4) return reinterpret_cast<V>(_mm512_mask_shuffle_i32x4(x, 0xF0F0, y, y, 0xA0));
    if constexpr (H == 2) return reinterpret_cast<V>(_mm512_unpacklo_epi64(x, y));
    if constexpr (H == 1) return reinterpret_cast<V>(_mm512_mask_shuffle_epi32(x, 0xAAAA, y, _MM_PERM_CCAA));
  }
  template <int H>
  static V high16(V a, V b) {
    const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
    if constexpr (H == 4) return reinterpret_cast<V>(_mm512_mask_shuffle_i32x4(y, 0x0F0F, x, x, 0xF5));
    if constexpr (H == 2) return reinterpret_cast<V>(_mm512_unpackhi_epi64(x, y));
    if constexpr (H == 1) return reinterpret_cast<V>(_mm512_mask_shuffle_epi32(y, 0x5555, x, _MM_PERM_DDBB));
  }
#endif

  template <int H>
  static void exchange(V* rows) {
    if constexpr (H > 0) {
      FLASHATTN_UNROLL(16)
      for (int r = 0; r < W; ++r) {
        if (r & H) continue;
        const V a = rows[r], b = rows[r + H];
#if defined(FLASHATTN_ISA_AVX512)
        if constexpr (W == 16 && H <= 4) {
          rows[r] = low16<H>(a, b);
          rows[r + H] = high16<H>(a, b);
          continue;
        }
#endif
        rows[r] = low<H>(a, b, std::make_integer_sequence<int, W>());
        rows[r + H] = high<H>(a, b, std::make_integer_sequence<int, W>());
      }
      exchange<H / 2>(rows);
    }
  }
};

// The B operand [units][lanes] of `count` rows, with zeros in the other lanes. to: units * lanes, rounded up to whole
// panels.
template <class Op>
FLASHATTN_SHARED Panels<Op> transposed_panels(typename Op::Unit* to, StagedRows<Op> rows, int64_t count, int64_t lanes,
                                              int64_t units) {
  using T = Transpose<typename Op::Unit>;
  using V = typename T::V;
  constexpr int64_t P = kPanel<Op>;
  constexpr int W = T::W;
  const int64_t size = P * units;
  for (int64_t r = 0; r < lanes; r += W) {
    typename Op::Unit* const panel = to + r / P * size + r % P;
    for (int64_t u = 0; u < units; u += W) {
      V block[W];
      FLASHATTN_UNROLL(16)
      for (int i = 0; i < W; ++i) block[i] = r + i < count ? T::load(rows.data + (r + i) * rows.stride + u) : V{};
      T::template exchange<W / 2>(block);
      FLASHATTN_UNROLL(16)
      for (int i = 0; i < W; ++i) T::store(panel + (u + i) * P, block[i]);
    }
  }
  return {to, P, size};
}

// A panel whose rows are at least this far apart and not contiguous maps to few sets of the L1 cache, and is copied.
// With 32-byte vectors half of the loads are of B (D=128, rows 4 KB apart, fp32 on an EPYC 9004: 64 GFLOP/s in place,
// 89 copied). With 64-byte vectors on an EPYC 9005 copies gave 0 to 9 % at 4 KB and more, and nothing below.
constexpr int64_t kDistantRowBytes = kVectorBytes < 64 ? 0 : 4096;

// Units of scratch memory for the panels of `count` rows.
template <class Op>
inline int64_t row_panel_units(int64_t count, int64_t units) {
  return ceil_div(count, Op::kPack) * round_up(units * Op::kPack, kPanel<Op>);
}
// The staged rows as the B operand of a product along rows. scratch: row_panel_units(count, units).
template <class Op>
FLASHATTN_SHARED Panels<Op> row_panels(StagedRows<Op> rows, int64_t count, int64_t units, typename Op::Unit* scratch) {
  using T = Transpose<typename Op::Unit>;
  constexpr int64_t P = kPanel<Op>, W = T::W;
  const bool is_distant = rows.stride * static_cast<int64_t>(sizeof(typename Op::Unit)) >= kDistantRowBytes;
  if (!is_distant || rows.stride == units) return {rows.data, rows.stride, P};
  const int64_t size = P * count;
  for (int64_t r = 0; r < count; ++r) {
    const typename Op::Unit* const from = rows.data + r * rows.stride;
    typename Op::Unit* to = scratch + r * P;
    int64_t u = 0;
    for (; u + P <= units; u += P, to += size) {
      FLASHATTN_UNROLL(4)
      for (int64_t n = 0; n < P; n += W) T::store(to + n, T::load(from + u + n));
    }
    for (; u < units; u += W, to += W) T::store(to, T::load(from + u));
  }
  return {scratch, P, size};
}
#if defined(FLASHATTN_ISA_AVX512_BF16)
// An odd last row is paired with zeros.
template <>
inline Panels<Bf16DotOp> row_panels<Bf16DotOp>(StagedRows<Bf16DotOp> rows, int64_t count, int64_t units,
                                               uint32_t* scratch) {
  constexpr int64_t P = kPanel<Bf16DotOp>;
  static_assert(P == 32, "16 units of two rows are a row of a panel");
  const int64_t size = P * ceil_div(count, 2);
  alignas(64) static constexpr uint16_t kFirst[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  alignas(64) static constexpr uint16_t kSecond[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                                       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i first = _mm512_load_si512(kFirst), second = _mm512_load_si512(kSecond);
  for (int64_t r = 0; r < count; r += 2) {
    const uint32_t* even = rows.data + r * rows.stride;
    uint32_t* to = scratch + r / 2 * P;
    for (int64_t u = 0; u < units; u += 16, to += size) {
      const __m512i a = _mm512_loadu_si512(even + u);
      const __m512i b = r + 1 < count ? _mm512_loadu_si512(even + rows.stride + u) : _mm512_setzero_si512();
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
      _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, second, b));
    }
  }
  return {scratch, P, size};
}
#endif

// The A operands made from a transposed panel [key][query]. They overwrite the fp32 rows in place.
template <class Op>
struct PanelForms {
  using Real = typename Op::Real;
  using V = typename Op::V;
  static constexpr int W = Op::S::kWidth;

  // For products along queries: one key with the row `to`, and the queries of one or two vectors from `lane` on.
  static void queries(Real* to, int64_t lane, const V* x, int vectors) {
    for (int n = 0; n < vectors; ++n) Op::S::store(to + lane + n * W, x[n]);
  }
  // For products along keys: the keys `key` and, if `odd` is given, key + 1, with rows `stride` apart.
  static void keys(Real* to, int64_t stride, int64_t key, int64_t lane, V even, const V* odd) {
    Op::S::store(to + key * stride + lane, even);
    if (odd) Op::S::store(to + (key + 1) * stride + lane, *odd);
  }
  // The same for `vectors` vectors in a row of pairs of keys. Without pairs, queries() already writes this layout.
  static void pairs(typename Op::Unit*, int64_t, const V*, const V*, int) {}
  // One element in the layout of queries() or keys().
  static Real of_query(const Real* panel, int64_t stride, int64_t key, int64_t lane) {
    return panel[key * stride + lane];
  }
  static Real of_key(const typename Op::Unit* panel, int64_t stride, int64_t key, int64_t lane) {
    return panel[key * stride + lane];
  }
};
#if defined(FLASHATTN_ISA_AVX512_BF16)
template <>
struct PanelForms<Bf16DotOp> {
  static void queries(float* to, int64_t lane, const __m512* x, int vectors) {
    uint16_t* half_row = reinterpret_cast<uint16_t*>(to);
    const __m512 second = vectors > 1 ? x[1] : _mm512_setzero_ps();
    _mm512_storeu_si512(half_row + lane, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, x[0])));
  }
  static void keys(float* to, int64_t stride, int64_t key, int64_t lane, __m512 even, const __m512* odd) {
    const __m512 second = odd ? *odd : _mm512_setzero_ps();
    pairs(reinterpret_cast<uint32_t*>(to) + key / 2 * stride, lane, &even, &second, 1);
  }
  static void pairs(uint32_t* to, int64_t lane, const __m512* even, const __m512* odd, int vectors) {
    alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                             21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                             11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    for (int n = 0; n < vectors; ++n) {
      const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd[n], even[n]));
      _mm512_storeu_si512(to + lane + n * 16, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves));
    }
  }
  static float of_query(const float* panel, int64_t stride, int64_t key, int64_t lane) {
    return widen(reinterpret_cast<const BFloat16*>(panel + key * stride)[lane]);
  }
  // For products that read one row of weights after another: `count` weights of adjacent keys as pairs of bfloat16, in
  // whole vectors of 32. `weights` is readable up to a multiple of 16.
  static void of_row(uint32_t* to, const float* weights, int64_t count) {
    for (int64_t j = 0; j < count; j += 32) {
      const __m512 first = _mm512_loadu_ps(weights + j);
      const __m512 second = j + 16 < count ? _mm512_loadu_ps(weights + j + 16) : _mm512_setzero_ps();
      _mm512_storeu_si512(to + j / 2, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
    }
  }
  static float of_key(const uint32_t* panel, int64_t stride, int64_t key, int64_t lane) {
    return widen(reinterpret_cast<const BFloat16*>(panel + key / 2 * stride + lane)[key % 2]);
  }
};
#endif

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
