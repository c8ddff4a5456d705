// Tile sizes of the sm_90 kernels for every class of head dims. How many keys a step takes decides the order of sums,
// so it depends on nothing but the head dim and on whether there is dropout: a sequence has the same bits in every
// batch.
#pragma once

namespace flashattn_ext::sm90 {

struct ForwardTile {
  int groups;  // warpgroups that compute; each has 64 queries
  int keys;
  int stages;  // of keys and values
  constexpr int queries() const { return groups * 64; }
};

// Dropout draws its bits for 64 keys at a time.
template <int kHeadDim, bool kDropout>
constexpr ForwardTile forward_tile() {
  if (kHeadDim <= 64) return kDropout ? ForwardTile{2, 128, 3} : ForwardTile{3, 128, 3};
  if (kHeadDim <= 96) return kDropout ? ForwardTile{3, 64, 4} : ForwardTile{3, 112, 2};
  if (kHeadDim <= 128) return kDropout ? ForwardTile{2, 128, 3} : ForwardTile{3, 80, 3};
  if (kHeadDim <= 144) return kDropout ? ForwardTile{2, 64, 3} : ForwardTile{3, 80, 2};
  if (kHeadDim <= 192) return kDropout ? ForwardTile{2, 64, 3} : ForwardTile{2, 96, 2};
  return {2, 64, 2};
}

// Up to 128: two warpgroups with 64 keys each. Above, one for each of dv, dk and dq.
struct BackwardTile {
  int keys;
  int queries;     // of a step
  int stages;      // of queries
  int key_stages;  // of keys and values: with two, the next tile's arrive while this one's are in use
};

// Queries do not depend on dropout: the sums of dq lie as they do without.
template <int kHeadDim, bool kDropout>
constexpr BackwardTile backward_tile() {
  if (kHeadDim <= 64) return {128, 128, 2, kDropout ? 1 : 2};
  if (kHeadDim <= 128) return {128, 64, 3, 1};
  return {64, 64, 2, 1};
}

// Registers of a thread: 64 Ki in all, given out in eights. What the block starts with, what the producer keeps and
// what a computing warpgroup gets.
struct RegisterBudget {
  int producer;
  int consumer;
};
constexpr RegisterBudget register_budget(int groups) {
  return groups == 3 ? RegisterBudget{32, 160} : RegisterBudget{40, 232};
}
constexpr RegisterBudget kBackwardRegisters{24, 240};

// Of the backward of head dims above 128: for the warpgroups that load, of dv and of dk, and of dq.
struct WideRegisterBudget {
  int loader;
  int keys;
  int queries;
};
constexpr WideRegisterBudget kWideBackwardRegisters{24, 208, 72};

constexpr int kSharedLimit = 227 * 1024;

}  // namespace flashattn_ext::sm90
