// The softmax between the two matrix products of a tile: `weigh` turns scores into weights (forward), `differentiate`
// turns dP into dS (backward). The rule defines a score: ScoreRule (score.h), with PlainProducts, or GeneralScore
// (score_rules.h) in calls with options of a score or biases, which the tile holds.
//
// Scores are transposed, S^T[key][query]: a vector holds the scores of one key and adjacent queries, so that row maxima
// and sums need no reduction across lanes. Both functions process one panel of queries (kPanel in gemm.h) in place and
// write the layouts that the next products read (PanelForms in pack.h).
#pragma once

#include "cpu/score/bias_gradient.h"
#include "cpu/score/keep_bits.h"
#include "cpu/score/known_rows.h"
#include "cpu/score/panel_mask.h"
#include "cpu/score/score_rules.h"
#include "cpu/vectors/pack.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The scores of one tile with their biases, mask and dropout bits.
template <class Op>
struct ScoreTile {
  using Real = typename Op::Real;

  ScoreTile(const AttnParams& p, const TileSize& size, ScratchCarver* carve)
      : queries(size.queries), biases(p, size, carve), limits(size, carve), has_dropout(p.has_dropout()) {
    scores = carve->take<Real>(size.keys * queries);
    keep_bits = carve->take<uint16_t>(has_dropout ? size.keys * queries / kWordLanes : 0);
  }

  int64_t queries;  // rows of a whole tile: the stride between the scores of two keys
  BiasTile<Op> biases;
  KeyRows limits;  // used by partially masked panels
  bool has_dropout;
  Real* scores;         // [keys][queries]: products of keys and queries, later weights
  uint16_t* keep_bits;  // [keys][queries / 16], see keep_bits.h
};

// The gradients of one tile's scores.
template <class Op>
struct GradientTile {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  GradientTile(const AttnGradParams& p, const TileSize& size, ScratchCarver* carve) : biases(p, size, carve) {
    scores = carve->take<Real>(size.keys * size.queries);
    pairs = carve->take<Unit>(Op::kPack == 2 ? size.keys / 2 * size.queries : 0);
  }

  BiasGradient<Op> biases;
  Real* scores;  // [keys][queries]: dP^T, later dS^T
  Unit* pairs;   // [keys / 2][queries]: dS^T with two keys in each unit, for bfloat16
};

// Online softmax state of the rows of a query tile, [queries] each.
template <class Op>
struct RunningRows {
  using Real = typename Op::Real;

  RunningRows(const AttnParams& p, const TileSize& size, ScratchCarver* carve)
      : max(carve->take<Real>(size.queries)),
        sum(carve->take<Real>(size.queries)),
        rescale(carve->take<Real>(size.queries)),
        largest(carve->take<Real>(p.row_maxima.data ? size.queries : 0)),
        finds_largest(p.row_maxima.data != nullptr),
        centres(p, size, carve) {}

  Real* max;      // running maximum of factor * score, the logit in units of log2
  Real* sum;      // sum of the weights, relative to the maximum
  Real* rescale;  // factor of all earlier sums after the last update of the maximum
  Real* largest;  // largest logit in units of log2; unlike `max` it excludes the sink
  bool finds_largest;
  CentreSums<Op> centres;
};

// Where the backward applies softmax_scale, the scale of dq and dk, in dS = P * (dP / p_keep - delta) * slope: to dP
// and delta, or to dS in general calls, whose bias gradients need the unscaled product.
template <class Real, class Rule>
struct GradientScales {
  explicit GradientScales(const AttnParams& p) {
    const double scale = kIsGeneral<Rule> ? 1 : p.softmax_scale;
    dp = static_cast<Real>(scale / keep_probability(p.dropout_threshold));
    delta = static_cast<Real>(scale);
    dscore = static_cast<Real>(kIsGeneral<Rule> ? p.softmax_scale : 1);
  }

  Real dp, delta, dscore;  // dp includes the factor 1 / p_keep
};

// One vector of adjacent queries of a tile, from `lane` on: the code that `weigh` and `differentiate` share.
template <class Op, bool kMasked, bool kDropout>
class ScoreVector {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;

