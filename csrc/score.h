// From the product <q, k> to a logit, and the slope of that: the one definition for every backend.
//
//   logit = rule(softmax_scale * <q, k>)
//
// For each product a kernel keeps one stored score x, and a rule says what x is:
//
//   log2(e) * logit = factor * x,  so that  weight = exp2(factor * x - offset)
//   gradient of softmax_scale * <q, k> = times_slope(gradient of the logit, x)
//
// The offset is the running maximum of factor * x, or the known log-sum-exp, in units of log2. What multiplies dS in
// the sums for dq and dk, softmax_scale, is the same in all rows and keys: it is multiplied to the sums once, at their
// end.
//
// A rule may also have a term that is the same for all keys of a row, log2(e) * logit = factor * x + constant. It
// never reaches a score: the offset is smaller by the constant, so that only the sink with which a row begins and its
// log-sum-exp, which are those of logits, have to meet it (docs/dataflow.md lists where).
//
// The CPU and CUDA kernels never store logits. The Ascend C kernels do, because the vector unit's exponential has base
// e: they turn each product into its logit, in natural units. From the rule they take softmax_scale.
//
// Biases (bias.h) are no part of a rule. They are added to the logit, whose derivative by the product they do not
// change: log2(e) * logit = factor * x + bias.
//
// A rule is a small struct that the host fills and a kernel takes by value and as a template argument. A new rule is a
// struct here with the members of PlainScore.
#pragma once

#include <limits>

#include "params.h"
#include "portable.h"

namespace flashattn_ext {

template <class Real>
constexpr Real kLog2E = static_cast<Real>(1.44269504088896340736);
template <class Real>
constexpr Real kLn2 = static_cast<Real>(0.69314718055994530942);
template <class Real>
constexpr Real kSmallest = std::numeric_limits<Real>::min();  // above 0

// The rule of a call without options: a logit is the scaled product.
//
// Real: what the kernel computes in, float or double. kOrdered: the stored scores have the order of the logits, as a
// kernel needs that looks for their maximum. Such a kernel negates the products when softmax_scale is negative, here
// or in an operand; one that knows the log-sum-exp leaves the sign in the factor, where it costs nothing.
template <class Real, bool kOrdered>
struct PlainScore {
  static constexpr bool kConstantSlope = true;  // times_slope does not use x, which then need not be kept

  // By default the rule for softmax_scale = 1.
  Real factor = kLog2E<Real>;  // positive when kOrdered
  Real softmax_scale = 1;
  bool negates = false;  // x is the negated product; false when not kOrdered

#if !defined(FLASHATTN_NO_DOUBLE)  // called on the host
  FLASHATTN_HOST_DEVICE static PlainScore of(const AttnParams& p) {
    const bool negative = p.softmax_scale < 0;
    const Real size = static_cast<Real>((negative ? -p.softmax_scale : p.softmax_scale) * kLog2E<double>);
    // A factor of 0 would make NaN of a masked score, which is -inf.
    const Real factor = size < kSmallest<Real> ? kSmallest<Real> : size;
    return {negative && !kOrdered ? -factor : factor, static_cast<Real>(p.softmax_scale), negative && kOrdered};
  }
#endif

  // Whether a product is a stored score as it stands, so that a kernel can save the pass over them.
  FLASHATTN_HOST_DEVICE bool stores_products() const { return !negates; }

  // V: Real, or a vector of Real.
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

// The rule of softcap: a logit is cap * tanh(softmax_scale * <q, k> / cap). The stored score is the tanh, which has the
// order of the logits and from which the slope comes: 1 - x^2.
//
// Tanh: the backend's tanh of a V, static V of(V), as exact as the inputs' type asks.
template <class Real, class Tanh>
struct CappedScore {
  static constexpr bool kConstantSlope = false;

  Real factor = kLog2E<Real>;  // log2(e) * cap
  Real softmax_scale = 1;
  Real inner = 1;  // softmax_scale / cap

#if !defined(FLASHATTN_NO_DOUBLE)  // called on the host
  FLASHATTN_HOST_DEVICE static CappedScore of(const AttnParams& p) {
    return {static_cast<Real>(p.softcap * kLog2E<double>), static_cast<Real>(p.softmax_scale),
            static_cast<Real>(p.softmax_scale / p.softcap)};
  }
#endif

  FLASHATTN_HOST_DEVICE bool stores_products() const { return false; }
  template <class V>
  FLASHATTN_HOST_DEVICE V stored(V product) const {
    return Tanh::of(product * inner);
  }
  template <class V>
  FLASHATTN_HOST_DEVICE V times_slope(V gradient, V x) const {
    return gradient - gradient * (x * x);
  }
};

}  // namespace flashattn_ext
