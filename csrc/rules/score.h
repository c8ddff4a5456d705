// From the product <q, k> to a logit, and its derivative (the slope): the one definition for every backend.
//
//   logit = rule(softmax_scale * <q, k>)
//
// For each product a kernel keeps one stored score x, and a rule says what x is:
//
//   log2(e) * logit = factor * x,  so that  weight = exp2(factor * x - offset)
//   gradient of softmax_scale * <q, k> = times_slope(gradient of the logit, x)
//
// The offset is the running maximum of factor * x, or the known log-sum-exp, in units of log2. dq and dk are sums of dS
// times softmax_scale. The scale is the same for all rows and keys, so that kernels can apply it to the finished sums.
//
// A rule may also have a term that is the same for all keys of a row, log2(e) * logit = factor * x + constant. Stored
// scores exclude it: the offset is smaller by the constant. Only the sink that initialises a row and its log-sum-exp,
// which are in logits, have to account for it (docs/dataflow.md lists where).
//
// The CPU and CUDA kernels never store logits. The Ascend C kernels do, because the vector unit's exponential has base
// e: they turn each product into its logit, in natural units. They use only softmax_scale of the rule.
//
// Biases (bias.h) are no part of a rule. They are added to the logit and do not change its derivative with respect to
// the product: log2(e) * logit = factor * x + bias, with the bias in units of log2 (in_log2_units).
//
// Rounding. In calls without biases and options of a score the exponent is fma(factor, x, -offset), whose product is
// exact. From kRoundsProducts on the product is rounded first (docs/large_logits.md).
//
// A rule is a small struct that the host fills and a kernel takes by value and as a template argument.
#pragma once

#include <limits>

#include "params.h"

namespace flashattn_ext {

template <class Real>
constexpr Real kLog2E = static_cast<Real>(1.44269504088896340736);
template <class Real>
constexpr Real kLn2 = static_cast<Real>(0.69314718055994530942);
template <class Real>
constexpr Real kSmallest = std::numeric_limits<Real>::min();  // above 0
template <class Real>
constexpr Real kInfinite = std::numeric_limits<Real>::infinity();
template <class Real>
constexpr Real kLargest = std::numeric_limits<Real>::max();

// The offset is a rounded product. For the largest score of a row fma(factor, x, -offset) is therefore the rounding
// error of the offset, which exceeds every exponent of fp32 from 2^31 on. A row whose offset is at least this large in
// size rounds all of its products, as the offset is, and its largest weight is 1. Below, that error is at most 2^-9 in
// fp32. The derivatives apply the same criterion to LseWords::top, so that they recompute the weights of the forward.
template <class Real>
constexpr Real kRoundsProducts = Real(1 << 16);
template <class Real>
FLASHATTN_HOST_DEVICE bool rounds_products(Real offset) {
  return offset >= kRoundsProducts<Real> || offset <= -kRoundsProducts<Real>;
}

// Terms of a logit that are added to the scaled product (biases, sinks), from natural units to units of log2 and back.
// log2(e) times a number near the largest one is infinite, and an infinite bias has another meaning. So numbers beyond
// 2^126 (fp64: 2^1022) in size are narrowed first: their distance from that limit is halved, which keeps their order
// and leaves them finite. -inf stays -inf, +inf stays +inf and NaN stays NaN. Two numbers there are equal, or further
// apart than any exponent before and after.
// Neighbours may become equal. narrowed() rounds once, with and without fused operations, so that equal numbers stay
// equal in every kernel.
template <class Real>
constexpr Real kNarrowsFrom = 1 / kSmallest<Real>;
template <class Real>
FLASHATTN_HOST_DEVICE Real narrowed(Real natural) {
  if (natural > kNarrowsFrom<Real>) return natural / 2 + kNarrowsFrom<Real> / 2;
  if (natural < -kNarrowsFrom<Real>) return natural / 2 - kNarrowsFrom<Real> / 2;
  return natural;
}
template <class Real>
FLASHATTN_HOST_DEVICE Real in_log2_units(Real natural) {
  return narrowed(natural) * kLog2E<Real>;
}
// The inverse, for results: log-sum-exp and largest logits.
template <class Real>
FLASHATTN_HOST_DEVICE Real in_natural_units(Real log2_units) {
  const Real narrow = log2_units * kLn2<Real>;
  const Real size = narrow < 0 ? -narrow : narrow;
  if (!(size > kNarrowsFrom<Real>) || size == kInfinite<Real>) return narrow;
  const Real above = size - kNarrowsFrom<Real>, room = kLargest<Real> - size;
  const Real wide = size + (above < room ? above : room);  // finite: rounding may have taken `above` beyond `room`
  return narrow < 0 ? -wide : wide;
}

#if !defined(FLASHATTN_NO_DOUBLE)
// A softcap from this value on is ignored: for every scaled product s below 2^33 in size, cap * tanh(s / cap) differs
// from s by s / 3 * (s / cap)^2, less than half of the last digit of a double (of an fp32 number up to 2^47). UNCAPPED
// in flashattn_ext/arguments.py is the same number.
constexpr double kUncapped = static_cast<double>(int64_t{1} << 60);
#endif
// Up to this softcap, which multiplies the error, a tanh with a small absolute error (about 6e-8) is accurate enough
// for 16-bit inputs. Larger softcaps need a tanh with a small relative error.
constexpr float kLargeCap = 1000;

// In place of Math below, in kernels for calls without an option of a score. kOrdered: stored scores have the order of
// the logits, which kernels with an online softmax need for the maximum. Such kernels negate the products when
// softmax_scale is negative, here or in an operand. Kernels that know the log-sum-exp leave the sign in the factor at
// no cost.
template <bool kOrdered>
struct PlainProducts {};

// The rule of every call. An option of a score is a row of FLASHATTN_SCORE_OPTIONS (params.h) and what this struct does
// with it.
//
// Now that is softcap alone: a logit is cap * tanh(softmax_scale * <q, k> / cap). The stored score x is then the tanh:
// it has the order of the logits, and the slope is 1 - x^2. Without options x is the product.
//
// Real: the compute type, float or double. Math: the backend's tanh, static V of(V, bool is_large), with the accuracy
// that the input type needs, and a small relative error if is_large; void in rules that store no score.
template <class Real, class Math>
struct ScoreRule {
  static constexpr bool kConstantSlope = false;

