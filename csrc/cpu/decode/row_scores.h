// Products of a few rows of q with keys that are read in place, each a single sum over the head dim in the order of
// score_product() (gemm.h). A block of W keys and W units is transposed in registers, so that the vector lanes are
// keys, and multiplied with every row of q before the next block is loaded.
#pragma once

#include "cpu/decode/decode_products.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op>
class RowScores {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using S = typename Op::S;
  using V = typename S::V;
  using T = Transpose<Unit>;
  using Units = typename Op::Units;
  static constexpr int W = S::kWidth;
  static constexpr int kRows = kVectorBytes == 64 ? 8 : 4;  // accumulators beside the W vectors of a block

 public:
  // to[r * to_stride + j] = <row r of q, keys[j]> for kDecodeKeys keys. q: [rows][units], units a multiple of W. rest:
  // [rows][kDecodeKeys], used where score_product() has several sums. ahead: prefetch, or null.
  FLASHATTN_SHARED static void run(Real* to, int64_t to_stride, const Unit* q, int64_t rows, int64_t units,
                                   const In* const* keys, Real* rest, Ahead<In>* ahead) {
    for (int64_t begin = 0; begin < units; begin += kSumUnits) {
      Real* const sums = begin == 0 ? to : rest;
      const int64_t stride = begin == 0 ? to_stride : kDecodeKeys, end = lesser(begin + kSumUnits, units);
      for (int64_t u = begin; u < end; u += W) {
        for (int64_t j = 0; j < kDecodeKeys; j += W) {
          add_block(sums + j, stride, q + u, rows, units, keys + j, u, u == begin, ahead);
        }
      }
      for (int64_t r = 0; begin > 0 && r < rows; ++r) {
        for (int64_t j = 0; j < kDecodeKeys; j += W) {
          Real* const sum = to + r * to_stride + j;
          S::store(sum, S::load(sum) + S::load(rest + r * kDecodeKeys + j));
        }
      }
    }
  }

 private:
  static Units units_at(const In* from) {
    if constexpr (Op::kPack == 2) {
      return Op::load_units(reinterpret_cast<const Unit*>(from));
    } else {
      return WideVector<Real, In>::load(from);
    }
  }

  // Adds the units [u, u + W) of W keys. starts: the sums are 0 before.
  static void add_block(Real* sums, int64_t stride, const Unit* q, int64_t rows, int64_t units, const In* const* keys,
                        int64_t u, bool starts, Ahead<In>* ahead) {
    if (ahead) ahead->template ask<W * W * Op::kPack* static_cast<int>(sizeof(In))>();
    typename T::V block[W];
    FLASHATTN_UNROLL(16)
    for (int i = 0; i < W; ++i) block[i] = (typename T::V)units_at(keys[i] + u * Op::kPack);
    T::template exchange<W / 2>(block);
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows)
      add_rows<kRows>(sums + r * stride, stride, q + r * units, units, block, starts);
    if constexpr (kRows > 4) {
      if (r + 4 <= rows) {
        add_rows<4>(sums + r * stride, stride, q + r * units, units, block, starts);
        r += 4;
      }
    }
    if (r + 2 <= rows) {
      add_rows<2>(sums + r * stride, stride, q + r * units, units, block, starts);
      r += 2;
    }
    if (r < rows) add_rows<1>(sums + r * stride, stride, q + r * units, units, block, starts);
  }

  template <int N>
  static void add_rows(Real* sums, int64_t stride, const Unit* q, int64_t units, const typename T::V* block,
                       bool starts) {
    V acc[N];
    FLASHATTN_UNROLL(8)
    for (int n = 0; n < N; ++n) acc[n] = starts ? S::zero() : S::load(sums + n * stride);
    FLASHATTN_UNROLL(16)
    for (int i = 0; i < W; ++i) {
      FLASHATTN_UNROLL(8)
      for (int n = 0; n < N; ++n) {
        acc[n] = Op::multiply_add(acc[n], Op::broadcast(q + n * units + i), (Units)block[i]);
      }
    }
    FLASHATTN_UNROLL(8)
    for (int n = 0; n < N; ++n) S::store(sums + n * stride, acc[n]);
  }
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
