// The matrix product under every stage: C[rows, lanes] = init + sum_k A(row, k) * B[k, lanes].
//
// A is read and broadcast one element at a time, so it may be the caller's tensor with any row stride; B is read in
// whole vectors, panel by panel (Panels). Sizes are in units of 4 or 8 bytes: a unit is one float or double, or a
// pair of bfloat16 at adjacent k (Bf16DotOp). BFMMLA reads vectors of both operands (matrix_tile).
#pragma once

#include "cpu/vectors/dot_bf16.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// acc += broadcast(*a) * b
template <class T>
struct FmaOp {
  using Real = T;
  using Unit = T;
  static constexpr int kPack = 1;  // matrix elements along k in one unit
  static constexpr int kStep = 1;  // and in one instruction
  using Element = T;               // of rows that a product reads (pack.h)
  using S = Simd<T>;
  using V = typename S::V;
  using Units = V;
  static V load_units(const Unit* p) { return S::load(p); }
  static V broadcast(const Unit* p) { return S::set1(*p); }
  static V multiply_add(V acc, V a, V b) { return S::fma(a, b, acc); }
};

// Rows and vectors of the register tile: as many accumulators as fit beside one row of B and a broadcast.
#if defined(FLASHATTN_ISA_AVX512) || defined(__aarch64__)
constexpr int kTileRows = 8;
#elif defined(FLASHATTN_ISA_AVX2)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;

// A panel is the lanes that one register tile holds.
template <class Op>
constexpr int64_t kPanel = kTileVectors * Op::S::kWidth;

// A B operand: element (k, lane) is at lane / kPanel * panel + k * stride + lane % kPanel. Rows of a tensor are read in
// place or from a copy in panels of stride kPanel (pack.h).
template <class Op>
struct Panels {
  const typename Op::Unit* data;
  int64_t stride, panel;

  const typename Op::Unit* at(int64_t lane, int64_t k) const { return data + lane / kPanel<Op> * panel + k * stride; }
};

// C starts as 0, C, or row_scale[row] * C. kAdd adds a sum that starts as 0 to C.
enum class Init { kZero, kAccumulate, kScale, kAdd };
enum class Order { kRowMajor, kKMajor };  // A(row, k) at a[row * stride + k] or at a[k * stride + row]

template <class Op>
struct Gemm {
  const typename Op::Unit* a;
  int64_t a_stride;
  Panels<Op> b;
  typename Op::Real* c;  // [rows][c_stride]
  int64_t c_stride;
  const typename Op::Real* row_scale = nullptr;  // [rows], for Init::kScale
};

