// Tile sizes of the decoding kernel, by element size and class of head dims.
//
// A thread block computes one tile of packed rows: the rows of all query heads that share a key head, queries one after
// another. Its warps form teams. A team has a ring of keys and values of its own in shared memory and takes every
// n-th step of keys; the warps of a team divide the tile among them.
#pragma once

namespace flashattn_ext::decode {

struct Tile {
  int row_tiles;     // of a warp: 16 packed rows each
  int row_warps;     // of a team: divide the rows
  int column_warps;  // of a team: each computes the scores of its rows, and then its columns of the result
  int keys;          // of a step
  int stages;        // of a ring: all but one are on their way from memory while one is computed
  constexpr int rows() const { return 16 * row_tiles * row_warps; }
};

// kBytes: of an element. kWide: up to 64 packed rows, for prefill and speculative decoding of many heads; otherwise,
// and above 256 columns, 16. Up to 256 columns a narrow warp is a team, which never waits for another one; two thread
// blocks of four teams with 50 KB to 70 KB on their way each saturate the memory of a multiprocessor.
template <int kBytes, int kHeadDim, bool kWide>
constexpr Tile tile() {
  constexpr int kRowBytes = kBytes * kHeadDim;
  if (kHeadDim > 256) return {1, 1, 2, 16, 2};
  if (!kWide) return {1, 1, 1, kRowBytes <= 128 ? 32 : 16, kRowBytes <= 512 ? 3 : 2};
  return kBytes == 2 && kHeadDim <= 128 ? Tile{2, 2, 1, 32, 2} : Tile{1, 4, 1, 32, 2};
}

constexpr int kMaxWarps = 4;   // of a thread block; a GPU with little shared memory runs fewer teams
constexpr int kUnitKeys = 64;  // work is divided in units of so many keys, whole steps of every tile

}  // namespace flashattn_ext::decode
