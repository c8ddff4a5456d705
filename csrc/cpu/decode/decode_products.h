// The products of decode.h: q k^T and P v for a few rows, with keys and values read in place.
//
// The rows of a block are processed in bands of R = 1, 2, 4, ... rows, at most one row per vector lane. A vector of
// scores has R rows times C = W / R adjacent keys: lane r * C + n is row r and key n of a chunk of C keys. So
//   - a product of C units of a key with R rows takes one vector of q and one load that broadcasts the key's units
//     R times,
//   - sums over the head dim need a reduction across C lanes only,
//   - maxima and sums of weights are computed per lane, and reduced once for many keys.
// A unit is one number, or a pair of bfloat16 (gemm.h).
#pragma once

#include "cpu/vectors/pack.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

constexpr int64_t kDecodeKeys = 32;  // keys per group, the granule of the splits
constexpr int64_t kScoredKeys = 16;  // keys per score product

// Rows of the next band if `rows` rows remain: the largest power of two that fits, or the next larger one if at least
// three quarters of it are filled; at most W.
template <int W>
inline int64_t band_rows(int64_t rows) {
  int64_t band = 1;
  while (band < W && 3 * band <= 2 * rows) band *= 2;
  return band;
}
// Total rows of all bands, including the padding rows of the last band.
template <int W>
inline int64_t padded_rows(int64_t rows) {
  int64_t padded = 0;
  while (padded < rows) padded += band_rows<W>(rows - padded);
  return padded;
}
// Calls body(std::integral_constant<int, R>(), row0) for each band.
template <int R, class Body>
inline void with_band_rows(int64_t rows, int64_t row0, Body& body) {
  if constexpr (R > 1) {
    if (rows < R) return with_band_rows<R / 2>(rows, row0, body);
  }
  body(std::integral_constant<int, R>(), row0);
}
template <int W, class Body>
inline void for_bands(int64_t rows, Body body) {
  for (int64_t row0 = 0; row0 < rows;) {
    const int64_t band = band_rows<W>(rows - row0);
    with_band_rows<W>(band, row0, body);
    row0 += band;
  }
}

// Broadcasts the kBytes bytes at `from` to a whole vector.
typedef int32_t BitVector __attribute__((vector_size(kVectorBytes), may_alias));
template <int kBytes>
inline BitVector repeat_bytes(const void* from) {
  if constexpr (kBytes == kVectorBytes) {
    BitVector bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
  } else if constexpr (kBytes <= 8) {
    using Bits = std::conditional_t<kBytes == 8, uint64_t, uint32_t>;
    typedef Bits V __attribute__((vector_size(kVectorBytes)));
    Bits bits;
    std::memcpy(&bits, from, sizeof bits);
    return (BitVector)(V{} + bits);
  } else {
#if defined(FLASHATTN_ISA_AVX512)
    if constexpr (kBytes == 16) {
      return (BitVector)_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)));
    } else {
      return (BitVector)_mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
    }
#elif defined(FLASHATTN_ISA_AVX2)
    return (BitVector)_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#endif
  }
}

// Software prefetch of the rows of keys or values that are needed next: cache lines in memory order, spread evenly over
// the current work. After the last row it prefetches that row again.
template <class In>
class Ahead {
 public:
  Ahead() = default;
  // rows: row pointers of the first of `heads` heads, which are head_stride elements apart.
  Ahead(const In* const* rows, int64_t count, int64_t heads, int64_t head_stride, int64_t head_dim)
      : rows_(rows), end_(rows + count), heads_(heads), head_stride_(head_stride), row_bytes_(head_dim * sizeof(In)) {
    if (!any()) return;
    at_ = reinterpret_cast<const char*>(*rows_);
    end_of_row_ = at_ + row_bytes_;
  }

  // Whether rows are left to prefetch.
  bool any() const { return rows_ != end_; }
  // Prefetches the next kBytes bytes.
  template <int kBytes>
  void ask() {
    FLASHATTN_UNROLL(8)
    for (int n = 0; n < (kBytes + 63) / 64; ++n) {
      // Clang 14 without optimisation crashes where the two calls are operands of a conditional expression.
      if (to_l2_) {
        __builtin_prefetch(at_, 0, 2);
      } else {
        __builtin_prefetch(at_);
      }
      at_ += kBytes < 64 ? kBytes : 64;
      if (at_ >= end_of_row_) next_row();
    }
  }
  void ask_for_rest() {
    while (any()) ask<64>();
  }

