// From the products of a tile to the operands of the gradients of second derivatives (second.h). For each score, with
// the notation of docs/derivatives.md and m = keep / p_keep:
//
//   dS = P (m dP - delta)                           B = <dout, tv>
//   E  = P ((m dP - delta) (A - tlse) + m B - r)    the gradient of the logit
//   F  = softmax_scale (slope E + curvature dS * tangent of the scaled product)
//   T  = softmax_scale * slope dS
//
// slope and curvature are the derivatives of the rule (score.h); 1 and 0 in plain calls.
#pragma once

#include "cpu/derivatives/tangent.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// What a tile holds for second derivatives besides scores and tangents. Each of F and T is an operand along queries, in
// place of dP and of the tangents' products, and along keys; for bfloat16 the latter are in `pairs`.
template <class Op>
struct SecondTile {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  SecondTile(const SecondParams& p, const TileSize& size, const GradientTile<Op>& of_walk, ScratchCarver* carve)
      : gradients(of_walk),
        value_products(carve->take<Real>(p.tangents.v.data ? size.keys * kPanel<Op> : 0)),
        tangent_pairs(carve->take<Unit>(Op::kPack == 2 && p.tangents.k.data ? size.keys / 2 * size.queries : 0)),
        has_values(p.tangents.v.data),
        softmax_scale(static_cast<Real>(p.softmax_scale)),
        inverse_keep(static_cast<Real>(1.0 / keep_probability(p.dropout_threshold))) {}

  SecondTile(const SecondTile&) = delete;  // `gradients` refers to the tile of the same scratch

  const GradientTile<Op>& gradients;  // dP^T, later F^T
  Real* value_products;               // [keys][kPanel]: <dout, tv> of one panel
  Unit* tangent_pairs;                // [keys / 2][queries]: T^T with two keys in each unit
  bool has_values;
  Real softmax_scale, inverse_keep;
};

// Row statistics of a query tile, [queries] each.
template <class Real>
struct SecondRows {
  SecondRows(const TileSize& size, ScratchCarver* carve)
      : known(size, carve), tlse(carve->take<Real>(size.queries)), r(carve->take<Real>(size.queries)) {}

  KnownRows<Real> known;  // with unscaled delta and dlse
  Real *tlse, *r;         // r: <dout, tout>
};

template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
class SecondVector : public KnownVector<Accuracy, kMasked, kDropout, Op, Rule> {
  using Known = KnownVector<Accuracy, kMasked, kDropout, Op, Rule>;
  using S = typename Op::S;
  using V = typename S::V;
  using Real = typename Op::Real;

 public:
  SecondVector() = default;
  SecondVector(const ScoreTile<Op>& tile, const TangentTile<Op>& tangents, const SecondTile<Op>& second,
               const Rule& rule, const SecondRows<Real>& rows, int64_t lane)
      : Known(tile, rule, rows.known.lse, lane),
        tangent(tangents, lane),
        has_values_(second.has_values),
        queries_(tile.queries),
        dp_(second.gradients.scores + lane),
        values_(second.value_products + lane % kPanel<Op>),
        inverse_keep_(S::set1(second.inverse_keep)),
        minus_tlse_(S::zero() - S::load(rows.tlse + lane)) {}

  // A - tlse, given the tangent of the scaled product.
  V centred(int64_t key, const Rule& rule, V product, V score) const {
    return tangent.logit(key, rule, product, score) + minus_tlse_;
  }
  // m dP and m B.
  V dp(int64_t key) const { return this->scores.kept(key, S::load(dp_ + key * queries_)) * inverse_keep_; }
  V of_values(int64_t key) const {
    if (!has_values_) return S::zero();
    return this->scores.kept(key, S::load(values_ + key * kPanel<Op>)) * inverse_keep_;
  }

  TangentVector<Op, Rule> tangent;

 private:
  bool has_values_;
  int64_t queries_;
  const Real *dp_, *values_;
  V inverse_keep_, minus_tlse_;
};

// Recomputes delta and r for one vector of rows that see no key outside of the tile, like find_delta() in scores.h.
template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
inline void find_row_sums(const ScoreTile<Op>& tile, const TangentTile<Op>& tangents, const SecondTile<Op>& second,
                          const Rule& rule, const SecondRows<typename Op::Real>& rows, int64_t lane, IndexRange keys) {
  using S = typename Op::S;
  using V = typename S::V;
  const SecondVector<Accuracy, kMasked, kDropout, Op, Rule> vector(tile, tangents, second, rule, rows, lane);
  V sum = S::zero(), r = S::zero(), dot = S::zero();
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const V score = vector.scores.load(j), exponent = vector.exponent(j, score), weight = vector.weight(j, exponent);
    const V dp = vector.dp(j), centred = vector.centred(j, rule, vector.tangent.product(j), score);
    sum = sum + weight;
    dot = dot + vector.of_visible(j, exponent, weight * dp);
    r = r + vector.of_visible(j, exponent, weight * S::fma(dp, centred, vector.of_values(j)));
  }
  const V factor = rows.known.template normalise<S>(lane, sum);
  const auto keep_exact = [&](auto* to, V exact) {
    S::store(to, S::where_less(S::zero(), factor, exact, S::load(to)));
  };
  keep_exact(rows.known.delta + lane, S::fma(dot, factor, S::zero() - S::load(rows.known.dlse + lane)));
  keep_exact(rows.r + lane, r * factor);
}

