// Rows of a head in shared memory, as many as its sequence has. The kernels of whole heads are launched with as many
// warps as the rows of a call need, so sizes are those of the launch and not of a template.
#pragma once

#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext::sm80 {

// The threads that copy rows together: a thread's number among them, and how many they are.
struct Team {
  int thread, threads;
};
__device__ __forceinline__ Team block_team() { return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)}; }
__device__ __forceinline__ Team warp_team() { return {lane(), 32}; }

// Starts copying `rows` rows of `columns` elements, whole multiples of 16 bytes. The rest of the tile, up to `padded`
// rows of Tile::kColumns, becomes zero.
template <class Tile, class T = typename Tile::Element>
__device__ __forceinline__ void load_rows(const Team& team, T* tile, const T* from, int64_t row_stride, int rows,
                                          int padded, int columns) {
  constexpr int kVectors = Tile::kColumns / Tile::kVector;
  static_assert(32 % kVectors == 0);
  const int column = team.thread % kVectors * Tile::kVector, step = team.threads / kVectors;
  const int count = column < columns ? rows : 0;
  int row = team.thread / kVectors;
  const T* source = from + row * row_stride + column;
#pragma unroll 4
  for (; row < padded; row += step, source += step * row_stride) {
    ptx::cp_async(tile + Tile::offset(row, column), source, row < count);
  }
}

// Calls body(row, column) for the vectors of a tile that load_rows has this thread copy.
template <class Tile, class Body>
__device__ __forceinline__ void for_own_vectors(const Team& team, int padded, const Body& body) {
  constexpr int kVectors = Tile::kColumns / Tile::kVector;
  const int column = team.thread % kVectors * Tile::kVector, step = team.threads / kVectors;
#pragma unroll 4
  for (int row = team.thread / kVectors; row < padded; row += step) body(row, column);
}

}  // namespace flashattn_ext::sm80
