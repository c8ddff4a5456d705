// The policies of the sm_80 kernels of forward mode and of second derivatives, by the options of their rows in the
// table of kernels: one set for plain 16-bit calls, and one for all other calls.
#pragma once

#include "cuda/score/tangent_policy.cuh"
#include "cuda/sm80/derivatives/second_policy.cuh"
#include "cuda/sm80/shared/backward_visibility.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/visibility_policy.cuh"
#include "cuda/table/rows.h"

namespace flashattn_ext::sm80 {

template <Options kOptions>
struct JvpPolicies;
template <>
struct JvpPolicies<kPlain> {
  template <class Kernel>
  using Visibility = ArithmeticVisibility<Kernel>;
  template <class T, int kRowTiles, int kKeys>
  using Tangents = PlainTangents;
  using Dropping = NoDropout;
};
template <>
struct JvpPolicies<kGeneral> {
  template <class Kernel>
  using Visibility = MaskVisibility<Kernel>;
  template <class T, int kRowTiles, int kKeys>
  using Tangents = GeneralTangents<T, kRowTiles, kKeys>;
  using Dropping = OptionalDropout;
};

template <Options kOptions>
struct SecondPolicies;
template <>
struct SecondPolicies<kPlain> {
  template <class Kernel>
  using Visibility = ArithmeticQueries<Kernel>;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = PlainSecond;
  using Dropping = NoDropout;
};
template <>
struct SecondPolicies<kGeneral> {
  template <class Kernel>
  using Visibility = MaskQueries<Kernel>;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = GeneralSecond<T, kKeyTiles, kQueryTiles>;
  using Dropping = OptionalDropout;
};

}  // namespace flashattn_ext::sm80
