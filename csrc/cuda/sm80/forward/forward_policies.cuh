// The policies of the sm_80 forward kernels, by the options of their rows in the table of kernels. The first policy of
// each sort is empty and compiles to nothing.
#pragma once

#include "cuda/score/score_policy.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/visibility_policy.cuh"
#include "cuda/table/rows.h"

namespace flashattn_ext::sm80 {

struct PlainPolicies {
  template <class Kernel>
  using Visibility = ArithmeticVisibility<Kernel>;
  template <class T, int kRowTiles, int kKeys>
  using Scoring = PlainScores;
  using Dropping = NoDropout;
};

template <Options kOptions>
struct ForwardPolicies;
template <>
struct ForwardPolicies<kPlain> : PlainPolicies {};
template <>
struct ForwardPolicies<kDropout> : PlainPolicies {
  using Dropping = CounterDropout;
};
template <>
struct ForwardPolicies<kMasks> : PlainPolicies {
  template <class Kernel>
  using Visibility = MaskVisibility<Kernel>;
};
template <>
struct ForwardPolicies<kFp8Scores> : PlainPolicies {
  template <class T, int kRowTiles, int kKeys>
  using Scoring = DescaledScores<T>;
};
template <>
struct ForwardPolicies<kFp8General> : ForwardPolicies<kFp8Scores> {
  template <class Kernel>
  using Visibility = MaskVisibility<Kernel>;
};
template <>
struct ForwardPolicies<kGeneral> {
  template <class Kernel>
  using Visibility = MaskVisibility<Kernel>;
  template <class T, int kRowTiles, int kKeys>
  using Scoring = GeneralScores<T, kRowTiles, kKeys>;
  using Dropping = OptionalDropout;
};

}  // namespace flashattn_ext::sm80
