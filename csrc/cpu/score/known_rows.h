// The statistics of the rows of a query tile that the derivatives of a forward know before they see its keys.
#pragma once

#include "cpu/vectors/tiles.h"
#include "rules/lse_words.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The known log-sum-exp of the rows of a query tile (lse_words.h), [queries] each.
template <class Real>
struct KnownLse {
  KnownLse(const TileSize& size, ScratchCarver* carve)
      : top(carve->take<Real>(size.queries)),
        large_top(carve->take<Real>(size.queries)),
        log2_sum(carve->take<Real>(size.queries)) {}

  // Before the rows of a tile. plain: of a call with PlainProducts (score.h).
  void begin(bool plain) {
    plain_ = plain;
    rounds = narrows = false;
  }
  void set(int64_t i, const LseWords<Real>& words) {
    const bool large = plain_ && rounds_products(words.top) && !words.is_of_no_key();
    top[i] = large ? Real(0) : words.top;
    large_top[i] = large ? words.top : Real(0);
    log2_sum[i] = words.log2_sum;
    rounds = rounds || large;
    const Real size = words.top < 0 ? -words.top : words.top;
    narrows = narrows || (size > kNarrowsFrom<Real> && size < kLargest<Real>);
  }

  Real* top;
  Real* large_top;  // top of rows that round their products (score.h), whose `top` is 0; 0 for the others
  Real* log2_sum;
  bool rounds = false;   // whether any row does: its stored scores then need subtract_rounded()
  bool narrows = false;  // whether the log-sum-exp of any row is among those that narrowed() changes

 private:
  bool plain_ = true;
};

// Row statistics of a query tile in the backward, [queries] each.
template <class Real>
struct KnownRows {
  KnownRows(const TileSize& size, ScratchCarver* carve)
      : lse(size, carve),
        delta(carve->take<Real>(size.queries)),
        dlse(carve->take<Real>(size.queries)),
        sink_weight(carve->take<Real>(size.queries)),
        error(carve->take<Real>(size.queries)) {}

  KnownLse<Real> lse;
  Real *delta, *dlse;  // times GradientScales::delta
  Real* sink_weight;   // 0 without a sink
  Real* error;         // weight_error()

  // Normalises the recomputed weights of the rows from `lane` on, with that of the sink, by their sum. sums: of the
  // weights of the keys. Returns the factors of sums that used the weights before; later weights are normalised
  // themselves, but for errors that are negligible beside the rounding of 16-bit weights. The factor is 0, and the
  // weights stay, where the caller passed the log-sum-exp of a call with more keys.
  template <class S>
  FLASHATTN_SHARED typename S::V normalise(int64_t lane, typename S::V sums) const {
    constexpr Real kNegligible = Real(1) / (1 << 14);
    alignas(64) Real of_row[S::kWidth], factors[S::kWidth];
    S::store(of_row, sums + S::load(sink_weight + lane));
    bool moves = false;
    for (int l = 0; l < S::kWidth; ++l) {
      const Real off = of_row[l] < 1 ? 1 - of_row[l] : of_row[l] - 1;
      factors[l] = off < error[lane + l] ? 1 / of_row[l] : Real(0);
      moves |= off > kNegligible;
    }
    for (int l = 0; moves && l < S::kWidth; ++l) {
      if (factors[l] > 0) lse.log2_sum[lane + l] += std::log2(of_row[l]);
    }
    return S::load(factors);
  }
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
