// The policies of the sm_80 backward kernels, by the options of their rows in the table of kernels. The first policy of
// each sort is empty and compiles to nothing.
#pragma once

#include "cuda/sm80/backward/gradient_policy.cuh"
#include "cuda/sm80/shared/backward_visibility.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/table/rows.h"

namespace flashattn_ext::sm80 {

struct PlainBackwardPolicies {
  template <class Kernel>
  using Visibility = ArithmeticQueries<Kernel>;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = PlainGradients;
  using Dropping = NoDropout;
};

template <Options kOptions>
struct BackwardPolicies;
template <>
struct BackwardPolicies<kPlain> : PlainBackwardPolicies {};
template <>
struct BackwardPolicies<kDropout> : PlainBackwardPolicies {
  using Dropping = CounterDropout;
};
template <>
struct BackwardPolicies<kMasks> : PlainBackwardPolicies {
  template <class Kernel>
  using Visibility = MaskQueries<Kernel>;
};
template <>
struct BackwardPolicies<kGeneral> {
  template <class Kernel>
  using Visibility = MaskQueries<Kernel>;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = GeneralGradients<T, kKeyTiles, kQueryTiles>;
  using Dropping = OptionalDropout;
};

}  // namespace flashattn_ext::sm80