 private:
  // Whether lines are prefetched to the L2 cache only. On Intel's cores, with 16 buffers for lines that the L1 cache
  // misses, decoding reads 1.05 to 1.2 times as fast; on AMD's 0.9 times.
  static bool prefers_l2() {
#if defined(__x86_64__)
    static const bool is_intel = __builtin_cpu_is("intel");
    return is_intel;
#else
    return false;
#endif
  }

  // Rows form one stream: the offset beyond the end of a row becomes the offset in the next row.
  void next_row() {
    const int64_t beyond = at_ - end_of_row_;
    if (++head_ >= heads_) {
      if (rows_ == end_ || ++rows_ == end_) {
        at_ -= row_bytes_;
        return;
      }
      head_ = 0;
    }
    at_ = reinterpret_cast<const char*>(*rows_ + head_ * head_stride_) + beyond;
    end_of_row_ = at_ - beyond + row_bytes_;
  }

  const char* at_ = nullptr;
  const char* end_of_row_ = nullptr;
  const In* const* rows_ = nullptr;
  const In* const* end_ = nullptr;
  int64_t heads_ = 0, head_stride_ = 0, row_bytes_ = 0, head_ = 0;
  bool to_l2_ = prefers_l2();
};

// Score products of the rows of a band with keys.
template <class In, class Op, int R>
class BandProduct {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using Units = typename Op::Units;
  using S = Simd<Real>;
  using V = typename S::V;
  static constexpr int W = S::kWidth, C = W / R;
  // Keys of a narrower type are widened one vector at a time: with broadcast units each key would be widened R times.
  static constexpr bool kRepeatsKeys = std::is_same<In, typename Op::Element>::value;
  static constexpr int kKeys = 8;                             // keys per register tile with broadcast units
  static constexpr int kChains = kVectorBytes == 64 ? 2 : 1;  // accumulators per key, to hide the FMA latency

 public:
  // Stores a row in the layout of the products: [units / C][R][C] with broadcast key units, else [R][units].
  static void place_row(Unit* to, int64_t r, const Unit* row, int64_t units) {
    if constexpr (kRepeatsKeys) {
      for (int64_t u = 0; u < units; u += C) std::memcpy(to + u * R + r * C, row + u, C * sizeof(Unit));
    } else {
      std::memcpy(to + r * units, row, units * sizeof(Unit));
    }
  }

  // Computes the scores of kScoredKeys keys. `finish` maps a vector of products to scores. ahead: prefetch, or null.
  template <class Finish>
  static void scores(Real* to, const Unit* q, int64_t units, const In* const* keys, Ahead<In>* ahead, Finish finish) {
    constexpr int kTogether = !kRepeatsKeys || C > kKeys ? C : kKeys;
    static_assert(kScoredKeys % kTogether == 0, "whole register tiles");
    for (int64_t j = 0; j < kScoredKeys; j += kTogether) {
      if constexpr (kRepeatsKeys) {
        V x[kTogether];
        FLASHATTN_UNROLL(2)
        for (int n = 0; n < kTogether; n += kKeys) repeated_keys(x + n, q, units, keys + j + n, ahead);
        FLASHATTN_UNROLL(8)
        for (int n = 0; n < kTogether; n += C) S::store(to + (j + n) * R, finish(sums_of_lanes<C>(x + n)));
      } else {
        V x[W];
        widened_keys(x, q, units, keys + j, ahead);
        S::store(to + j * R, finish(sums_of_lanes<W>(x)));
      }
    }
  }

  // The maximum of each group of C adjacent lanes, broadcast to the group.
  static V max_of_rows(V x) {
    using Lanes = std::make_integer_sequence<int, W>;
    const auto fold = [&x](auto half) {
      constexpr int H = decltype(half)::value;
      if constexpr (H > 0 && H < C) {
        const auto a = (typename T::V)(x);
        x = S::max((V)(T::template low<H>(a, a, Lanes())), (V)(T::template high<H>(a, a, Lanes())));
      }
    };
    fold(std::integral_constant<int, 8>());
    fold(std::integral_constant<int, 4>());
    fold(std::integral_constant<int, 2>());
    fold(std::integral_constant<int, 1>());
    return x;
  }

