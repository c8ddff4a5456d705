// Tile sizes of the sm_80 kernels, for every element size (2 or 4 bytes) and class of head dims. `kLarge`: the GPU
// gives a thread block 160 KB of shared memory (A100, H100) and not just 99 KB (Ada, consumer Ampere).
#pragma once

#include <cstdint>

namespace flashattn_ext::sm80 {

struct ForwardTile {
  int warps;
  int row_tiles;  // 16-row tiles of queries of one warp
  int keys;
  constexpr int queries() const { return warps * row_tiles * 16; }
};

template <int kBytes, int kHeadDim>
constexpr ForwardTile forward_tile() {
  if (kBytes == 4) {
    if (kHeadDim <= 64) return {4, 2, 64};
    if (kHeadDim <= 128) return {4, 2, 32};
    if (kHeadDim <= 192) return {4, 1, 32};
    return {2, 1, 32};
  }
  if (kHeadDim <= 64) return {4, 2, 128};
  if (kHeadDim <= 128) return {4, 2, 64};
  if (kHeadDim <= 144) return {4, 2, 32};
  return {4, 1, 64};
}

struct BackwardTile {
  int warps;
  int key_tiles;  // 16-row tiles of keys of one warp
  int queries;
  int splits;  // the columns of dq, dk and dv are computed in so many thread blocks
  int stages;  // of queries
  constexpr int keys() const { return warps * key_tiles * 16; }
};

template <int kBytes, int kHeadDim, bool kLarge>
constexpr BackwardTile backward_tile() {
  if (kBytes == 4) {
    if (kHeadDim <= 64) return kLarge ? BackwardTile{4, 2, 16, 1, 2} : BackwardTile{4, 1, 32, 1, 2};
    if (kHeadDim <= 96) return {3, 1, 16, 1, 2};
    if (kHeadDim <= 128) return {kLarge ? 4 : 2, 1, 16, 1, 2};
    if (kHeadDim <= 144) return {3, 1, 16, 1, kLarge ? 2 : 1};
    if (kHeadDim <= 192) return {kLarge ? 2 : 1, 1, 16, 2, 2};
    return {kLarge ? 2 : 1, 1, 16, 2, kLarge ? 2 : 1};
  }
  if (kHeadDim <= 64) return {4, 2, 32, 1, 2};
  if (kHeadDim <= 128) return kLarge ? BackwardTile{8, 1, 64, 1, 2} : BackwardTile{4, 1, 32, 1, 2};
  if (kHeadDim <= 144) return {kLarge ? 6 : 3, 1, 32, 1, 2};
  if (kHeadDim <= 192) return kLarge ? BackwardTile{4, 1, 32, 2, 2} : BackwardTile{2, 1, 16, 2, 2};
  return kLarge ? BackwardTile{8, 1, 32, 2, 1} : BackwardTile{2, 1, 16, 2, 2};
}

constexpr int kSmallShared = 99 * 1024, kLargeShared = 227 * 1024;

}  // namespace flashattn_ext::sm80