  bool changes = false;        // whether the call has an option of a score
  bool is_large = false;       // a softcap above kLargeCap
  Real factor = kLog2E<Real>;  // factor of stored scores: log2(e) * cap
  Real softmax_scale = 1;
  // In calls with an option the stored score is a function of inner * product, and inverse is 1 / factor.
  Real inner = 0, inverse = 0;

#if !defined(FLASHATTN_NO_DOUBLE)  // called on the host
  FLASHATTN_HOST_DEVICE static ScoreRule of(const AttnParams& p) {
    const auto plain = ScoreRule<Real, PlainProducts<false>>::of(p);
    if (!p.has_score_option()) return {false, false, plain.factor, plain.softmax_scale, 0, 0};
    const Real factor = static_cast<Real>(p.softcap * kLog2E<double>);
    const Real inner = static_cast<Real>(p.softmax_scale / p.softcap);
    return {true, p.softcap > kLargeCap, factor, plain.softmax_scale, inner, 1 / factor};
  }
#endif
  template <class Other>
  FLASHATTN_HOST_DEVICE ScoreRule<Real, Other> with() const {
    return {changes, is_large, factor, softmax_scale, inner, inverse};
  }
  // The rule for products that still lack the factor `scale`, which may be negative. Its slopes are not those of the
  // call.
  FLASHATTN_HOST_DEVICE ScoreRule times(Real scale) const {
    return {changes, is_large, changes ? factor : factor * scale, softmax_scale, inner * scale, inverse};
  }

  // Whether stored(product) is not the product. Kernels skip that pass where it is.
  FLASHATTN_HOST_DEVICE bool changes_products() const { return changes; }
  // V: Real, or a vector of Real.
  template <class V>
  FLASHATTN_HOST_DEVICE V stored(V product) const {
    return changes ? changed(product) : product;
  }
  template <class V>
  FLASHATTN_HOST_DEVICE V times_slope(V gradient, V x) const {
    return changes ? slope(x, gradient) : gradient;
  }

  // The rest is for calls with an option. The stored score, whose size does not exceed bound().
  template <class V>
  FLASHATTN_HOST_DEVICE V changed(V product) const {
    return Math::of(product * inner, is_large);
  }
  FLASHATTN_HOST_DEVICE static constexpr Real bound() { return 1; }
  // The slope at x, times the gradient.
  template <class V>
  FLASHATTN_HOST_DEVICE V slope(V x, V gradient) const {
    return gradient - gradient * (x * x);
  }
  // The derivative of the slope by softmax_scale * <q, k>, divided by the slope.
  template <class V>
  FLASHATTN_HOST_DEVICE V curvature(V x) const {
    return -2 * kLog2E<Real> * inverse * x;
  }
};

// The rule of kernels for calls without an option of a score.
template <class Real, bool kOrdered>
struct ScoreRule<Real, PlainProducts<kOrdered>> {
  static constexpr bool kConstantSlope = true;  // times_slope ignores x, so that kernels need not keep it

  // The default is the rule for softmax_scale = 1.
  Real factor = kLog2E<Real>;  // positive when kOrdered
  Real softmax_scale = 1;
  bool negates = false;  // x is the negated product; false when not kOrdered

#if !defined(FLASHATTN_NO_DOUBLE)  // called on the host
  FLASHATTN_HOST_DEVICE static ScoreRule of(const AttnParams& p) {
    const bool negative = p.softmax_scale < 0;
    const Real size = static_cast<Real>((negative ? -p.softmax_scale : p.softmax_scale) * kLog2E<double>);
    // A factor of 0 would turn a masked score, -inf, into NaN. Derivatives multiply exponents by the inverse.
    constexpr Real kLeast = kSmallest<Real> * (1 << 16);
    const Real factor = size < kLeast ? kLeast : size;
    return {negative && !kOrdered ? -factor : factor, static_cast<Real>(p.softmax_scale), negative && kOrdered};
  }
#endif

  FLASHATTN_HOST_DEVICE bool changes_products() const { return negates; }
  template <class V>
  FLASHATTN_HOST_DEVICE V stored(V product) const {
    if constexpr (!kOrdered) return product;
    return negates ? -product : product;
  }
  template <class V>
  FLASHATTN_HOST_DEVICE V times_slope(V gradient, V) const {
    return gradient;
  }
};

}  // namespace flashattn_ext
