// The log-sum-exp of a row in two words, which every derivative of a forward reads: one definition for every backend.
//
//   log-sum-exp in units of log2 = top + log2_sum
//   weight of a key              = exp2((factor * x - top) - log2_sum)
//
// top is the maximum that the weights of the forward were relative to, log2_sum the logarithm of their sum. One word
// cannot hold the log-sum-exp: an fp32 number near 10000 has a spacing of 0.001, which is the relative error of every
// weight of the row, and one near -1e9, where all keys of a row have that bias, loses the number of keys.
#pragma once

#include <limits>

#include "portable.h"
#include "score.h"

namespace flashattn_ext {

// Contiguous, as a row of AttnParams::lse_words is in memory.
template <class Real>
struct LseWords {
  Real top, log2_sum;

  // Of a fully masked row: every weight is 0, and not NaN.
  FLASHATTN_HOST_DEVICE static LseWords of_no_key() { return {std::numeric_limits<Real>::infinity(), Real(0)}; }
  // From the natural log-sum-exp alone, for callers that have no words.
  FLASHATTN_HOST_DEVICE static LseWords of_lse(Real lse) {
    if (lse == -std::numeric_limits<Real>::infinity()) return of_no_key();
    return {lse * kLog2E<Real>, Real(0)};
  }
  // One word, where its rounding error does no harm.
  FLASHATTN_HOST_DEVICE Real sum() const { return top + log2_sum; }
};

}  // namespace flashattn_ext
