// The attention sink, an extra logit of the softmax: one definition for every backend.
//
// A sink of +inf takes all the weight of its rows: out is 0, lse is +inf and the gradient of lse is the sink's. Kernels
// represent it as the largest finite number, because inf - inf would be NaN.
#pragma once

#include "portable.h"
#include "rules/score.h"

namespace flashattn_ext {

// Whether a sink takes part in the softmax. A NaN sink does, so that the result is NaN.
template <class Real>
FLASHATTN_HOST_DEVICE bool sink_counts(Real sink) {
  return sink != -kInfinite<Real>;
}

// The initial running maximum of a row with this sink, in units of log2. A finite sink is far below kLargest.
template <class Real>
FLASHATTN_HOST_DEVICE Real sink_maximum(Real sink) {
  const Real maximum = in_log2_units(sink);
  return maximum > kLargest<Real> ? kLargest<Real> : maximum;
}

// The log-sum-exp of a row, in natural units, from its maximum and log2 of its sum, both in units of log2.
template <class Real>
FLASHATTN_HOST_DEVICE Real row_lse(Real maximum, Real log2_sum) {
  return maximum == kLargest<Real> ? kInfinite<Real> : in_natural_units(maximum + log2_sum);
}

// Natural logarithm of the weight of a sink in a row with the given log-sum-exp: 0 if the sink takes all the weight.
template <class Real>
FLASHATTN_HOST_DEVICE Real sink_log_weight(Real sink, Real lse) {
  return lse == kInfinite<Real> ? Real(0) : sink - lse;
}

}  // namespace flashattn_ext
