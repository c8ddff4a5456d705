// The extra logit of a softmax, where it has no limit of its own: one definition for every backend.
//
// A sink of +inf takes all the weight of its rows: out is 0, lse is +inf and the gradient of lse is the sink's. Kernels
// keep it as the largest number, because differences of maxima must not be inf - inf.
#pragma once

#include <limits>

#include "portable.h"
#include "score.h"

namespace flashattn_ext {

template <class Real>
constexpr Real kInfinite = std::numeric_limits<Real>::infinity();
template <class Real>
constexpr Real kLargest = std::numeric_limits<Real>::max();

// Whether a sink takes part in the softmax. One that is not a number does, and shows in the result.
template <class Real>
FLASHATTN_HOST_DEVICE bool sink_counts(Real sink) {
  return sink != -kInfinite<Real>;
}

// A maximum to begin with, in units of log2.
template <class Real>
FLASHATTN_HOST_DEVICE Real sink_maximum(Real sink) {
  const Real maximum = sink * kLog2E<Real>;
  return maximum > kLargest<Real> ? kLargest<Real> : maximum;
}

// The log-sum-exp of a row, in natural units, from its maximum and the logarithm of its sum in units of log2.
template <class Real>
FLASHATTN_HOST_DEVICE Real row_lse(Real maximum, Real log2_sum) {
  return maximum == kLargest<Real> ? kInfinite<Real> : (maximum + log2_sum) * kLn2<Real>;
}

// The logarithm of the weight of a sink in a row with that log-sum-exp: 0 where the sink takes everything.
template <class Real>
FLASHATTN_HOST_DEVICE Real sink_log_weight(Real sink, Real lse) {
  return lse == kInfinite<Real> ? Real(0) : sink - lse;
}

}  // namespace flashattn_ext