#if defined(FLASHATTN_ISA_NEON) && defined(FLASHATTN_ISA_BF16)
// gemm_tile() with BFMMLA: 2 x 2 sums in a vector, two units along k in a step. A unit after an odd k_end is
// multiplied, too: it is 0 in one of the operands, and finite in the other.
template <class Op, Order kOrder, Init kInit, int kRows, int kVectors>
inline void matrix_tile(const Gemm<Op>& g, int64_t row, int64_t lane, int64_t k_begin, int64_t k_end) {
  using S = typename Op::S;
  using V = typename Op::V;
  constexpr int W = S::kWidth, kRowPairs = (kRows + 1) / 2, kLanePairs = 2 * kVectors;
  V acc[kRowPairs][kLanePairs];
  typename Op::Real* const c = g.c + row * g.c_stride + lane;
  // Two lanes of a row, and of the next; and back.
  const auto first = [](V a, V b) { return (V)(Op::low_halves((typename Op::Units)(a), (typename Op::Units)(b))); };
  const auto second = [](V a, V b) { return (V)(Op::high_halves((typename Op::Units)(a), (typename Op::Units)(b))); };
  const auto initial = [&](int r, int n) {
    if (kInit == Init::kZero || kInit == Init::kAdd || r >= kRows) return S::zero();
    const V x = S::load(c + r * g.c_stride + n * W);
    return kInit == Init::kScale ? V(x * S::set1(g.row_scale[row + r])) : x;
  };
  FLASHATTN_UNROLL(4)
  for (int r = 0; r < kRowPairs; ++r) {
    FLASHATTN_UNROLL(2)
    for (int n = 0; n < kVectors; ++n) {
      const V upper = initial(2 * r, n), lower = initial(2 * r + 1, n);
      acc[r][2 * n] = first(upper, lower);
      acc[r][2 * n + 1] = second(upper, lower);
    }
  }
  const typename Op::Unit* b = g.b.at(lane, k_begin);
  const typename Op::Unit* a = g.a + row * g.a_stride + 2 * k_begin;
  if constexpr (kOrder == Order::kKMajor) a = g.a + (k_begin + row % 4 / 2) * g.a_stride + row / 4 * 4;
  for (int64_t k = k_begin; k < k_end; k += 2) {
    typename Op::Units b_vector[kLanePairs];
    FLASHATTN_UNROLL(4)
    for (int n = 0; n < kLanePairs; ++n) b_vector[n] = Op::load_units(b + n * W);
    FLASHATTN_UNROLL(4)
    for (int r = 0; r < kRowPairs; ++r) {
      const auto a_vector =
          Op::load_units(kOrder == Order::kRowMajor ? a + 2 * r * g.a_stride : a + r % 2 * g.a_stride + r / 2 * 4);
      FLASHATTN_UNROLL(4)
      for (int n = 0; n < kLanePairs; ++n) acc[r][n] = Op::multiply_add_matrix(acc[r][n], a_vector, b_vector[n]);
    }
    b += 2 * g.b.stride;
    a += kOrder == Order::kRowMajor ? 4 : 2 * g.a_stride;
  }
  FLASHATTN_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    FLASHATTN_UNROLL(2)
    for (int n = 0; n < kVectors; ++n) {
      V* const sums = acc[r / 2] + 2 * n;
      V sum = r % 2 ? second(sums[0], sums[1]) : first(sums[0], sums[1]);
      if constexpr (kInit == Init::kAdd) sum = S::load(c + r * g.c_stride + n * W) + sum;
      S::store(c + r * g.c_stride + n * W, sum);
    }
  }
}
#endif

// One register tile: rows [row, row + kRows), kVectors vectors from `lane`, k in [k_begin, k_end).
template <class Op, Order kOrder, Init kInit, int kRows, int kVectors>
inline void gemm_tile(const Gemm<Op>& g, int64_t row, int64_t lane, int64_t k_begin, int64_t k_end) {
#if defined(FLASHATTN_ISA_NEON) && defined(FLASHATTN_ISA_BF16)
  if constexpr (kPairsRows<Op>) return matrix_tile<Op, kOrder, kInit, kRows, kVectors>(g, row, lane, k_begin, k_end);
#endif
  using S = typename Op::S;
  constexpr int W = S::kWidth;
  typename Op::V acc[kRows][kVectors];
  typename Op::Real* c = g.c + row * g.c_stride + lane;
  FLASHATTN_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    FLASHATTN_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      if constexpr (kInit == Init::kZero || kInit == Init::kAdd) acc[r][n] = S::zero();
      if constexpr (kInit == Init::kAccumulate) acc[r][n] = S::load(c + r * g.c_stride + n * W);
      if constexpr (kInit == Init::kScale) {
        acc[r][n] = S::load(c + r * g.c_stride + n * W) * S::set1(g.row_scale[row + r]);
      }
    }
  }
  const typename Op::Unit* b = g.b.at(lane, k_begin);
  const typename Op::Unit* a = kOrder == Order::kRowMajor ? g.a + row * g.a_stride : g.a + k_begin * g.a_stride + row;
  for (int64_t k = k_begin; k < k_end; ++k) {
    typename Op::Units b_vector[kVectors];
    FLASHATTN_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) b_vector[n] = Op::load_units(b + n * W);
    FLASHATTN_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      const auto a_vector = Op::broadcast(kOrder == Order::kRowMajor ? a + r * g.a_stride + k : a + r);
      FLASHATTN_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) acc[r][n] = Op::multiply_add(acc[r][n], a_vector, b_vector[n]);
    }
    b += g.b.stride;
    if constexpr (kOrder == Order::kKMajor) a += g.a_stride;
  }
  FLASHATTN_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    FLASHATTN_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      if constexpr (kInit == Init::kAdd) acc[r][n] = S::load(c + r * g.c_stride + n * W) + acc[r][n];
      S::store(c + r * g.c_stride + n * W, acc[r][n]);
    }
  }
}

