// The policies of the kernels of whole heads, by the options of their rows in the table of kernels. The policies of
// plain kernels are empty and compile to nothing.
//   Mask            causal and window
//   Scoring, Dropping  as in the other forwards (score/score_policy.cuh, sm80/shared/dropout_policy.cuh)
//   kLeastKeys      of a step of the forward
//   Gradients       how scores and dP become weights and dS (heads_gradients.cuh, held_bias_gradients.cuh)
#pragma once

#include "cuda/score/score_policy.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/whole_heads/heads_gradients.cuh"
#include "cuda/sm80/whole_heads/held_bias_gradients.cuh"

namespace flashattn_ext::sm80 {

template <Options kOptions>
struct HeadsPolicies;
template <>
struct HeadsPolicies<kPlain> {
  using Mask = UnplacedMask32;
  using Dropping = NoDropout;
  template <class T, int kKeys>
  using Scoring = PlainScores;
  static constexpr int kLeastKeys = 16;
  using Gradients = PlainHeadGradients;
};
template <>
struct HeadsPolicies<kUnlisted> {
  using Mask = Mask32;
  using Dropping = OptionalDropout;
  template <class T, int kKeys>
  using Scoring = GeneralScores<T, 1, kKeys>;
  static constexpr int kLeastKeys = 32;
  using Gradients = GeneralHeadGradients;
};
// A bias of the inputs' 16 bits, and no other option but an origin.
template <>
struct HeadsPolicies<kAnyBias> {
  using Mask = Mask32;
  using Dropping = NoDropout;
  template <class T, int kKeys>
  using Scoring = HeldBiasScores<T>;
  static constexpr int kLeastKeys = 16;
  using Gradients = BiasedHeadGradients;
};

}  // namespace flashattn_ext::sm80
