// Tile sizes of the sm_80 kernels, for every element size (2 or 4 bytes) and class of head dims. kLarge: the GPU gives
// a thread block 227 KB of shared memory (Hopper and newer data centre GPUs); other tiles fit in least_shared().
#pragma once

#include <cstdint>

#include "../common/kind.h"
#include "../common/tile_choice.h"

namespace flashattn_ext::sm80 {

// Bytes of shared memory that a thread block may have: on GPUs of compute capability 8.6, 8.9 and 12.0, on 8.0 and 8.7,
// and on Hopper and newer data centre GPUs.
constexpr int kSmallShared = 99 * 1024, kMediumShared = 163 * 1024, kLargeShared = 227 * 1024;

// What the kernels of a class of head dims need at least. The widest rows of fp32 do not fit into the smallest.
template <int kBytes, int kHeadDim>
constexpr int least_shared() {
  return kBytes == 4 && kHeadDim > 384 ? kMediumShared : kSmallShared;
}

// Whether code for the architecture that is being compiled may run the tiles for so much shared memory. Code for 9.0a
// runs on Hopper alone, where a thread block may have kLargeShared: kernels for less would double the time to compile.
template <int kShared>
constexpr bool kRunsHere =
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    kShared >= kLargeShared;
#else
    true;
#endif

struct ForwardTile {
  int warps = 0;
  int row_tiles = 0;  // of a warp: 16 queries each
  int keys = 0;
  int blocks = 0;  // on a multiprocessor at a time; bounds the registers
  int stages = 1;  // of keys and values
  constexpr int queries() const { return warps * row_tiles * 16; }
  constexpr bool exists() const { return warps > 0; }
};

// Columns of v and out in one run of the forward of forward.cuh, which keeps its sums for `out` in registers. These end
// at 256 columns: with larger head dims it runs twice, each time for half of the columns, and computes the scores
// again.
constexpr int out_columns(int head_dim) { return head_dim > 256 ? head_dim / 2 : head_dim; }

struct ForwardTiles {
  HeadDims head_dims;
  Kind kind;
  ForwardTile tiles[kRowTiles];
};

// For 16-bit types.
constexpr ForwardTiles kForwardTiles[] = {
    {64, Kind::kPlain, {{4, 2, 64, 3}, {4, 2, 128, 2}, {8, 1, 64, 2}}},
    {64, Kind::kDropout, {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 2}}},
    {96, Kind::kPlain, {{4, 2, 64, 2, 2}, {4, 2, 64, 2}, {8, 1, 64, 1}}},
    {96, Kind::kDropout, {{4, 2, 64, 2, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    {128, Kind::kPlain, {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    {128, Kind::kDropout, {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    {128, Kind::kGeneral, {{4, 2, 32, 2}}},
    {144, Kind::kPlain, {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    {144, Kind::kDropout, {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    {192, Kind::kPlain, {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    {192, Kind::kDropout, {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    {256, Kind::kPlain, {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    {256, Kind::kDropout, {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    {512, Kind::kDropout, {{2, 1, 32, 2}}},
};

template <int kBytes, int kHeadDim, Kind kKind>
constexpr ForwardTile forward_tile() {
  if constexpr (kBytes == 4) {
    if (kHeadDim <= 64) return {8, 1, 32, 1};
    if (kHeadDim <= 128) return {4, 2, 32, 1};
    if (kHeadDim <= 192) return {4, 1, 32, 1};
    if (kHeadDim == 384) return {1, 1, 32, 1};
    return {2, 1, 32, 1};
  } else {
    return find_tile<ForwardTile>(kForwardTiles, kHeadDim, kKind);
  }
}

// The forward of head dims above 256, in 16 bits, without options (forward_wide.cuh), by the bytes of shared memory
// that a thread block may have.
struct WideForwardTile {
  int warps, queries, keys;
  int stages;  // of chunks of keys * 128 elements
};
constexpr WideForwardTile wide_forward_tile(int shared) {
  if (shared >= kLargeShared) return {8, 64, 128, 4};
  return shared >= kMediumShared ? WideForwardTile{8, 64, 128, 2} : WideForwardTile{4, 32, 64, 3};
}

// Keys of a step. Where registers are scarcest, code for sm_80 spills with more than 32 of them. Only device code knows
// what it is compiled for, so the host takes shared memory for the keys of the table.
template <int kHeadDim, Kind kKind>
constexpr int step_keys(const ForwardTile& tile) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (kHeadDim == 144 || (kHeadDim == 128 && can_drop(kKind))) return tile.keys < 32 ? tile.keys : 32;
#endif
  return tile.keys;
}

struct BackwardTile {
  int warps, keys, queries;
  int score_key_warps;  // warps among which the keys of the scores are divided; sets of them divide the queries
  int grad_key_warps;   // warps among which the keys of dk and dv are divided; sets of them divide the columns
  int splits;           // thread blocks among which the columns of dq, dk and dv are divided
  int stages;           // of queries
};

template <int kBytes, int kHeadDim, bool kLarge>
constexpr BackwardTile backward_tile() {
  if (kBytes == 4) {
    if (kHeadDim <= 64) return kLarge ? BackwardTile{8, 64, 64, 2, 2, 1, 2} : BackwardTile{4, 64, 32, 4, 4, 1, 2};
    if (kHeadDim <= 96) return {3, 48, 16, 3, 3, 1, 2};
    if (kHeadDim <= 128) return kLarge ? BackwardTile{8, 64, 64, 2, 2, 1, 1} : BackwardTile{4, 32, 32, 2, 2, 1, 1};
    if (kHeadDim <= 144) return {3, 48, 16, 3, 3, 1, kLarge ? 2 : 1};
    if (kHeadDim <= 192) return kLarge ? BackwardTile{8, 64, 32, 4, 2, 1, 1} : BackwardTile{1, 16, 16, 1, 1, 2, 2};
    if (kHeadDim <= 256) return kLarge ? BackwardTile{4, 32, 32, 2, 1, 1, 1} : BackwardTile{1, 16, 16, 1, 1, 2, 1};
    if (kHeadDim <= 384) return kLarge ? BackwardTile{4, 32, 32, 2, 1, 2, 1} : BackwardTile{1, 16, 16, 1, 1, 3, 1};
    return kLarge ? BackwardTile{2, 32, 16, 2, 2, 4, 1} : BackwardTile{1, 16, 16, 1, 1, 4, 1};
  }
  if (kHeadDim <= 64) return {4, 128, 32, 4, 4, 1, 2};
  if (kHeadDim <= 96) return kLarge ? BackwardTile{8, 128, 64, 4, 4, 1, 2} : BackwardTile{4, 64, 32, 4, 4, 1, 2};
  if (kHeadDim <= 128) return kLarge ? BackwardTile{8, 128, 64, 4, 4, 1, 2} : BackwardTile{8, 64, 64, 4, 2, 1, 1};
  if (kHeadDim <= 144) return kLarge ? BackwardTile{6, 96, 64, 3, 2, 1, 2} : BackwardTile{3, 48, 32, 3, 3, 1, 2};
  if (kHeadDim <= 192) return kLarge ? BackwardTile{8, 64, 64, 4, 2, 1, 2} : BackwardTile{4, 64, 32, 2, 2, 1, 1};
  if (kHeadDim <= 256) return kLarge ? BackwardTile{8, 64, 64, 4, 2, 1, 2} : BackwardTile{4, 32, 32, 2, 1, 1, 1};
  if (kHeadDim <= 384) return kLarge ? BackwardTile{8, 64, 32, 4, 2, 2, 2} : BackwardTile{2, 32, 16, 2, 2, 3, 1};
  return kLarge ? BackwardTile{8, 64, 32, 4, 2, 2, 1} : BackwardTile{1, 16, 16, 1, 1, 4, 1};
}

}  // namespace flashattn_ext::sm80
