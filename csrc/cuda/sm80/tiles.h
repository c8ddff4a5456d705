// Tile sizes of the sm_80 kernels, for every element size (2 or 4 bytes) and class of head dims. `kLarge`: the GPU
// gives a thread block 227 KB of shared memory (Hopper and newer data centre GPUs); the others fit in 99 KB.
#pragma once

#include <cstdint>

namespace flashattn_ext::sm80 {

struct ForwardTile {
  int warps;
  int row_tiles;  // 16-row tiles of queries of one warp
  int keys;
  int blocks;  // so many on a multiprocessor at a time: bounds the registers
  constexpr int queries() const { return warps * row_tiles * 16; }
};

template <int kBytes, int kHeadDim, bool kDropout>
constexpr ForwardTile forward_tile() {
  if (kBytes == 4) {
    if (kHeadDim <= 64) return {8, 1, 32, 1};
    if (kHeadDim <= 128) return {4, 2, 32, 1};
    if (kHeadDim <= 192) return {4, 1, 32, 1};
    return {2, 1, 32, 1};
  }
  if (kHeadDim <= 64) return {4, 2, 64, kDropout ? 2 : 3};
  if (kHeadDim <= 128) return {4, 2, kDropout ? 32 : 64, 2};
  if (kHeadDim <= 144) return {4, 2, 32, 2};
  return {4, 1, 64, 2};
}

struct BackwardTile {
  int warps, keys, queries;
  int score_key_warps;  // so many warps share the keys of the scores, and so many sets of them the queries
  int grad_key_warps;   // so many warps share the keys of dk and dv, and so many sets of them the columns
  int splits;           // the columns of dq, dk and dv are computed in so many thread blocks
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
    return kLarge ? BackwardTile{4, 32, 32, 2, 1, 1, 1} : BackwardTile{1, 16, 16, 1, 1, 2, 1};
  }
  if (kHeadDim <= 64) return {4, 128, 32, 4, 4, 1, 2};
  if (kHeadDim <= 96) return kLarge ? BackwardTile{8, 128, 64, 4, 4, 1, 2} : BackwardTile{4, 64, 32, 4, 4, 1, 2};
  if (kHeadDim <= 128) return kLarge ? BackwardTile{8, 128, 64, 4, 4, 1, 2} : BackwardTile{8, 64, 64, 4, 2, 1, 1};
  if (kHeadDim <= 144) return kLarge ? BackwardTile{6, 96, 64, 3, 2, 1, 2} : BackwardTile{3, 48, 32, 3, 3, 1, 2};
  if (kHeadDim <= 192) return kLarge ? BackwardTile{8, 64, 64, 4, 2, 1, 2} : BackwardTile{4, 64, 32, 2, 2, 1, 1};
  return kLarge ? BackwardTile{8, 64, 64, 4, 2, 1, 2} : BackwardTile{4, 32, 32, 2, 1, 1, 1};
}

constexpr int kSmallShared = 99 * 1024, kLargeShared = 227 * 1024;

}  // namespace flashattn_ext::sm80