template <class Accuracy, bool kMasked, bool kDropout, int kVectors, class Op, class Rule>
inline void differentiate_twice_vectors(const ScoreTile<Op>& tile, const TangentTile<Op>& tangents,
                                        const SecondTile<Op>& second, const Rule rule,
                                        const SecondRows<typename Op::Real>& rows, int64_t lane, IndexRange keys) {
  using S = typename Op::S;
  using V = typename S::V;
  const int64_t queries = tile.queries;
  SecondVector<Accuracy, kMasked, kDropout, Op, Rule> vectors[kVectors];
  V minus_delta[kVectors], minus_r[kVectors];
  [[maybe_unused]] typename BiasGradient<Op>::Lanes bias_gradients[kVectors];
  for (int n = 0; n < kVectors; ++n) {
    const int64_t at = lane + n * S::kWidth;
    vectors[n] = {tile, tangents, second, rule, rows, at};
    minus_delta[n] = S::zero() - S::load(rows.known.delta + at);
    minus_r[n] = S::zero() - S::load(rows.r + at);
    if constexpr (kIsGeneral<Rule>) bias_gradients[n] = {second.gradients.biases, at};
  }
  const V scale = S::set1(second.softmax_scale);
  const bool has_products = tangents.has_products();
  auto one_key = [&](int64_t j, V* value_weight, V* f, V* t) __attribute__((always_inline)) {
    FLASHATTN_UNROLL(2)
    for (int n = 0; n < kVectors; ++n) {
      const auto& vector = vectors[n];
      const V score = vector.scores.load(j), exponent = vector.exponent(j, score);
      const V weight = vector.weight(j, exponent), product = vector.tangent.product(j);
      const V centred = vector.centred(j, rule, product, score), dp = vector.dp(j) + minus_delta[n];
      const V dlogit = weight * dp;
      const V e = vector.of_visible(j, exponent, weight * S::fma(dp, centred, vector.of_values(j) + minus_r[n]));
      value_weight[n] = vector.scores.kept(j, vector.of_visible(j, exponent, weight * centred));
      V dproduct = e;
      if constexpr (kIsGeneral<Rule>) {
        dproduct = rule.times_slope(e, score);
        if (rule.changes_products()) {
          dproduct = S::fma(rule.slope(score, dlogit) * rule.curvature(score), product, dproduct);
        }
        // The score and slope of a masked pair may be NaN.
        dproduct = vector.of_visible(j, exponent, dproduct);
        bias_gradients[n].add(j, e);
      }
      f[n] = dproduct * scale;
      t[n] = vector.of_visible(j, exponent, rule.times_slope(dlogit, score) * scale);
    }
  };
  for (int64_t j = keys.begin; j < keys.end; j += 2) {
    V value_weight[2][kVectors], f[2][kVectors], t[2][kVectors];
    one_key(j, value_weight[0], f[0], t[0]);
    const bool both = j + 1 < keys.end;
    if (both) one_key(j + 1, value_weight[1], f[1], t[1]);
    for (int n = 0; !both && n < kVectors; ++n) f[1][n] = t[1][n] = S::zero();
    for (int k = 0; k < (both ? 2 : 1); ++k) {
      PanelForms<Op>::queries(tile.scores + (j + k) * queries, queries, j + k, lane, value_weight[k], kVectors);
      PanelForms<Op>::queries(second.gradients.scores + (j + k) * queries, queries, j + k, lane, f[k], kVectors);
      if (has_products)
        PanelForms<Op>::queries(tangents.scores + (j + k) * queries, queries, j + k, lane, t[k], kVectors);
    }
    PanelForms<Op>::pairs(second.gradients.pairs + j / 2 * queries, queries, j, lane, f[0], f[1], kVectors);
    if (tangents.of_k)
      PanelForms<Op>::pairs(second.tangent_pairs + j / 2 * queries, queries, j, lane, t[0], t[1], kVectors);
  }
}

// Turns the products of a panel into the operands of the gradients: P m (A - tlse) without the factor 1 / p_keep in the
// score tile, F in the tile of gradients and T in the tile of tangents.
//
// whole_rows: the queries of the panel see no key of another tile. Their delta and r are then recomputed and stored in
// `rows`, because those of a 16-bit out and tout have a rounding error that dominates where few keys are visible.
template <class Accuracy, class Op, class Rule>
FLASHATTN_SHARED void differentiate_twice(const ScoreTile<Op>& tile, const TangentTile<Op>& tangents,
                                          const SecondTile<Op>& second, const Rule& rule,
                                          const SecondRows<typename Op::Real>& rows, const PanelMask<Op>& mask,
                                          bool whole_rows, IndexRange lanes, IndexRange keys) {
  static_assert(kTileVectors == 2, "a panel has one or two vectors");
  begin_known_panel(tile, rule, rows.known.lse, lanes, keys);
  with_limits(tile, mask, lanes, keys, [&](auto masked, auto dropout) {
    constexpr bool kMasked = decltype(masked)::value, kDropout = decltype(dropout)::value;
    for (int64_t lane = lanes.begin; whole_rows && lane < lanes.end; lane += Op::S::kWidth) {
      find_row_sums<Accuracy, kMasked, kDropout>(tile, tangents, second, rule, rows, lane, keys);
    }
    if (lanes.end - lanes.begin > Op::S::kWidth) {
      differentiate_twice_vectors<Accuracy, kMasked, kDropout, 2>(tile, tangents, second, rule, rows, lanes.begin,
                                                                  keys);
    } else {
      differentiate_twice_vectors<Accuracy, kMasked, kDropout, 1>(tile, tangents, second, rule, rows, lanes.begin,
                                                                  keys);
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
