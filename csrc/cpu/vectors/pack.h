// Packs tiles of the input tensors into the layouts that gemm.h reads.
//
// stage_rows: rows that can be read in whole vectors of units. In place if the tensor already has that layout;
//   otherwise a widened or padded copy in scratch memory (fp8 inputs, 16-bit inputs of a float product, head dims that
//   end inside a vector).
// transposed_panels: [units][rows] from staged rows, the B operand of Q K^T and dO V^T.
// row_panels: the B operand of products along rows: the staged rows, in place unless they are far apart; for bfloat16,
//   interleaved pairs of rows.
// product_rows: staged rows as the A operand of a product along their units: in place, except for BFMMLA.
// PanelForms: the layouts of a panel's weights or dS as A operands.
#pragma once

#include "cpu/vectors/convert.h"
#include "cpu/vectors/gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

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

template <class Op, class In>
inline bool reads_in_place(int64_t head_dim, int64_t row_stride) {
  return std::is_same<In, typename Op::Element>::value && head_dim % (Op::S::kWidth * Op::kPack) == 0 &&
         row_stride % Op::kPack == 0;
}

// scratch: [rows][padded_units(head_dim)], used only where the rows cannot be read in place.
template <class Op, class In>
FLASHATTN_SHARED StagedRows<Op> stage_rows(const In* from, int64_t row_stride, int64_t rows, int64_t head_dim,
                                           typename Op::Unit* scratch) {
  using Unit = typename Op::Unit;
  using Element = typename Op::Element;
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

// Staged rows as the A operand of a product along their units (Order::kRowMajor in gemm.h). Where the product reads
// pairs of rows, two units of a row and the same two units of the next row are adjacent: unit u of row r, both even, is
// at r * stride + 2 * u.
template <class Op>
constexpr int64_t product_row_units(int64_t rows, int64_t units) {
  return rows * units * (kPairsRows<Op> ? 2 : 1);
}
// scratch: product_row_units(rows, units); pairs of rows are at its beginning, a copy of staged rows is behind them.
template <class Op>
inline typename Op::Unit* behind_pairs(typename Op::Unit* scratch, int64_t rows, int64_t units) {
  return scratch + (kPairsRows<Op> ? round_up(rows, 2) * units : 0);
}
template <class Op>
inline StagedRows<Op> product_rows(StagedRows<Op> staged, int64_t rows, int64_t units, typename Op::Unit* scratch) {
  if constexpr (kPairsRows<Op>) {
    for (int64_t r = 0; r < rows; r += 2) {
      const auto* const upper = staged.data + r * staged.stride;
      const auto* const lower = r + 1 < rows ? upper + staged.stride : upper;
      for (int64_t u = 0; u < units; u += 4) {
        Op::store_units(scratch + r * units + 2 * u,
                        Op::low_halves(Op::load_units(upper + u), Op::load_units(lower + u)));
        Op::store_units(scratch + r * units + 2 * u + 4,
                        Op::high_halves(Op::load_units(upper + u), Op::load_units(lower + u)));
      }
    }
    return {scratch, units};
  } else {
    return staged;
  }
}
template <class Op, class In>
inline StagedRows<Op> stage_product_rows(const In* from, int64_t row_stride, int64_t rows, int64_t head_dim,
                                         typename Op::Unit* scratch) {
  const int64_t units = padded_units<Op>(head_dim);
  const StagedRows<Op> staged =
      stage_rows<Op>(from, row_stride, rows, head_dim, behind_pairs<Op>(scratch, rows, units));
  return product_rows<Op>(staged, rows, units, scratch);
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
  // low() and high() as single instructions, which stay within 16-byte lanes or need no index vector.
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
// panels. The units of a step of the product stay together.
template <class Op>
FLASHATTN_SHARED Panels<Op> transposed_panels(typename Op::Unit* to, StagedRows<Op> rows, int64_t count, int64_t lanes,
                                              int64_t units) {
  constexpr int kUnits = kUnitsOfStep<Op>;
  using Step = std::conditional_t<kUnits == 2, uint64_t, typename Op::Unit>;
  using T = Transpose<Step>;
  using V = typename T::V;
  constexpr int64_t P = kPanel<Op>;
  constexpr int W = T::W;
  const int64_t size = P * units;
  for (int64_t r = 0; r < lanes; r += W) {
    typename Op::Unit* const panel = to + r / P * size + r % P * kUnits;
    for (int64_t u = 0; u < units; u += W * kUnits) {
      V block[W];
      FLASHATTN_UNROLL(16)
      for (int i = 0; i < W; ++i) {
        block[i] = r + i < count ? T::load(reinterpret_cast<const Step*>(rows.data + (r + i) * rows.stride + u)) : V{};
      }
      T::template exchange<W / 2>(block);
      FLASHATTN_UNROLL(16)
      for (int i = 0; i < W; ++i) T::store(reinterpret_cast<Step*>(panel + (u + i * kUnits) * P), block[i]);
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
  return round_up(count, Op::kStep) / Op::kPack * round_up(units * Op::kPack, kPanel<Op>);
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
#if defined(FLASHATTN_ISA_BF16)
// Rows after the last one are zeros.
template <>
inline Panels<Bf16DotOp> row_panels<Bf16DotOp>(StagedRows<Bf16DotOp> rows, int64_t count, int64_t units,
                                               uint32_t* scratch) {
  using Op = Bf16DotOp;
  constexpr int64_t P = kPanel<Op>, W = Op::S::kWidth;
  static_assert(P == 2 * W, "a vector of units of two rows is a row of a panel");
  const int64_t size = P * (round_up(count, Op::kStep) / Op::kPack);
  for (int64_t r = 0; r < count; r += Op::kStep) {
    const uint32_t* const from = rows.data + r * rows.stride;
    uint32_t* to = scratch + r / 2 * P;
    const auto row = [&](int64_t n, int64_t u) {
      return r + n < count ? Op::load_units(from + n * rows.stride + u) : typename Op::Units{};
    };
    for (int64_t u = 0; u < units; u += W, to += size) Op::store_rows(to, [&](int64_t n) { return row(n, u); });
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

  // For products along queries: the key with the row `to`, and the queries of one or two vectors from `lane` on. Rows
  // are `stride` apart.
  static void queries(Real* to, int64_t, int64_t, int64_t lane, const V* x, int vectors) {
    for (int n = 0; n < vectors; ++n) Op::S::store(to + lane + n * W, x[n]);
  }
  // For products along keys: the keys `key`, which is even, and, if `odd` is given, key + 1. The keys of a panel come
  // in ascending order, from a multiple of kTileRows on.
  static void keys(Real* to, int64_t stride, int64_t key, int64_t lane, V even, const V* odd) {
    Op::S::store(to + key * stride + lane, even);
    if (odd) Op::S::store(to + (key + 1) * stride + lane, *odd);
  }
  // For products along pairs of keys: both keys of a pair, and the queries of `vectors` vectors; `to` is the row of
  // pairs. Does nothing for units of one element, for which queries() already writes this layout.
  static void pairs(typename Op::Unit*, int64_t, int64_t, int64_t, const V*, const V*, int) {}
  // One element in the layout of queries() or keys().
  static Real of_query(const Real* panel, int64_t stride, int64_t key, int64_t lane) {
    return panel[key * stride + lane];
  }
  static Real of_key(const typename Op::Unit* panel, int64_t stride, int64_t key, int64_t lane) {
    return panel[key * stride + lane];
  }
};
#if defined(FLASHATTN_ISA_BF16)
// For products that read one row of weights after another: `count` weights of adjacent keys as pairs of bfloat16, in
// whole vectors. `weights` is readable up to a multiple of the floats of a vector.
inline void row_of_pairs(uint32_t* to, const float* weights, int64_t count) {
  using Op = Bf16DotOp;
  constexpr int64_t W = Op::S::kWidth;
  for (int64_t j = 0; j < count; j += 2 * W) {
    const auto first = Op::S::load(weights + j);
    const auto second = j + W < count ? Op::S::load(weights + j + W) : Op::S::zero();
    Op::store_units(to + j / 2, Op::narrow(first, second));
  }
}
#endif
#if defined(FLASHATTN_ISA_BF16) && defined(FLASHATTN_ISA_AVX512)
template <>
struct PanelForms<Bf16DotOp> {
  static void queries(float* to, int64_t, int64_t, int64_t lane, const __m512* x, int vectors) {
    uint16_t* half_row = reinterpret_cast<uint16_t*>(to);
    const __m512 second = vectors > 1 ? x[1] : _mm512_setzero_ps();
    _mm512_storeu_si512(half_row + lane, Bf16DotOp::narrow(x[0], second));
  }
  static void keys(float* to, int64_t stride, int64_t key, int64_t lane, __m512 even, const __m512* odd) {
    const __m512 second = odd ? *odd : _mm512_setzero_ps();
    pairs(reinterpret_cast<uint32_t*>(to) + key / 2 * stride, stride, key, lane, &even, &second, 1);
  }
  static void pairs(uint32_t* to, int64_t, int64_t, int64_t lane, const __m512* even, const __m512* odd, int vectors) {
    for (int n = 0; n < vectors; ++n) Bf16DotOp::store_units(to + lane + n * 16, Bf16DotOp::pairs(even[n], odd[n]));
  }
  static float of_query(const float* panel, int64_t stride, int64_t key, int64_t lane) {
    return widen(reinterpret_cast<const BFloat16*>(panel + key * stride)[lane]);
  }
  static float of_key(const uint32_t* panel, int64_t stride, int64_t key, int64_t lane) {
    return widen(reinterpret_cast<const BFloat16*>(panel + key / 2 * stride + lane)[key % 2]);
  }
};
#elif defined(FLASHATTN_ISA_BF16)
// Both layouts keep a vector of queries in the place that its scores had: the next vectors are still scores.
template <>
struct PanelForms<Bf16DotOp> {
  using Op = Bf16DotOp;
  using V = typename Op::V;

  // As in product_rows(): four queries of an even key, then the same of the next key.
  static void queries(float* to, int64_t stride, int64_t key, int64_t lane, const V* x, int vectors) {
    float* const row = to - key % 2 * stride + lane + key % 2 * 2;
    const auto both = Op::narrow(x[0], x[vectors - 1]);
    std::memcpy(row, &both, 8);
    if (vectors > 1) std::memcpy(row + 4, reinterpret_cast<const char*>(&both) + 8, 8);
  }
  static void keys(float* to, int64_t stride, int64_t key, int64_t lane, V even, const V* odd) {
    const V second = odd ? *odd : Op::S::zero();
    pairs(reinterpret_cast<uint32_t*>(to) + key / 2 * stride, stride, key, lane, &even, &second, 1);
  }
  // Four keys of a query are adjacent. Of each vector, a row has the queries 0 and 1, and the next row has 2 and 3.
  static void pairs(uint32_t* to, int64_t stride, int64_t key, int64_t lane, const V* even, const V* odd, int vectors) {
    for (int n = 0; n < vectors; ++n) {
      uint32_t *const first = to - key % 4 / 2 * stride + lane + n * 4, *const second = first + stride;
      const auto units = Op::pairs(even[n], odd[n]), none = typename Op::Units{};
      if (key % 4 == 0) {  // the other two keys may be missing
        Op::store_units(first, Op::first_units(units, none));
        Op::store_units(second, Op::second_units(units, none));
      } else {
        Op::store_units(first, Op::load_units(first) | Op::first_units(none, units));
        Op::store_units(second, Op::load_units(second) | Op::second_units(none, units));
      }
    }
  }
  static float of_query(const float* panel, int64_t stride, int64_t key, int64_t lane) {
    const float* const of_lanes = panel + key / 2 * 2 * stride + lane / 4 * 4 + key % 2 * 2;
    return widen(reinterpret_cast<const BFloat16*>(of_lanes)[lane % 4]);
  }
  static float of_key(const uint32_t* panel, int64_t stride, int64_t key, int64_t lane) {
    const uint32_t* const of_keys = panel + (key / 4 * 2 + lane % 4 / 2) * stride + lane / 4 * 4 + lane % 2 * 2;
    return widen(reinterpret_cast<const BFloat16*>(of_keys)[key % 4]);
  }
};
#endif

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