 public:
  ScoreVector() = default;
  ScoreVector(const ScoreTile<Op>& tile, int64_t lane)
      : queries(tile.queries),
        scores(tile.scores + lane),
        keep_bits(tile.has_dropout ? tile.keep_bits : nullptr),
        seen_bits(tile.limits.bits),
        first_lane(lane) {}

  V load(int64_t key) const { return S::load(scores + key * queries); }
  void store(int64_t key, V x) const { S::store(scores + key * queries, x); }

  // x where the key is visible to the query, `hidden` elsewhere.
  V visible(int64_t key, V x, V hidden) const {
    return kMasked ? S::where_bits(lanes_of(seen_bits, key), x, hidden) : x;
  }
  // x where dropout keeps the weight, 0 where it drops it.
  V kept(int64_t key, V x) const {
    if (!kDropout || (kTileInstances<Real> < 4 && !keep_bits)) return x;
    return S::keep(x, lanes_of(keep_bits, key));
  }
  template <class Accuracy>
  V weight(int64_t key, V score, V factor, V minus_offset) const {
    return visible(key, S::template exp2<Accuracy>(S::fma(score, factor, minus_offset)), S::zero());
  }
  // log2(e) * logit, with the biases of the tile; -inf where masked.
  V logit(const typename BiasTile<Op>::Lanes& biases, int64_t key, V score, V factor) const {
    return visible(key, biases.logits(key, unfused(score * factor)), hidden_logit());
  }
  static V hidden_logit() { return S::set1(-std::numeric_limits<Real>::infinity()); }

 private:
  uint32_t lanes_of(const uint16_t* bits, int64_t key) const {
    return bits_of_lanes(bits + key * (queries / kWordLanes), first_lane);
  }

  int64_t queries;
  Real* scores;
  const uint16_t *keep_bits, *seen_bits;  // bits of a tile: keep_bits.h, KeyRows
  int64_t first_lane;
};

// Calls body(masked, dropout) with two std::bool_constant for the panel of queries `lanes` and its computed keys
// `keys`.
template <class Op, class Body>
inline void with_limits(const ScoreTile<Op>& tile, const PanelMask<Op>& mask, IndexRange lanes, IndexRange keys,
                        Body body) {
  constexpr int kInstances = kTileInstances<typename Op::Real>;
  const bool masked = !mask.panel_is_full(lanes.begin, keys);
  if constexpr (kInstances == 1) {
    body(std::true_type(), std::true_type());
  } else if ((masked && tile.has_dropout) || (kInstances == 2 && (masked || tile.has_dropout))) {
    body(std::true_type(), std::true_type());
  } else if constexpr (kInstances == 2) {
    body(std::false_type(), std::false_type());
  } else if (masked) {
    body(std::true_type(), std::false_type());
  } else if (tile.has_dropout) {
    body(std::false_type(), std::true_type());
  } else {
    body(std::false_type(), std::false_type());
  }
}

// For adjacent rows that round their products (rounds_products in score.h): replaces their stored scores x by
// (factor * x - offset) / factor, which any later product with `factor` turns into exponents relative to the offset.
// Scores of the other rows stay. scores: of the first of these rows; those of two keys are `stride` apart.
template <class S, class Real>
FLASHATTN_SHARED void subtract_rounded(Real* scores, int64_t stride, IndexRange keys, Real factor,
                                       const Real* offsets) {
  using V = typename S::V;
  const V offset = S::load(offsets), size = S::max(offset, S::zero() - offset), factors = S::set1(factor);
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const V score = S::load(scores + j * stride), relative = unfused(score * factors) - offset;
    S::store(scores + j * stride, S::where_less(size, S::set1(kRoundsProducts<Real>), score, relative / factors));
  }
}

