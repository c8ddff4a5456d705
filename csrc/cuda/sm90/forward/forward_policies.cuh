// The policies of the Hopper forward kernels, by the options of their rows in the table of kernels. The first policy of
// each sort is empty and compiles to nothing.
#pragma once

#include "cuda/sm90/forward/dropout_policy.cuh"
#include "cuda/sm90/forward/forward_blocks.cuh"
#include "cuda/sm90/forward/score_policy.cuh"
#include "cuda/sm90/shared/forward_consumer.cuh"
#include "cuda/sm90/shared/forward_work.cuh"

namespace flashattn_ext::sm90 {

// The keys of a row in one chunk (cuda/sm90/invariant/invariant.cuh).
template <class SeenWork>
struct ChunksApart {
  using Work = SeenWork;
  static __device__ __forceinline__ bool begins(int) { return false; }
  static __device__ __forceinline__ void end_scores(int, OnlineSoftmax<>&) {}
  template <int N>
  static __device__ __forceinline__ void end_values(float (&)[N][4]) {}
};
using NoChunks = ChunksApart<ForwardWork>;

// kMasks: whether calls may have a Mask, or have a BlockMask; kLists: whether they have a BlockMask.
struct PlainPolicies {
  static constexpr bool kMasks = false, kLists = false;
  template <int kKeys, int kGroups, int kTeams>
  using Visibility = ArithmeticVisibility;
  template <class T, int kKeys>
  using Scoring = WithoutBiasTiles<PlainScores>;
  template <int kSteps>
  using Dropping = NoDropout<kSteps>;
  static constexpr bool kTailsOfCaches = false;
};

template <Options kOptions>
struct ForwardPolicies;
template <>
struct ForwardPolicies<kPlain> : PlainPolicies {};
template <>
struct ForwardPolicies<kBrief> : PlainPolicies {};
template <>
struct ForwardPolicies<kFewTiles> : PlainPolicies {};
template <>
struct ForwardPolicies<kBriefFewTiles> : PlainPolicies {};
template <>
struct ForwardPolicies<kDropout> : PlainPolicies {
  template <int kSteps>
  using Dropping = CounterDropout<kSteps>;
};
template <>
struct ForwardPolicies<kIntervals> : PlainPolicies {
  static constexpr bool kMasks = true;
  template <int kKeys, int kGroups, int kTeams>
  using Visibility = IntervalVisibility<kGroups>;
};
template <>
struct ForwardPolicies<kBlocks> : PlainPolicies {
  static constexpr bool kMasks = true, kLists = true;
  template <int kKeys, int kGroups, int kTeams>
  using Visibility = BlockVisibility<kKeys, kTeams>;
};
template <>
struct ForwardPolicies<kScores> : PlainPolicies {
  template <class T, int kKeys>
  using Scoring = WithoutBiasTiles<DistanceScores<T, kKeys>>;
};
template <>
struct ForwardPolicies<kBias> : PlainPolicies {
  template <class T, int kKeys>
  using Scoring = BiasTileScores<T, kKeys>;
};
template <>
struct ForwardPolicies<kFp8Scores> : PlainPolicies {
  template <class T, int kKeys>
  using Scoring = WithoutBiasTiles<std::conditional_t<kIsFloat8<T>, Fp8ProductScores, DescaledScores<T>>>;
};
template <>
struct ForwardPolicies<kFp8General> : ForwardPolicies<kFp8Scores> {
  static constexpr bool kMasks = true;
  template <int kKeys, int kGroups, int kTeams>
  using Visibility = IntervalVisibility<kGroups>;
};
template <>
struct ForwardPolicies<kUnlisted> {
  static constexpr bool kTailsOfCaches = false;
  static constexpr bool kMasks = true, kLists = false;
  template <int kKeys, int kGroups, int kTeams>
  using Visibility = IntervalVisibility<kGroups>;
  template <class T, int kKeys>
  using Scoring = WithoutBiasTiles<GeneralScores<T, 1, kKeys>>;
  template <int kSteps>
  using Dropping = OptionalDropout<kSteps>;
};

}  // namespace flashattn_ext::sm90
