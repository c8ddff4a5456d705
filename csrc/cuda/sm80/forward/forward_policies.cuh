// The policies of the sm_80 forward kernels, by the options of their rows in the table of kernels. The first policy of
// each sort is empty and compiles to nothing.
#pragma once

#include "cuda/score/score_policy.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/visibility_policy.cuh"
#include "cuda/table/rows.h"

namespace flashattn_ext::sm80 {

// Options of a score, ALiBi or a relative bias: as GeneralScores, without a bias of any shape.
template <class T, int kRowTiles, int kKeys>
struct DistanceScores : CentredScores<kRowTiles, DistanceBias<false, kRowTiles, kKeys / 8>> {
  using Rule = GeneralScore;
  using Bias = DistanceBias<false, kRowTiles, kKeys / 8>;

  template <class Kernel, class Step>
  __device__ __forceinline__ auto make_logits(const Kernel& kernel, float (&x)[kRowTiles][kKeys / 8][4],
                                              const Step& step, Nothing) {
    const auto rule = make_scores<T>(kernel.score, x, kernel.p.has_bias());
    if (kernel.p.has_bias()) kernel.template bias<Bias>(step).add_to_logits(x);
    return rule;
  }
};

struct PlainPolicies {
  template <class Kernel>
  using Visibility = ArithmeticVisibility<Kernel>;
  template <class T, int kRowTiles, int kKeys>
  using Scores = PlainScores;
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
struct ForwardPolicies<kScores> : PlainPolicies {
  template <class T, int kRowTiles, int kKeys>
  using Scores = DistanceScores<T, kRowTiles, kKeys>;
};
template <>
struct ForwardPolicies<kFp8Scores> : PlainPolicies {
  template <class T, int kRowTiles, int kKeys>
  using Scores = DescaledScores<T>;
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
  using Scores = GeneralScores<T, kRowTiles, kKeys>;
  using Dropping = OptionalDropout;
};

}  // namespace flashattn_ext::sm80
