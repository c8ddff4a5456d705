// The policies of each kind of Hopper backward kernel in the table of kernels. The first policy of each sort is empty
// and compiles to nothing.
#pragma once

#include "backward_dropout.cuh"
#include "backward_gradients.cuh"
#include "backward_visibility.cuh"

namespace flashattn_ext::sm90 {

struct PlainBackwardPolicies {
  using Visibility = ArithmeticQueries;
  template <class T, class Scores>
  using Gradients = PlainGradients<Scores>;
  using Dropping = NoBackwardDropout;
};

template <Kind kKind>
struct BackwardPolicies;
template <>
struct BackwardPolicies<Kind::kPlain> : PlainBackwardPolicies {};
template <>
struct BackwardPolicies<Kind::kDropout> : PlainBackwardPolicies {
  using Dropping = CounterBackwardDropout;
};
template <>
struct BackwardPolicies<Kind::kIntervals> : PlainBackwardPolicies {
  using Visibility = IntervalQueries;
};
template <>
struct BackwardPolicies<Kind::kScores> : PlainBackwardPolicies {
  template <class T, class Scores>
  using Gradients = DistanceGradients<T, Scores>;
};
template <>
struct BackwardPolicies<Kind::kBias> : PlainBackwardPolicies {
  template <class T, class Scores>
  using Gradients = BiasTileGradients<T, Scores>;
};

}  // namespace flashattn_ext::sm90