// For adjacent rows of which some have a largest logit that narrowed() of score.h changes: replaces the logits with
// such biases, beside which a product is below the rounding error. Returns the new maxima of the rows.
template <class Op, bool kMasked, bool kDropout>
FLASHATTN_SHARED typename Op::S::V narrow_logits(const ScoreVector<Op, kMasked, kDropout> vector,
                                                 const typename BiasTile<Op>::Lanes biases, IndexRange keys) {
  using S = typename Op::S;
  using V = typename S::V;
  const V limit = S::set1(kNarrowsFrom<typename Op::Real>), hidden = vector.hidden_logit();
  V maxima = hidden;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const V bias = biases.narrowed_biases(j), size = S::max(bias, S::zero() - bias);
    const V logit = S::where_less(limit, size, vector.visible(j, bias, hidden), vector.load(j));
    vector.store(j, logit);
    maxima = S::max(maxima, logit);
  }
  return maxima;
}

template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
inline void weigh_vector(const ScoreTile<Op>& tile, const Rule rule, const RunningRows<Op>& rows, int64_t lane,
                         IndexRange keys) {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const int64_t queries = tile.queries;
  const ScoreVector<Op, kMasked, kDropout> vector(tile, lane);
  // A plain score is stored without its factor. In a general call the stored value is the logit, with factor 1.
  const V factor = S::set1(kIsGeneral<Rule> ? Real(1) : rule.factor);
  V tile_max = vector.hidden_logit();
  if constexpr (kIsGeneral<Rule>) {
    const V score_factor = S::set1(rule.factor);
    const typename BiasTile<Op>::Lanes biases(tile.biases, lane);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const V logit = vector.logit(biases, j, rule.stored(vector.load(j)), score_factor);
      vector.store(j, logit);
      tile_max = S::max(tile_max, logit);
    }
    if (tile.biases.may_narrow()) {
      alignas(64) Real maxima[S::kWidth];
      S::store(maxima, tile_max);
      bool narrows = false;
      for (int l = 0; l < S::kWidth; ++l) narrows |= maxima[l] > kNarrowsFrom<Real> || maxima[l] < -kNarrowsFrom<Real>;
      if (narrows) tile_max = narrow_logits(vector, biases, keys);
    }
  } else {
    const bool changes = rule.changes_products();
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      V score = vector.load(j);
      if (changes) {
        score = rule.stored(score);
        vector.store(j, score);
      }
      tile_max = S::max(tile_max, vector.visible(j, score, vector.hidden_logit()));
    }
  }
  const V old_max = S::load(rows.max + lane);
  const V new_max = S::max(old_max, tile_max * factor);
  if (rows.finds_largest) S::store(rows.largest + lane, S::max(S::load(rows.largest + lane), tile_max * factor));
  S::store(rows.max + lane, new_max);
  // Rows without a visible key so far have the maximum -inf, and -inf - -inf would be NaN.
  alignas(64) Real offset_lanes[S::kWidth];
  S::store(offset_lanes, new_max);
  bool rounds = false;
  for (int l = 0; l < S::kWidth; ++l) {
    offset_lanes[l] = offset_lanes[l] == -kInfinity ? Real(0) : offset_lanes[l];
    rounds |= rounds_products(offset_lanes[l]);
  }
  V offset = S::load(offset_lanes);
  const V rescale = S::template exp2<Accuracy>(old_max - offset);
  S::store(rows.rescale + lane, rescale);
  if (!kIsGeneral<Rule> && rounds) {
    subtract_rounded<S>(tile.scores + lane, queries, keys, rule.factor, offset_lanes);
    for (int l = 0; l < S::kWidth; ++l) offset_lanes[l] = rounds_products(offset_lanes[l]) ? Real(0) : offset_lanes[l];
    offset = S::load(offset_lanes);
  }
  const V minus_offset = S::zero() - offset;

  V sum = S::zero();
  [[maybe_unused]] V centres[kCentres] = {S::zero(), S::zero(), S::zero()};
  auto kept_weight = [&](int64_t j) {
    const V weight = vector.template weight<Accuracy>(j, vector.load(j), factor, minus_offset);
    sum = sum + weight;
    if constexpr (kIsGeneral<Rule>) rows.centres.add(centres, j, lane, weight);
    return vector.kept(j, weight);
  };
  int64_t j = keys.begin;
  for (; j + 2 <= keys.end; j += 2) {
    const V even = kept_weight(j), odd = kept_weight(j + 1);
    PanelForms<Op>::keys(tile.scores, queries, j, lane, even, &odd);
  }
  if (j < keys.end) PanelForms<Op>::keys(tile.scores, queries, j, lane, kept_weight(j), nullptr);
  S::store(rows.sum + lane, S::fma(S::load(rows.sum + lane), rescale, sum));
  if constexpr (kIsGeneral<Rule>) rows.centres.end_tile(centres, lane, rescale);
}

