// Tile sizes of the sm_90 kernels for every class of head dims. How many keys a step takes decides the order of sums.
// So it depends on the head dim and the kind of call, and on nothing else: a sequence has the same bits in every batch.
#pragma once

#include "../common/kind.h"
#include "../common/tile_choice.h"

namespace flashattn_ext::sm90 {

constexpr int kGroupThreads = 128;  // threads of a warpgroup

struct ForwardTile {
  int groups;  // warpgroups that compute; each has 64 queries
  int keys;
  int stages;  // of keys and values
  constexpr int queries() const { return groups * 64; }
  constexpr bool exists() const { return groups > 0; }
};

struct ForwardTiles {
  HeadDims head_dims;
  Kind kind;  // kinds have rows of their own where their registers, intervals or bias need another tile; with dropout,
              // keys are a multiple of 64: bits are drawn for so many at a time
  ForwardTile tiles[kRowTiles];
};

constexpr ForwardTiles kForwardTiles[] = {
    {64, Kind::kPlain, {{3, 128, 3}, {3, 112, 3}, {2, 192, 2}}},
    {64, Kind::kIntervals, {{3, 128, 3}, {2, 192, 2}, {2, 128, 3}}},
    {64, Kind::kScores, {{3, 96, 3}, {2, 160, 3}, {2, 128, 3}}},
    {64, Kind::kBias, {{3, 128, 3}, {2, 192, 2}, {2, 128, 3}}},
    {64, Kind::kDropout, {{2, 128, 3}, {3, 64, 4}, {2, 192, 2}}},
    {96, Kind::kPlain, {{3, 112, 2}, {3, 96, 2}, {2, 128, 3}}},
    {96, Kind::kDropout, {{3, 64, 4}, {2, 128, 2}, {2, 64, 4}}},
    {96, Kind::kScores, {{2, 128, 3}, {3, 96, 2}, {3, 112, 2}}},
    {128, Kind::kPlain, {{3, 80, 3}, {2, 128, 3}, {2, 160, 2}}},
    {128, Kind::kIntervals, {{3, 80, 3}, {2, 160, 2}, {2, 128, 2}}},
    {128, Kind::kDropout, {{2, 128, 3}, {3, 64, 3}, {2, 64, 4}}},
    {128, Kind::kGeneral, {{2, 128, 2}, {2, 64, 4}}},
    {128, Kind::kBias, {{2, 128, 2}, {2, 64, 3}}},
    {128, Kind::kScores, {{2, 128, 3}, {3, 80, 3}, {2, 160, 2}}},
    {144, Kind::kPlain, {{3, 80, 2}, {2, 112, 2}, {2, 96, 2}}},
    {144, Kind::kScores, {{2, 112, 2}, {2, 96, 2}}},
    {144, Kind::kDropout, {{2, 64, 3}, {3, 64, 2}, {2, 64, 2}}},
    {{192, 128}, Kind::kPlain, {{3, 80, 3}, {2, 128, 2}, {2, 112, 2}}},
    {192, Kind::kPlain, {{2, 96, 2}, {2, 112, 2}, {2, 80, 2}}},
    {192, Kind::kDropout, {{2, 64, 3}, {2, 64, 2}}},
    {256, Kind::kPlain, {{2, 64, 2}, {2, 80, 2}}},
    {256, Kind::kBias, {{2, 64, 2}}},
    {256, Kind::kDropout, {{2, 64, 2}}},
    {384,
     Kind::kPlain,
     {{1, 64, 5}, {1, 128, 4}, {1, 96, 6}}},  // forward_large.cuh: stages are parts of a tile of keys
    {384, Kind::kDropout, {{1, 64, 5}}},
    {512, Kind::kPlain, {{1, 64, 4}, {1, 128, 4}, {1, 96, 6}}},
    {512, Kind::kDropout, {{1, 64, 4}}},
};

template <int kHeadDim, Kind kKind, int kHeadDimV = kHeadDim>
constexpr ForwardTile forward_tile() {
  return find_tile<ForwardTile>(kForwardTiles, {kHeadDim, kHeadDimV}, kKind);
}

struct BackwardTile {
  int keys;        // 128: two warpgroups compute, with 64 each (backward.cuh); 64: is_wide()
  int queries;     // of a step of the walk
  int stages;      // of queries and their output gradients
  int key_stages;  // of keys and values: with two, those of the next tile arrive while these are in use
  constexpr bool is_wide() const { return keys == 64; }  // one warpgroup each for dv, dk and dq (backward_wide.cuh)
  constexpr bool exists() const { return keys > 0; }
};

struct BackwardTiles {
  HeadDims head_dims;
  Kind kind;  // dropout and the centres of rows (../../bias.h) take some shared memory; queries are the same without,
              // for they give the order of the sums of dq. Class 144 leaves calls with a Mask to backward_wide.cuh
  BackwardTile tiles[kRowTiles];
};

constexpr BackwardTiles kBackwardTiles[] = {
    {64, Kind::kPlain, {{128, 128, 2, 2}, {128, 128, 2, 1}}},
    {64, Kind::kDropout, {{128, 128, 2, 1}}},
    {64, Kind::kScores, {{128, 128, 2, 1}}},
    {96, Kind::kPlain, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {96, Kind::kDropout, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {96, Kind::kScores, {{128, 64, 2, 1}}},
    {128, Kind::kPlain, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {128, Kind::kDropout, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    {128, Kind::kScores, {{128, 64, 2, 1}}},
    {128, Kind::kBias, {{128, 64, 2, 1}}},
    {144, Kind::kPlain, {{128, 64, 2, 1}, {64, 64, 2, 1}, {64, 64, 3, 1}}},
    {144, Kind::kIntervals, {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    {144, Kind::kDropout, {{128, 64, 2, 1}, {64, 64, 2, 1}, {64, 64, 3, 1}}},
    {{192, 128}, Kind::kPlain, {{128, 64, 2, 1}, {64, 64, 2, 1}, {64, 64, 3, 1}}},
    {192, Kind::kPlain, {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    {192, Kind::kDropout, {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    {256, Kind::kPlain, {{64, 64, 2, 1}, {64, 64, 1, 2}}},
    {256, Kind::kDropout, {{64, 64, 2, 1}, {64, 64, 1, 2}}},
    {384, Kind::kPlain, {{64, 64, 2, 1}}},
    {512, Kind::kPlain, {{64, 64, 2, 1}}},
};

template <int kHeadDim, Kind kKind, int kHeadDimV = kHeadDim>
constexpr BackwardTile backward_tile() {
  return find_tile<BackwardTile>(kBackwardTiles, {kHeadDim, kHeadDimV}, kKind);
}

// Registers of each thread, in eights: what the warpgroup that loads keeps, and what one that computes gets. A
// multiprocessor has 64 Ki.
struct RegisterBudget {
  int producer;
  int consumer;
};
constexpr RegisterBudget register_budget(int groups) {
  return groups == 3 ? RegisterBudget{32, 160} : RegisterBudget{40, 232};
}
constexpr RegisterBudget kBackwardRegisters{24, 240};

// The same for the forward of head dims above 256: the warpgroup that loads and that of scores, which both give some of
// the 128 that they start with away, and the two that sum up.
struct LargeRegisterBudget {
  int loader;
  int scores;
  int sums;
};
constexpr LargeRegisterBudget kLargeRegisters{40, 120, 176};

// The same for the backward of head dims above 128: the warpgroup that loads, those of dv and of dk, and that of dq.
struct WideRegisterBudget {
  int loader;
  int keys;
  int queries;
};
constexpr WideRegisterBudget wide_register_budget(int head_dim) {
  return head_dim > 256 ? WideRegisterBudget{56, 192, 72} : WideRegisterBudget{24, 208, 72};
}

constexpr int kSharedLimit = 227 * 1024;

}  // namespace flashattn_ext::sm90