// kRows rows and all lanes of [lane_begin, lane_end), whole vectors.
template <class Op, Order kOrder, Init kInit, int kRows>
inline void gemm_rows(const Gemm<Op>& g, int64_t row, IndexRange lanes, IndexRange k) {
  constexpr int W = Op::S::kWidth;
  int64_t lane = lanes.begin;
  for (; lane + kTileVectors * W <= lanes.end; lane += kTileVectors * W) {
    gemm_tile<Op, kOrder, kInit, kRows, kTileVectors>(g, row, lane, k.begin, k.end);
  }
  if (lane < lanes.end) gemm_tile<Op, kOrder, kInit, kRows, 1>(g, row, lane, k.begin, k.end);
}

// Rows [rows.begin, rows.end); k_of(first_row, last_row) names the range of k that these rows need, so that a
// triangular product costs half of a square one. Rows whose range is empty still get their initial value.
template <Order kOrder, Init kInit, class Op, class KRange>
FLASHATTN_SHARED void gemm(const Gemm<Op>& g, IndexRange rows, IndexRange lanes, KRange k_of) {
  static_assert(kTileRows <= 8, "the remainder below is at most 7 rows");
  int64_t row = rows.begin;
  for (; row + kTileRows <= rows.end; row += kTileRows) {
    gemm_rows<Op, kOrder, kInit, kTileRows>(g, row, lanes, k_of(row, row + kTileRows));
  }
  if (row == rows.end) return;
  const IndexRange k = k_of(row, rows.end);
  if (row + 4 <= rows.end) {
    gemm_rows<Op, kOrder, kInit, 4>(g, row, lanes, k);
    row += 4;
  }
  if (row + 2 <= rows.end) {
    gemm_rows<Op, kOrder, kInit, 2>(g, row, lanes, k);
    row += 2;
  }
  if (row < rows.end) gemm_rows<Op, kOrder, kInit, 1>(g, row, lanes, k);
}

// Units in one sum of score_product(): 32 KB of a panel of B, at most 256.
constexpr int64_t kFittingUnits = 32 * 1024 / (kTileVectors * kVectorBytes);
constexpr int64_t kSumUnits = kFittingUnits < 256 ? kFittingUnits : 256;

// C = init + A * B over all units of a row, for the lanes of one panel; kInit is kZero or kAdd. Every group of rows
// reads the whole panel of B, which is twice the L1 cache at head_dim 512: so the units are blocked into ranges of
// kSumUnits. Each range has a sum of its own, because the rounding error of one sum grows in proportion to its length.
template <Init kInit = Init::kZero, class Op>
FLASHATTN_SHARED void score_product(const Gemm<Op>& g, IndexRange rows, IndexRange lanes, int64_t units) {
  for (int64_t begin = 0; begin < units; begin += kSumUnits) {
    const auto k_of = [k = IndexRange{begin, lesser(begin + kSumUnits, units)}](int64_t, int64_t) { return k; };
    if (kInit == Init::kZero && begin == 0) {
      gemm<Order::kRowMajor, Init::kZero>(g, rows, lanes, k_of);
    } else {
      gemm<Order::kRowMajor, Init::kAdd>(g, rows, lanes, k_of);
    }
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