// Turns the products of a panel into weights, relative to the running maximum of each row and with dropout applied: the
// A operand of P V.
template <class Accuracy, class Op, class Rule>
FLASHATTN_SHARED void weigh(const ScoreTile<Op>& tile, const Rule& rule, const RunningRows<Op>& rows,
                            const PanelMask<Op>& mask, IndexRange lanes, IndexRange keys) {
  with_limits(tile, mask, lanes, keys, [&](auto masked, auto dropout) {
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += Op::S::kWidth) {
      weigh_vector<Accuracy, masked.value, dropout.value>(tile, rule, rows, lane, keys);
    }
  });
}

// Turns the products of a panel into stored scores. This is a separate pass: fused with the next loop, the long
// dependency chain of the tanh would leave too little instruction-level parallelism.
template <class Op, class Rule>
inline void store_scores(const ScoreTile<Op>& tile, const Rule rule, IndexRange lanes, IndexRange keys) {
  using S = typename Op::S;
  const int64_t queries = tile.queries;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += S::kWidth) {
      auto* const score = tile.scores + j * queries + lane;
      S::store(score, rule.stored(S::load(score)));
    }
  }
}

// Before the weights of a panel whose log-sum-exp is known: the stored scores, and in plain calls the rows that round
// their products.
template <class Op, class Rule>
inline void begin_known_panel(const ScoreTile<Op>& tile, const Rule& rule, const KnownLse<typename Op::Real>& lse,
                              IndexRange lanes, IndexRange keys) {
  using S = typename Op::S;
  if constexpr (kIsGeneral<Rule>) {
    if (rule.changes_products()) store_scores(tile, rule, lanes, keys);
  } else {
    for (int64_t lane = lanes.begin; lse.rounds && lane < lanes.end; lane += S::kWidth) {
      subtract_rounded<S>(tile.scores + lane, tile.queries, keys, rule.factor, lse.large_top + lane);
    }
  }
}

// One vector of queries whose log-sum-exp is known. Its panel went through begin_known_panel().
template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
class KnownVector {
  using S = typename Op::S;
  using V = typename S::V;
  using Real = typename Op::Real;

 public:
  KnownVector() = default;
  KnownVector(const ScoreTile<Op>& tile, const Rule& rule, const KnownLse<Real>& lse, int64_t lane)
      : scores(tile, lane),
        biases_(tile.biases, lane),
        factor_(S::set1(rule.factor)),
        minus_top_(S::zero() - S::load(lse.top + lane)),
        minus_log2_sum_(S::zero() - S::load(lse.log2_sum + lane)) {}

  // The input of weight(): a plain score, or in a general call log2(e) * logit.
  V exponent(int64_t key, V score) const {
    if constexpr (kIsGeneral<Rule>) return scores.logit(biases_, key, score, factor_);
    return score;
  }
  V weight(int64_t key, V exponent) const {
    // If the log-sum-exp of a row is NaN, masked scores of the row must still give 0.
    if constexpr (kIsGeneral<Rule>) {
      return of_visible(key, exponent, S::template exp2<Accuracy>((exponent + minus_top_) + minus_log2_sum_));
    }
    return scores.visible(key, S::template exp2<Accuracy>(S::fma(exponent, factor_, minus_top_) + minus_log2_sum_),
                          S::zero());
  }
  // x for visible scores, 0 for masked ones.
  V of_visible(int64_t key, V exponent, V x) const {
    if constexpr (kIsGeneral<Rule>) return BiasTile<Op>::where_hidden(exponent, S::zero(), x);
    return scores.visible(key, x, S::zero());
  }

