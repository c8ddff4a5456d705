// The policies of the Hopper backward kernels, by the options of their rows in the table of kernels. The first
// policy of each sort is empty and compiles to nothing.
#pragma once

#include "cuda/sm90/backward/backward_gradients.cuh"
#include "cuda/sm90/backward/backward_listed.cuh"
#include "cuda/sm90/shared/backward_dropout.cuh"
#include "cuda/sm90/shared/backward_heads.cuh"
#include "cuda/sm90/shared/backward_visibility.cuh"

namespace flashattn_ext::sm90 {

struct PlainBackwardPolicies {
  using Visibility = ArithmeticQueries;
  using Heads = WholeGroups;
  template <class T, class Packing>
  using Gradients = PlainGradients<Packing>;
  using Dropping = NoBackwardDropout;
};

template <Options kOptions>
struct BackwardPolicies;
template <>
struct BackwardPolicies<kPlain> : PlainBackwardPolicies {};
template <>
struct BackwardPolicies<kGroups> : PlainBackwardPolicies {
  using Heads = QueryHeads;
  template <class T, class Packing>
  using Gradients = GroupedGradients<Packing>;
};
template <>
struct BackwardPolicies<kDropout> : PlainBackwardPolicies {
  using Dropping = CounterBackwardDropout;
};
template <>
struct BackwardPolicies<kIntervals> : PlainBackwardPolicies {
  using Visibility = IntervalQueries;
};
template <>
struct BackwardPolicies<kBlocks> : PlainBackwardPolicies {
  using Visibility = BlockQueries;
  template <class T, class Packing>
  using Gradients = ListedGradients<Packing>;
};
template <>
struct BackwardPolicies<kScores> : PlainBackwardPolicies {
  template <class T, class Packing>
  using Gradients = DistanceGradients<T, Packing>;
};
template <>
struct BackwardPolicies<kBias> : PlainBackwardPolicies {
  template <class T, class Packing>
  using Gradients = BiasTileGradients<T, Packing>;
};

}  // namespace flashattn_ext::sm90
