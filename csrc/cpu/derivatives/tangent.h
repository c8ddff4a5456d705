// The tangents of the logits of a tile, in forward mode (jvp.h) and in second derivatives (second.h):
//
//   A_ij = slope_ij * softmax_scale * (<tq_i, k_j> + <q_i, tk_j>) + tangent of the biases of (i, j)
//
// with the slope of the rule (score.h). Like the scores they are transposed, A^T[key][query].
#pragma once

#include "cpu/score/scores.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class Op>
struct TangentTile {
  using Real = typename Op::Real;

  TangentTile(const AttnParams& p, const AttnParams& tangents, const TileSize& size, ScratchCarver* carve)
      : of_q(tangents.q.data),
        of_k(tangents.k.data),
        of_biases(tangents.has_bias()),
        softmax_scale(static_cast<Real>(p.softmax_scale)),
        queries(size.queries),
        biases(tangents, size, carve),
        scores(carve->take<Real>(size.keys * size.queries)) {}

  bool has_products() const { return of_q || of_k; }
  // Whether any A can be other than 0.
  bool has_logit_tangents() const { return has_products() || of_biases; }

  // Computes the products for one panel of queries. Operands without a tangent are not read.
  FLASHATTN_SHARED void multiply(StagedRows<Op> k, StagedRows<Op> tk, Panels<Op> q, Panels<Op> tq, IndexRange keys,
                                 IndexRange lanes, int64_t units) const {
    if (of_q) score_product(Gemm<Op>{k.data, k.stride, tq, scores, queries}, keys, lanes, units);
    const Gemm<Op> other{tk.data, tk.stride, q, scores, queries};
    if (of_k && of_q) score_product<Init::kAdd>(other, keys, lanes, units);
    if (of_k && !of_q) score_product(other, keys, lanes, units);
  }

  bool of_q, of_k, of_biases;  // which tangents there are
  Real softmax_scale;
  int64_t queries;  // the stride between the rows of two keys
  BiasTile<Op> biases;
  Real* scores;  // [keys][queries]: <tq, k> + <q, tk>, later what the next products read
};

// One vector of queries of a TangentTile.
template <class Op, class Rule>
class TangentVector {
  using S = typename Op::S;
  using V = typename S::V;
  using Real = typename Op::Real;

 public:
  TangentVector() = default;
  TangentVector(const TangentTile<Op>& tile, int64_t lane)
      : has_products_(tile.has_products()),
        of_biases_(tile.of_biases),
        queries_(tile.queries),
        scores_(tile.scores + lane),
        softmax_scale_(S::set1(tile.softmax_scale)),
        biases_(tile.biases, lane) {}

  // softmax_scale * (<tq, k> + <q, tk>) for one key.
  V product(int64_t key) const {
    return has_products_ ? S::load(scores_ + key * queries_) * softmax_scale_ : S::zero();
  }
  // The two parts of A: of the product, from product() and the stored score, and of the biases.
  static V of_product(const Rule& rule, V product, V score) { return rule.times_slope(product, score); }
  V of_biases(int64_t key) const {
    if (!of_biases_) return S::zero();
    return biases_.logits(key, S::zero()) * S::set1(kLn2<Real>);
  }
  V logit(int64_t key, const Rule& rule, V product, V score) const {
    const V logit_tangent = of_product(rule, product, score);
    if constexpr (!kIsGeneral<Rule>) return logit_tangent;
    return logit_tangent + of_biases(key);
  }
  V load(int64_t key) const { return S::load(scores_ + key * queries_); }
  void store(int64_t key, V x) const { S::store(scores_ + key * queries_, x); }

 private:
  bool has_products_, of_biases_;
  int64_t queries_;
  Real* scores_;
  V softmax_scale_;
  typename BiasTile<Op>::Lanes biases_;
};

// State of the rows of a query tile in forward mode, [queries] each. The sums over keys are of P * m * (A - pivot). The
// rounding errors of a 16-bit out and of the log-sum-exp are multiplied by the distance of the pivot from the weighted
// mean of A, which is tlse. The pivot is the sum of two means:
// - of the part of the products, over the first tile in which the row has a weight. Its distance from the mean over all
//   keys is at most the size of <tq, k> and <q, tk>, which have such rounding errors themselves;
// - of the part of the biases, over all keys. Tangents of biases may be larger (those of slopes are multiplied by
//   distances) and are exact in plain PyTorch. Only calls with such tangents sum this part, in a pass of its own.
template <class Op>
struct TangentRows {
  using Real = typename Op::Real;

  TangentRows(const TileSize& size, ScratchCarver* carve)
      : lse(size, carve),
        total(carve->take<Real>(size.queries)),
        pivot(carve->take<Real>(size.queries)),
        deviation(carve->take<Real>(size.queries)) {}

  // Ends the pass that sums P * (part of the biases) to `pivot`.
  void end_biases(int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      pivot[i] = total[i] > 0 ? pivot[i] / total[i] : Real(0);
      total[i] = 0;
    }
  }

  KnownLse<Real> lse;
  Real* total;      // sum of the weights of all keys so far
  Real* pivot;      // until `total` is above 0, the part of the biases alone
  Real* deviation;  // sum of P * (A - pivot)
};

