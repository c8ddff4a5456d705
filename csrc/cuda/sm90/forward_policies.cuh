// The policies of each kind of forward kernel in the table of kernels, and so the only place where a kind of forward is
// taken apart. The first policy of each sort is empty and compiles to nothing.
#pragma once

#include "dropout_policy.cuh"
#include "score_policy.cuh"
#include "visibility_policy.cuh"

namespace flashattn_ext::sm90 {

struct PlainPolicies {
  template <int kGroups>
  using Visibility = ArithmeticVisibility;
  template <class T, int kKeys>
  using Scores = WithoutBiasTiles<PlainScores>;
  template <int kSteps>
  using Dropping = NoDropout<kSteps>;
};

template <Kind kKind>
struct ForwardPolicies : PlainPolicies {};
template <>
struct ForwardPolicies<Kind::kDropout> : PlainPolicies {
  template <int kSteps>
  using Dropping = CounterDropout<kSteps>;
};
template <>
struct ForwardPolicies<Kind::kIntervals> : PlainPolicies {
  template <int kGroups>
  using Visibility = IntervalVisibility<kGroups>;
};
template <>
struct ForwardPolicies<Kind::kScores> : PlainPolicies {
  template <class T, int kKeys>
  using Scores = WithoutBiasTiles<DistanceScores<T, kKeys>>;
};
template <>
struct ForwardPolicies<Kind::kBias> : PlainPolicies {
  template <class T, int kKeys>
  using Scores = BiasTileScores<T, kKeys>;
};
template <>
struct ForwardPolicies<Kind::kGeneral> {
  template <int kGroups>
  using Visibility = IntervalVisibility<kGroups>;
  template <class T, int kKeys>
  using Scores = WithoutBiasTiles<GeneralScores<T, 1, kKeys>>;
  template <int kSteps>
  using Dropping = OptionalDropout<kSteps>;
};

}  // namespace flashattn_ext::sm90