 private:
  using T = Transpose<std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>>;

  // to[n] = partial products with key n of kKeys keys, still to be summed across C lanes.
  static void repeated_keys(V* to, const Unit* q, int64_t units, const In* const* keys, Ahead<In>* ahead) {
    constexpr int kPack = Op::kPack;
    const In* k[kKeys];
    V sums[kKeys][kChains];
    FLASHATTN_UNROLL(8)
    for (int n = 0; n < kKeys; ++n) {
      k[n] = keys[n];
      FLASHATTN_UNROLL(2)
      for (int chain = 0; chain < kChains; ++chain) sums[n][chain] = S::zero();
    }
    const auto steps = [&](int64_t u, auto chains) __attribute__((always_inline)) {
      constexpr int N = decltype(chains)::value;
      if (ahead) ahead->template ask<N * kKeys * C * kPack* static_cast<int>(sizeof(In))>();
      Units q_vector[N];
      FLASHATTN_UNROLL(2)
      for (int chain = 0; chain < N; ++chain) q_vector[chain] = Op::load_units(q + (u + chain * C) * R);
      FLASHATTN_UNROLL(8)
      for (int n = 0; n < kKeys; ++n) {
        FLASHATTN_UNROLL(2)
        for (int chain = 0; chain < N; ++chain) {
          const In* const from = k[n] + (u + chain * C) * kPack;
          sums[n][chain] =
              Op::multiply_add(sums[n][chain], q_vector[chain], (Units)repeat_bytes<C * sizeof(Unit)>(from));
        }
      }
    };
    int64_t u = 0;
    for (; u + kChains * C <= units; u += kChains * C) steps(u, std::integral_constant<int, kChains>());
    if (u < units) steps(u, std::integral_constant<int, 1>());
    FLASHATTN_UNROLL(8)
    for (int n = 0; n < kKeys; ++n) {
      to[n] = sums[n][0];
      if constexpr (kChains == 2) to[n] = to[n] + sums[n][1];
    }
  }

  // to[r * C + n] = partial products of row r and key n of C keys, still to be summed across all lanes.
  static void widened_keys(V* to, const Unit* q, int64_t units, const In* const* keys, Ahead<In>* ahead) {
    const In* k[C];
    V sums[W];
    FLASHATTN_UNROLL(16)
    for (int n = 0; n < C; ++n) k[n] = keys[n];
    FLASHATTN_UNROLL(16)
    for (int n = 0; n < W; ++n) sums[n] = S::zero();
    for (int64_t u = 0; u < units; u += W) {
      if (ahead) ahead->template ask<C * W* static_cast<int>(sizeof(In))>();
      V wide[C];
      FLASHATTN_UNROLL(16)
      for (int n = 0; n < C; ++n) wide[n] = WideVector<Real, In>::load(k[n] + u);
      FLASHATTN_UNROLL(16)
      for (int r = 0; r < R; ++r) {
        const V q_vector = Op::load_units(q + r * units + u);
        FLASHATTN_UNROLL(16)
        for (int n = 0; n < C; ++n) sums[r * C + n] = S::fma(q_vector, wide[n], sums[r * C + n]);
      }
    }
    FLASHATTN_UNROLL(16)
    for (int n = 0; n < W; ++n) to[n] = sums[n];
  }

  // Lane l of the result is the sum over the aligned group of kLanes lanes that contains l of x[l % kLanes].
  template <int kLanes>
  static V sums_of_lanes(V* x) {
    using Lanes = std::make_integer_sequence<int, W>;
    const auto fold = [x](auto half) __attribute__((always_inline)) {
      constexpr int H = decltype(half)::value;
      if constexpr (H > 0 && H < kLanes) {
        FLASHATTN_UNROLL(16)
        for (int n = 0; n < H; ++n) {
          const auto a = (typename T::V)(x[n]), b = (typename T::V)(x[n + H]);
          x[n] = (V)(T::template low<H>(a, b, Lanes())) + (V)(T::template high<H>(a, b, Lanes()));
        }
      }
    };
    fold(std::integral_constant<int, 8>());
    fold(std::integral_constant<int, 4>());
    fold(std::integral_constant<int, 2>());
    fold(std::integral_constant<int, 1>());
    return x[0];
  }
};

