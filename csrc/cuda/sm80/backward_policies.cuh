// The policies of each kind of sm_80 backward kernel in the table of kernels. The first policy of each sort is empty
// and compiles to nothing.
#pragma once

#include "../table/rows.h"
#include "backward_visibility.cuh"
#include "dropout_policy.cuh"
#include "gradient_policy.cuh"

namespace flashattn_ext::sm80 {

struct PlainBackwardPolicies {
  using Visibility = ArithmeticQueries;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = PlainGradients;
  using Dropping = NoDropout;
};

template <Kind kKind>
struct BackwardPolicies;
template <>
struct BackwardPolicies<Kind::kPlain> : PlainBackwardPolicies {};
template <>
struct BackwardPolicies<Kind::kDropout> : PlainBackwardPolicies {
  using Dropping = CounterDropout;
};
template <>
struct BackwardPolicies<Kind::kIntervals> : PlainBackwardPolicies {
  using Visibility = IntervalQueries;
};
template <>
struct BackwardPolicies<Kind::kGeneral> {
  using Visibility = IntervalQueries;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = GeneralGradients<T, kKeyTiles, kQueryTiles>;
  using Dropping = OptionalDropout;
};

}  // namespace flashattn_ext::sm80