  ScoreVector<Op, kMasked, kDropout> scores;

 private:
  typename BiasTile<Op>::Lanes biases_;
  V factor_, minus_top_, minus_log2_sum_;
};

// One vector of queries in the backward, with its row statistics.
template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
class GradientVector : public KnownVector<Accuracy, kMasked, kDropout, Op, Rule> {
  using Known = KnownVector<Accuracy, kMasked, kDropout, Op, Rule>;
  using S = typename Op::S;
  using V = typename S::V;
  using Real = typename Op::Real;

 public:
  GradientVector() = default;
  GradientVector(const ScoreTile<Op>& tile, const GradientTile<Op>& gradients, const Rule& rule,
                 const GradientScales<Real, Rule>& scales, const KnownRows<Real>& rows, int64_t lane)
      : Known(tile, rule, rows.lse, lane),
        queries_(tile.queries),
        gradients_(gradients.scores + lane),
        dp_scale_(S::set1(scales.dp)),
        minus_delta_(S::zero() - S::load(rows.delta + lane)) {}

  // P * (dP - delta); 0 for a masked score even if dP is not finite.
  V logit_gradient(int64_t key, V exponent, V weight) const {
    const V dp = this->scores.kept(key, S::load(gradients_ + key * queries_));
    return this->of_visible(key, exponent, weight * S::fma(dp, dp_scale_, minus_delta_));
  }

 private:
  int64_t queries_;
  const Real* gradients_;
  V dp_scale_, minus_delta_;
};

// Recomputes delta for one vector of rows that see no key outside of the tile: the row sum of P * dP, minus the
// gradient of lse, with weights that add up to 1 (KnownRows::normalise). If the caller passed the lse of a call with
// more keys (ring attention, for example), the row keeps its delta.
template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
inline void find_delta(const ScoreTile<Op>& tile, const GradientTile<Op>& gradients, const Rule& rule,
                       const GradientScales<typename Op::Real, Rule>& scales, const KnownRows<typename Op::Real>& rows,
                       int64_t lane, IndexRange keys) {
  using S = typename Op::S;
  using V = typename S::V;
  const V given = S::load(rows.delta + lane);
  S::store(rows.delta + lane, S::zero());
  const GradientVector<Accuracy, kMasked, kDropout, Op, Rule> vector(tile, gradients, rule, scales, rows, lane);
  V dot = S::zero(), sum = S::zero();
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const V exponent = vector.exponent(j, vector.scores.load(j));
    const V weight = vector.weight(j, exponent);
    sum = sum + weight;
    dot = dot + vector.logit_gradient(j, exponent, weight);
  }
  const V factor = rows.template normalise<S>(lane, sum);
  const V delta = S::fma(dot, factor, S::zero() - S::load(rows.dlse + lane));
  S::store(rows.delta + lane, S::where_less(S::zero(), factor, delta, given));
}