// out += weights * v for a band and kDecodeKeys keys. With pairs of bfloat16 (dot_bf16.h) a unit has the weights of two
// adjacent keys, rounded as in forward.h.
template <class In, class Op, int R>
struct BandValues {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using Units = typename Op::Units;
  using S = Simd<Real>;
  using V = typename S::V;
  static constexpr int W = S::kWidth, C = W / R, kPack = Op::kPack;
  static constexpr int kRows = R < 8 ? R : kVectorBytes == 64 ? 8 : 4;
  static constexpr int kVectors = kVectorBytes == 64 || kPack == 2 ? (kRows == 8 ? 2 : kRows == 4 ? 4 : 8) : 8 / kRows;
  static constexpr int kUnits = C > kPack ? C / kPack : 1;  // units of a row's weights that are adjacent

  // Stores the weights of chunks 2 * n and 2 * n + 1 in the layout of `add`, [keys / (kPack * kUnits)][R][kUnits]. Does
  // nothing for units of one weight: the score vectors have that layout.
  static void store_weights([[maybe_unused]] Unit* to, [[maybe_unused]] int64_t n, [[maybe_unused]] V even,
                            [[maybe_unused]] V odd) {
    if constexpr (kPack == 2) Op::store_units(to + n * W, C > 1 ? Op::narrow(even, odd) : Op::pairs(even, odd));
  }

  // weights: the score vectors; pairs: what store_weights() has stored.
  FLASHATTN_SHARED static void add(Real* out, int64_t columns, [[maybe_unused]] const Real* weights,
                                   [[maybe_unused]] const Unit* pairs, const In* const* v, Ahead<In>* ahead) {
    const Unit* units;
    if constexpr (kPack == 2) {
      units = pairs;
    } else {
      units = weights;
    }
    for (int64_t row = 0; row < R; row += kRows) {
      int64_t d = 0;
      for (; d + kVectors * W <= columns; d += kVectors * W) {
        add_columns<kVectors>(out + row * columns + d, columns, units + row * kUnits, v, d, row == 0 ? ahead : nullptr);
      }
      for (; d < columns; d += kPack * W)
        add_columns<kPack>(out + row * columns + d, columns, units + row * kUnits, v, d, row == 0 ? ahead : nullptr);
    }
  }

 private:
  // N vectors of columns from d on.
  template <int N>
  static void add_columns(Real* out, int64_t columns, const Unit* weights, const In* const* v, int64_t d,
                          Ahead<In>* ahead) {
    V sums[kRows][N];
    FLASHATTN_UNROLL(8)
    for (int m = 0; m < kRows; ++m) {
      FLASHATTN_UNROLL(8)
      for (int n = 0; n < N; ++n) sums[m][n] = S::load(out + m * columns + n * W);
    }
    for (int64_t chunk = 0; chunk < kDecodeKeys / kPack / kUnits; ++chunk) {
      FLASHATTN_UNROLL(1)
      for (int j = 0; j < kUnits; ++j) {
        const In* const* const rows = v + kPack * (chunk * kUnits + j);
        const In* const row = rows[0] + d;
        if (ahead) ahead->template ask<kPack * N * W* static_cast<int>(sizeof(In))>();
        Units values[N];
        FLASHATTN_UNROLL(8)
        for (int n = 0; n < N; n += kPack) {
          if constexpr (kPack == 2) {
            const Units a = Op::load_units(reinterpret_cast<const Unit*>(row + n * W));
            const Units b = Op::load_units(reinterpret_cast<const Unit*>(rows[1] + d + n * W));
            values[n] = Op::first_pairs(a, b);
            values[n + 1] = Op::second_pairs(a, b);
          } else {
            values[n] = WideVector<Real, In>::load(row + n * W);
          }
        }
        FLASHATTN_UNROLL(8)
        for (int m = 0; m < kRows; ++m) {
          const Units weight = Op::broadcast(weights + (chunk * R + m) * kUnits + j);
          FLASHATTN_UNROLL(8)
          for (int n = 0; n < N; ++n) sums[m][n] = Op::multiply_add(sums[m][n], weight, values[n]);
        }
      }
    }
    FLASHATTN_UNROLL(8)
    for (int m = 0; m < kRows; ++m) {
      FLASHATTN_UNROLL(8)
      for (int n = 0; n < N; ++n) S::store(out + m * columns + n * W, sums[m][n]);
    }
  }
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
