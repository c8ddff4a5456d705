// The biases of one tile of scores (bias.h), in the layout of the scores, S^T[key][query], and in units of log2.
//
// ALiBi and the relative bias depend only on the distance of key and query. Along a key's row of S^T the distance falls
// by one from query to query, so that one array of distances, read from a place that depends on the key, holds them for
// the whole tile. A bias of any shape is transposed.
#pragma once

#include "../bias.h"
#include "pack.h"
#include "tiles.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Where a tile is. shift: the position of query 0 among the keys (BasicMask::first_position).
struct TilePlace {
  int64_t row0, rows, key0, keys, shift;
};

// The diagonals of a tile: number `diagonal(key, lane)` holds the scores of one distance.
template <class Real>
struct Diagonals {
  static constexpr int64_t kCount = Tile<Real>::kQueries + Tile<Real>::kKeys;

  static int64_t diagonal(int64_t key, int64_t lane) { return lane - key + Tile<Real>::kKeys; }
  // The distance (bias.h) of diagonal `number`.
  static int64_t distance(const TilePlace& place, int64_t number) {
    return place.key0 - place.row0 - place.shift + Tile<Real>::kKeys - number;
  }
};

// What a forward sums up for the centres of rows (bias.h).
template <class Op>
class CentreSums {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  static constexpr int64_t kQueries = Tile<Real>::kQueries, kCount = Diagonals<Real>::kCount;

 public:
  CentreSums(const AttnParams& p, ScratchCarver* carve)
      : any(p.centres.data),
        sums(carve->take<Real>(any ? kCentres * kQueries : 0)),
        terms_(carve->take<Real>(any ? kCentres * kCount : 0)) {}

  // For a tile of which add() is called.
  void load(const HeadBias<Real>& head, const TilePlace& place) const {
    for (int64_t n = 0; any && n < kCount; ++n) {
      const int64_t distance = Diagonals<Real>::distance(place, n);
      const bool below = head.relative && distance <= -head.reach, above = head.relative && distance >= head.reach;
      terms_[kDistance * kCount + n] = static_cast<Real>(distance < 0 ? -distance : distance);
      terms_[kBelow * kCount + n] = below ? Real(1) : Real(0);
      terms_[kAbove * kCount + n] = above && !below ? Real(1) : Real(0);
    }
  }
  // Adds the weights of one key, for the queries from `lane` on, to the sums of this tile.
  void add(V (&tile_sums)[kCentres], int64_t key, int64_t lane, V weights) const {
    for (int c = 0; any && c < kCentres; ++c) {
      const V term = S::load(terms_ + c * kCount + Diagonals<Real>::diagonal(key, lane));
      tile_sums[c] = S::fma(weights, term, tile_sums[c]);
    }
  }
  // After all keys of a tile. rescale: what is to be multiplied to the sums of earlier tiles.
  void end_tile(const V (&tile_sums)[kCentres], int64_t lane, V rescale) const {
    for (int c = 0; any && c < kCentres; ++c) {
      Real* const sum = sums + c * kQueries + lane;
      S::store(sum, S::fma(S::load(sum), rescale, tile_sums[c]));
    }
  }

  const bool any;
  Real* const sums;  // [kCentres][kQueries], relative to the maximum of the row as its weights are

 private:
  Real* const terms_;  // [kCentres][kCount]: what weights are multiplied by
};

// Calls body(element) with a value of the type that elements of a dtype have in memory.
template <class Body>
inline void for_element_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Float16{});
    case DType::kBFloat16:
      return body(BFloat16{});
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat64:
      return body(double{});
  }
}