template <class Accuracy, bool kMasked, bool kDropout, int kVectors, class Op, class Rule>
inline void differentiate_vectors(const ScoreTile<Op>& tile, const GradientTile<Op>& gradients, const Rule rule,
                                  const GradientScales<typename Op::Real, Rule>& scales,
                                  const KnownRows<typename Op::Real>& rows, int64_t lane, IndexRange keys) {
  using S = typename Op::S;
  using V = typename S::V;
  const int64_t queries = tile.queries;
  GradientVector<Accuracy, kMasked, kDropout, Op, Rule> vectors[kVectors];
  for (int n = 0; n < kVectors; ++n) vectors[n] = {tile, gradients, rule, scales, rows, lane + n * S::kWidth};
  [[maybe_unused]] typename BiasGradient<Op>::Lanes bias_gradients[kVectors];
  bool has_bias_gradient = false;
  if constexpr (kIsGeneral<Rule>) {
    for (int n = 0; n < kVectors; ++n) bias_gradients[n] = {gradients.biases, lane + n * S::kWidth};
    has_bias_gradient = gradients.biases.any();
  }
  V row_sums[kVectors];
  for (int n = 0; n < kVectors; ++n) row_sums[n] = S::zero();
  auto one_key = [&](int64_t j, V* kept_weight, V* dscore) __attribute__((always_inline)) {
    FLASHATTN_UNROLL(2)
    for (int n = 0; n < kVectors; ++n) {
      const V score = vectors[n].scores.load(j), exponent = vectors[n].exponent(j, score);
      const V weight = vectors[n].weight(j, exponent);
      kept_weight[n] = vectors[n].scores.kept(j, weight);
      const V dlogit = vectors[n].logit_gradient(j, exponent, weight);
      dscore[n] = rule.times_slope(dlogit, score);
      if constexpr (kIsGeneral<Rule>) {
        // The score and slope of a masked pair may be NaN.
        dscore[n] = vectors[n].of_visible(j, exponent, dscore[n] * S::set1(scales.dscore));
        bias_gradients[n].add(j, dlogit);
        row_sums[n] = row_sums[n] + dlogit;
      }
    }
  };
  for (int64_t j = keys.begin; j < keys.end; j += 2) {
    V kept_weight[2][kVectors], dscore[2][kVectors];
    one_key(j, kept_weight[0], dscore[0]);
    const bool both = j + 1 < keys.end;
    if (both) one_key(j + 1, kept_weight[1], dscore[1]);
    for (int n = 0; n < kVectors; ++n) dscore[1][n] = both ? dscore[1][n] : S::zero();
    for (int k = 0; k < (both ? 2 : 1); ++k) {
      PanelForms<Op>::queries(tile.scores + (j + k) * queries, queries, j + k, lane, kept_weight[k], kVectors);
      PanelForms<Op>::queries(gradients.scores + (j + k) * queries, queries, j + k, lane, dscore[k], kVectors);
    }
    PanelForms<Op>::pairs(gradients.pairs + j / 2 * queries, queries, j, lane, dscore[0], dscore[1], kVectors);
  }
  for (int n = 0; has_bias_gradient && n < kVectors; ++n) {
    gradients.biases.set_row_sums(lane + n * S::kWidth, row_sums[n]);
  }
}

// Turns the products of a panel into weights, using the log-sum-exp of each row, and dP into dS: the A operands of the
// products for dv and dk (along queries), and dS also of the product for dq (along keys).
//
// whole_rows: the queries of the panel see no key of another tile. delta, the row sum of P * dP, is then recomputed
// here and stored in `rows`: delta from `out` has the rounding error of `out` and another order of sums than dP, which
// dominate where few keys are visible and the gradient cancels; with one key dS is then exactly 0. find_delta detects
// rows whose keys are not all in this call.
template <class Accuracy, class Op, class Rule>
FLASHATTN_SHARED void differentiate(const ScoreTile<Op>& tile, const GradientTile<Op>& gradients, const Rule& rule,
                                    const GradientScales<typename Op::Real, Rule>& scales,
                                    const KnownRows<typename Op::Real>& rows, const PanelMask<Op>& mask,
                                    bool whole_rows, IndexRange lanes, IndexRange keys) {
  static_assert(kTileVectors == 2, "a panel has one or two vectors");
  begin_known_panel(tile, rule, rows.lse, lanes, keys);
  with_limits(tile, mask, lanes, keys, [&](auto masked, auto dropout) {
    constexpr bool kMasked = decltype(masked)::value, kDropout = decltype(dropout)::value;
    for (int64_t lane = lanes.begin; whole_rows && lane < lanes.end; lane += Op::S::kWidth) {
      find_delta<Accuracy, kMasked, kDropout>(tile, gradients, rule, scales, rows, lane, keys);
    }
    if (lanes.end - lanes.begin > Op::S::kWidth) {
      differentiate_vectors<Accuracy, kMasked, kDropout, 2>(tile, gradients, rule, scales, rows, lanes.begin, keys);
    } else {
      differentiate_vectors<Accuracy, kMasked, kDropout, 1>(tile, gradients, rule, scales, rows, lanes.begin, keys);
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
