// The policies of each kind of sm_80 forward kernel in the table of kernels. The first policy of each sort is empty and
// compiles to nothing.
#pragma once

#include "../common/score_policy.cuh"
#include "dropout_policy.cuh"
#include "kernels.h"
#include "visibility_policy.cuh"

namespace flashattn_ext::sm80 {

struct PlainPolicies {
  using Visibility = ArithmeticVisibility;
  template <class T, int kRowTiles, int kKeys>
  using Scores = PlainScores;
  using Dropping = NoDropout;
};

template <Kind kKind>
struct ForwardPolicies;
template <>
struct ForwardPolicies<Kind::kPlain> : PlainPolicies {};
template <>
struct ForwardPolicies<Kind::kDropout> : PlainPolicies {
  using Dropping = CounterDropout;
};
template <>
struct ForwardPolicies<Kind::kIntervals> : PlainPolicies {
  using Visibility = IntervalVisibility;
};
template <>
struct ForwardPolicies<Kind::kGeneral> {
  using Visibility = IntervalVisibility;
  template <class T, int kRowTiles, int kKeys>
  using Scores = GeneralScores<T, kRowTiles, kKeys>;
  using Dropping = OptionalDropout;
};

}  // namespace flashattn_ext::sm80
