// Tile sizes of the sm_90 kernels for every class of head dims. How many keys a step takes decides the order of sums,
// so it depends on nothing but the head dim and on whether there is dropout: a sequence has the same bits in every
// batch.
#pragma once

#include "../common/tile_choice.h"

namespace flashattn_ext::sm90 {

constexpr int kGroupThreads = 128;  // of a warpgroup

struct ForwardTile {
  int groups;  // warpgroups that compute; each has 64 queries
  int keys;
  int stages;  // of keys and values
  constexpr int queries() const { return groups * 64; }
  constexpr bool exists() const { return groups > 0; }
};

struct ForwardTiles {
  int head_dim;
  bool dropout;  // draws its bits for 64 keys at a time
  ForwardTile tiles[kRowTiles];
};

constexpr ForwardTiles kForwardTiles[] = {
    {64, false, {{3, 128, 3}, {3, 112, 3}, {2, 192, 2}}},
    {64, true, {{2, 128, 3}, {3, 64, 4}, {2, 192, 2}}},
    {96, false, {{3, 112, 2}, {3, 96, 2}, {2, 128, 3}}},
    {96, true, {{3, 64, 4}, {2, 128, 2}, {2, 64, 4}}},
    {128, false, {{3, 80, 3}, {2, 128, 3}, {2, 160, 2}}},
    {128, true, {{2, 128, 3}, {3, 64, 3}, {2, 64, 4}}},
    {144, false, {{3, 80, 2}, {2, 112, 2}, {2, 96, 2}}},
    {144, true, {{2, 64, 3}, {3, 64, 2}, {2, 64, 2}}},
    {192, false, {{2, 96, 2}, {2, 112, 2}, {2, 80, 2}}},
    {192, true, {{2, 64, 3}, {2, 64, 2}}},
    {256, false, {{2, 64, 2}, {2, 80, 2}}},
    {256, true, {{2, 64, 2}}},
};

template <int kHeadDim, bool kDropout>
constexpr ForwardTile forward_tile() {
  for (const ForwardTiles& row : kForwardTiles) {
    if (row.head_dim == kHeadDim && row.dropout == kDropout) return choose(row.tiles);
  }
  return {};
}

// Up to 128: two warpgroups with 64 keys each. Above, one for each of dv, dk and dq.
struct BackwardTile {
  int keys;
  int queries;     // of a step
  int stages;      // of queries
  int key_stages;  // of keys and values: with two, the next tile's arrive while this one's are in use
  constexpr bool exists() const { return keys > 0; }
};

struct BackwardTiles {
  int head_dim;
  bool dropout;  // which takes some shared memory; queries do not depend on it, for the sums of dq lie in their order
  BackwardTile tiles[kRowTiles];
};

constexpr BackwardTiles kBackwardTiles[] = {
    {64, false, {{128, 128, 2, 2}, {128, 128, 2, 1}}},
    {64, true, {{128, 128, 2, 1}}},
    {96, false, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {96, true, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {128, false, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {128, true, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {144, false, {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    {144, true, {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    {192, false, {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    {192, true, {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    {256, false, {{64, 64, 2, 1}, {64, 64, 1, 2}}},
    {256, true, {{64, 64, 2, 1}, {64, 64, 1, 2}}},
};

template <int kHeadDim, bool kDropout>
constexpr BackwardTile backward_tile() {
  for (const BackwardTiles& row : kBackwardTiles) {
    if (row.head_dim == kHeadDim && row.dropout == kDropout) return choose(row.tiles);
  }
  return {};
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