// Sums the tangents of the biases of one vector of queries (TangentRows::end_biases).
template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
inline void sum_biases_of_vector(const ScoreTile<Op>& tile, const TangentTile<Op>& tangents, const Rule rule,
                                 const TangentRows<Op>& rows, int64_t lane, IndexRange keys) {
  using S = typename Op::S;
  using V = typename S::V;
  const KnownVector<Accuracy, kMasked, kDropout, Op, Rule> vector(tile, rule, rows.lse, lane);
  const TangentVector<Op, Rule> tangent(tangents, lane);
  V sum = S::load(rows.total + lane), tangent_sum = S::load(rows.pivot + lane);
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const V exponent = vector.exponent(j, vector.scores.load(j)), weight = vector.weight(j, exponent);
    sum = sum + weight;
    tangent_sum = S::fma(weight, vector.of_visible(j, exponent, tangent.of_biases(j)), tangent_sum);
  }
  S::store(rows.total + lane, sum);
  S::store(rows.pivot + lane, tangent_sum);
}

template <class Accuracy, bool kMasked, bool kDropout, class Op, class Rule>
inline void weigh_tangents_of_vector(const ScoreTile<Op>& tile, const TangentTile<Op>& tangents, const Rule rule,
                                     const TangentRows<Op>& rows, bool keeps_weights, int64_t lane, IndexRange keys) {
  using S = typename Op::S;
  using V = typename S::V;
  const int64_t queries = tile.queries;
  const KnownVector<Accuracy, kMasked, kDropout, Op, Rule> vector(tile, rule, rows.lse, lane);
  const TangentVector<Op, Rule> tangent(tangents, lane);
  V sum = S::zero(), product_sum = S::zero();
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const V score = vector.scores.load(j), exponent = vector.exponent(j, score);
    const V weight = vector.weight(j, exponent);
    // The tangent of a masked pair may be NaN.
    const V of_product = vector.of_visible(j, exponent, tangent.of_product(rule, tangent.product(j), score));
    V logit_tangent = of_product;
    if constexpr (kIsGeneral<Rule>)
      logit_tangent = logit_tangent + vector.of_visible(j, exponent, tangent.of_biases(j));
    vector.scores.store(j, weight);
    tangent.store(j, logit_tangent);
    sum = sum + weight;
    product_sum = S::fma(weight, of_product, product_sum);
  }
  const V total = S::load(rows.total + lane), old = S::load(rows.pivot + lane), zero = S::zero();
  const V mean = S::where_less(zero, sum, product_sum / sum, zero);
  const V pivot = S::where_less(zero, total, old, old + mean);
  S::store(rows.pivot + lane, pivot);
  S::store(rows.total + lane, total + sum);
  V deviation = S::load(rows.deviation + lane);
  auto forms = [&](int64_t j, V* weight) {
    const V centred = vector.scores.load(j) * (tangent.load(j) - pivot);
    deviation = deviation + centred;
    *weight = vector.scores.kept(j, vector.scores.load(j));
    return vector.scores.kept(j, centred);
  };
  for (int64_t j = keys.begin; j < keys.end; j += 2) {
    const bool both = j + 1 < keys.end;
    V weight[2];
    const V even = forms(j, &weight[0]), odd = both ? forms(j + 1, &weight[1]) : zero;
    PanelForms<Op>::keys(tangents.scores, queries, j, lane, even, both ? &odd : nullptr);
    if (keeps_weights) PanelForms<Op>::keys(tile.scores, queries, j, lane, weight[0], both ? &weight[1] : nullptr);
  }
  S::store(rows.deviation + lane, deviation);
}

// What a pass over the keys does with the products of a panel.
enum class TangentPass {
  kBiases,   // sums the tangents of the biases, without the products of the tangents
  kWeights,  // turns them into the operands of the products along keys
};

// Turns the products of a panel into P * m * (A - pivot), in the tangent tile, and if keeps_weights into P * m, in the
// score tile: the A operands of the products along keys, without the factor 1 / p_keep of m. TangentPass::kBiases
// leaves no operands.
template <class Accuracy, class Op, class Rule>
FLASHATTN_SHARED void weigh_tangents(const ScoreTile<Op>& tile, const TangentTile<Op>& tangents, const Rule& rule,
                                     const TangentRows<Op>& rows, TangentPass pass, bool keeps_weights,
                                     const PanelMask<Op>& mask, IndexRange lanes, IndexRange keys) {
  begin_known_panel(tile, rule, rows.lse, lanes, keys);
  with_limits(tile, mask, lanes, keys, [&](auto masked, auto dropout) {
    constexpr bool kMasked = decltype(masked)::value, kDropout = decltype(dropout)::value;
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += Op::S::kWidth) {
      if (kIsGeneral<Rule> && pass == TangentPass::kBiases) {
        sum_biases_of_vector<Accuracy, kMasked, kDropout>(tile, tangents, rule, rows, lane, keys);
      } else {
        weigh_tangents_of_vector<Accuracy, kMasked, kDropout>(tile, tangents, rule, rows, keeps_weights, lane, keys);
      }
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
