// The named barriers of the sm_90 kernels. Number 0 is that of __syncthreads. A range has one barrier for each
// warpgroup that computes, or for each half of the columns.
#pragma once

namespace flashattn_ext::sm90 {

// forward.cuh
enum ForwardBarrier : int {
  kForwardPingPong = 1,  // to 4: a warpgroup waits at its own before it issues products; the one before it arrives
};

// jvp.cuh
enum JvpBarrier : int {
  kJvpPingPong = 1,  // to 3: as kForwardPingPong
};

// forward_large.cuh
enum LargeForwardBarrier : int {
  kHalfCleared = 1,  // and 2: the warps of a half have zeroed rows of values behind the last key
};

// backward.cuh, backward_turns.cuh, backward_bias.cuh, dq_adder.cuh, heads*.cuh, second*.cuh
enum BackwardBarrier : int {
  kBackwardPingPong = 1,  // and 2: a warpgroup waits at its own before it issues products; the other one arrives
  kGroupCleared = 3,      // and 4: the warps of a warpgroup have zeroed rows behind the last key or query
  kDqFull = 5,            // and 6: the warpgroup arrives when its part of dq is in shared memory; the adder waits
  kDqEmpty = 7,           // and 8: the adder arrives when it has read the part; the warpgroup waits
  kAddersMeet = 9,        // the two adders of a deterministic call with a bias wait for each other
  kDscores = 10,          // dS^T of both warpgroups is written. In three phases also 11: a warpgroup arrives at the
                          // barrier of the other one and waits at its own
  kScoresWritten = 12,    // second.cuh: F, T and the weights of both warpgroups are in shared memory
  kScoresRead = 13,       // second.cuh: both warpgroups have read them, and they may be overwritten
  kKeysCleared = 14,      // second*.cuh: both warpgroups have zeroed their parts of the rows behind the last key
};

// resident_work.cuh, resident.cuh, resident_together.cuh
enum ResidentBarrier : int {
  kResidentGroup = 1,     // and 2: the warps of a warpgroup have written dS, or have read the keys
  kResidentBoth = 3,      // both warpgroups have written scores, or have read the memory in which they exchange dq
  kResidentKeysRead = 4,  // resident_together.cuh: the products of the warpgroup of dv with the keys are complete
};

// backward_wide.cuh
enum WideBackwardBarrier : int {
  kWideGroup = 1,  // to 3: the warps of a warpgroup have zeroed rows, or have read the buffer of kept weights
};

}  // namespace flashattn_ext::sm90
