// The softmax of a row before its first key and after its last one: the sink, an extra logit, and the log-sum-exp. One
// definition for every backend.
#pragma once

#include "params.h"
#include "rules/score.h"

namespace flashattn_ext {

// A sink of +inf takes all the weight of its rows: out is 0, lse is +inf and the gradient of lse is the sink's. Kernels
// represent it as the largest finite number, because inf - inf would be NaN.

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

// The log-sum-exp of a row in two words, which every derivative of a forward reads.
//
//   log-sum-exp in units of log2 = top + log2_sum
//   weight of a key              = exp2((factor * x - top) - log2_sum)
//
// top is the maximum that the weights of the forward were relative to, log2_sum the logarithm of their sum. One word
// cannot hold the log-sum-exp: an fp32 number near 10000 has a spacing of 0.001, which is the relative error of every
// weight of the row, and one near -1e9, where all keys of a row have that bias, loses the number of keys.

// Contiguous, as a row of AttnParams::lse_words is in memory.
template <class Real>
struct LseWords {
  static constexpr Real kOneWord = 16;  // natural units

  Real top, log2_sum;

  // The words of a fully masked row: every weight is 0, and not NaN.
  FLASHATTN_HOST_DEVICE static LseWords of_no_key() { return {kInfinite<Real>, Real(0)}; }
  // The words of a row after its last key, from its maximum and the logarithm of its sum, in units of log2.
  // A sink of +inf has the maximum kLargest and weighs 1, whatever the sum.
  FLASHATTN_HOST_DEVICE static LseWords of_row(Real maximum, Real log2_sum) {
    return {maximum, maximum == kLargest<Real> ? Real(0) : log2_sum};
  }
  // From the natural log-sum-exp alone, for callers that have no words. The second word is -0: 0 is that of a row whose
  // weights are known to add up to 1, the weight of its maximum.
  FLASHATTN_HOST_DEVICE static LseWords of_lse(Real lse) {
    if (lse == -kInfinite<Real>) return of_no_key();
    return {sink_maximum(lse), -Real(0)};  // +inf: of a sink of +inf
  }
  // The words of a row for a derivative. row: as in the tensors. Below kOneWord the rounding error of lse is less than
  // that of a weight, and the words come from lse alone: a backward that is given no more has the same bits.
  FLASHATTN_HOST_DEVICE static LseWords of(const AttnParams& p, int64_t b, int64_t h, int64_t row) {
    const Real lse = static_cast<const Real*>(p.lse.data)[b * p.lse.batch_stride + h * p.lse.head_stride + row];
    return !p.lse_words.data || (lse > -kOneWord && lse < kOneWord) ? of_lse(lse) : given(p, b, h, row);
  }
  // Both words as the forward wrote them, of a call that has them.
  FLASHATTN_HOST_DEVICE static LseWords given(const AttnParams& p, int64_t b, int64_t h, int64_t row) {
    const TensorView& t = p.lse_words;
    const Real* const words =
        static_cast<const Real*>(t.data) + b * t.batch_stride + h * t.head_stride + row * t.row_stride;
    return {words[0], words[1]};
  }

  FLASHATTN_HOST_DEVICE bool is_of_no_key() const { return top == kInfinite<Real>; }
  // One word, where its rounding error does no harm.
  FLASHATTN_HOST_DEVICE Real sum() const { return top + log2_sum; }
  // Binary logarithm of the weight of a sink: 0 if it takes all the weight, -inf in a row with of_no_key().
  FLASHATTN_HOST_DEVICE Real sink_log2_weight(Real sink) const { return (sink_maximum(sink) - top) - log2_sum; }
};

// Bound on the rounding error of the sum of all weights of a row with its sink, which is 1, when a kernel recomputes
// them: 2^-12, and the error of scores and of a log-sum-exp of the size of `top`. If the sum differs by more, the
// caller passed the log-sum-exp of a larger call (ring attention, for example), of which these are not all keys.
template <class Real>
FLASHATTN_HOST_DEVICE Real weight_error(Real top) {
  const Real error = Real(1) / 4096 + (top < 0 ? -top : top) / (1 << 20);
  return error < Real(0.25) ? error : Real(0.25);
}

}  // namespace flashattn_ext