template <class Op>
class BiasTile {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  using Elements = FmaOp<Real>;  // the form in which transpose_rows takes a bias
  static constexpr int64_t kQueries = Tile<Real>::kQueries, kKeys = Tile<Real>::kKeys;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  BiasTile(const AttnParams& p, ScratchCarver* carve)
      : has_diagonals_(p.alibi_slopes || p.relative_bias), has_elements_(p.bias.data), dtype_(p.bias.dtype) {
    diagonals_ = carve->take<Real>(has_diagonals_ ? Diagonals<Real>::kCount : 0);
    elements_ = carve->take<Real>(has_elements_ ? kKeys * kQueries : 0);
    rows_ = carve->take<Real>(has_elements_ ? S::kWidth * kKeys : 0);
  }

  bool any() const { return has_diagonals_ || has_elements_; }

  void load(const HeadBias<Real>& head, const TilePlace& place) const {
    if (has_diagonals_) load_diagonals(head, place);
    if (has_elements_) for_element_type(dtype_, [&](auto element) { load_elements<decltype(element)>(head, place); });
  }

  // log2(e) times the logits of one key for the queries from `lane` on, given `scaled`, what they are without biases.
  // A bias of -inf hides a score whatever that is.
  V logits(int64_t key, int64_t lane, V scaled) const {
    if (!any()) return scaled;
    V bias = has_diagonals_ ? S::load(diagonals_ + Diagonals<Real>::diagonal(key, lane)) : S::zero();
    if (has_elements_) bias = S::fma(S::load(elements_ + key * kQueries + lane), S::set1(kLog2E<Real>), bias);
    return where_hidden(bias, S::set1(-kInfinity), scaled + bias);
  }
  // `hidden` where the logit is -inf, otherwise x.
  static V where_hidden(V logit, V hidden, V x) {
    const V infinity = S::set1(-kInfinity), lowest = S::set1(std::numeric_limits<Real>::lowest());
    return S::where_in_range(logit, infinity, lowest, hidden, x);
  }

 private:
  void load_diagonals(const HeadBias<Real>& head, const TilePlace& place) const {
    for (int64_t n = 0; n < Diagonals<Real>::kCount; ++n) {
      const int64_t distance = Diagonals<Real>::distance(place, n);
      const double alibi = -static_cast<double>(head.slope) * static_cast<double>(distance < 0 ? -distance : distance);
      const double relative = head.relative ? static_cast<double>(head.relative[head.entry(distance)]) : 0;
      diagonals_[n] = static_cast<Real>((alibi + relative) * kLog2E<double>);
    }
  }

  template <class Element>
  void load_elements(const HeadBias<Real>& head, const TilePlace& place) const {
    const Element* from = static_cast<const Element*>(head.bias) + place.row0 * head.row_stride + place.key0;
    for (int64_t lane = 0; lane < place.rows; lane += S::kWidth) {
      const int64_t rows = lesser<int64_t>(S::kWidth, place.rows - lane);
      for (int64_t r = lane + rows; r < lesser(place.rows, lane + rows + S::kWidth); ++r) {
        ask_for(from + r * head.row_stride, place.keys);
      }
      for (int64_t r = 0; r < rows; ++r) {
        widen_row(rows_ + r * kKeys, from + (lane + r) * head.row_stride, place.keys);
        std::fill(rows_ + r * kKeys + place.keys, rows_ + r * kKeys + round_up(place.keys, S::kWidth), Real(0));
      }
      const StagedRows<Elements> staged{rows_, kKeys};
      transpose_rows<Elements>(elements_ + lane, kQueries, staged, rows, S::kWidth, round_up(place.keys, S::kWidth));
    }
  }

  // Rows are short and far apart, which the hardware does not foresee.
  template <class Element>
  static void ask_for(const Element* row, int64_t count) {
    constexpr int64_t kLine = 64 / sizeof(Element);
    for (int64_t n = 0; n < count; n += kLine) __builtin_prefetch(row + n);
  }

  bool has_diagonals_, has_elements_;
  DType dtype_;
  Real* diagonals_;  // [Diagonals::kCount]: log2(e) times ALiBi and the relative bias
  Real* elements_;   // [kKeys][kQueries]: the bias
  Real* rows_;       // [kWidth][kKeys]: rows of the bias before they are transposed
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
