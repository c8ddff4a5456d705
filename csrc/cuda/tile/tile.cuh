// Tiles in shared memory, filled from rows in global memory that are 16-byte aligned. The type of the tile,
// SwizzledTile or PaddedTile (operand_tile.cuh), defines its layout.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/tensor_core.cuh"
#include "cuda/tile/vector.cuh"
#include "params.h"

namespace flashattn_ext {

constexpr int kVectorBytes = 16;

// Elements from one row of a padded tile to the next: 16 bytes of padding spread eight rows over all banks.
template <class T, int kColumns>
constexpr int kTileStride = kColumns + kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ T* row_pointer(const TensorView& t, int64_t b, int64_t h, int64_t row) {
  return static_cast<T*>(t.data) + b * t.batch_stride + h * t.head_stride + row * t.row_stride;
}

// Starts copying `rows` rows of `columns` elements, whole multiples of 16 bytes. The rest of the tile, up to
// [kRows][Tile::kColumns], becomes zero: a tile never holds anything of a neighbouring sequence.
template <class Tile, int kRows, int kThreads, class T = typename Tile::Element>
__device__ __forceinline__ void load_tile(T* tile, const T* from, int64_t row_stride, int rows, int columns) {
  constexpr int kElements = kVectorBytes / sizeof(T), kVectors = Tile::kColumns / kElements;
  // A thread keeps to its columns and steps down the rows: it needs one pointer, not one for each vector.
  constexpr int kRowThreads = kThreads >= kVectors ? kVectors : kVectors % kThreads == 0 ? kThreads : kThreads / 2;
  constexpr int kStep = kThreads / kRowThreads;
  constexpr bool kIsPower = (kStep & (kStep - 1)) == 0;  // then the bits of the first row and of the steps are disjoint
  static_assert(kVectors % kRowThreads == 0);
  const int thread = threadIdx.x, row = thread / kRowThreads;
  if (kThreads % kRowThreads != 0 && thread >= kRowThreads * kStep) return;
#pragma unroll
  for (int group = 0; group < kVectors / kRowThreads; ++group) {
    const int column = (thread % kRowThreads + group * kRowThreads) * kElements;
    int left = column < columns ? rows - row : 0;  // rows to copy, from the thread's row on
    const T* source = from + row * row_stride + column;
    const int first = Tile::offset(row, column);
#pragma unroll
    for (int i = 0; i < (kRows + kStep - 1) / kStep; ++i) {
      const int further = i * kStep;
      const int at =
          kIsPower ? (first ^ Tile::places(further)) + further * Tile::kStride : Tile::offset(row + further, column);
      if (kRows % kStep == 0 || row + further < kRows) ptx::cp_async(tile + at, source, left > 0);
      left -= kStep;
      source += kStep * row_stride;
    }
  }
}

// Stores one vector of a row, from `column` on; the row has `columns` elements.
template <class T>
__device__ __forceinline__ void store_vector(T* to, const T* from, bool aligned, int column, int columns) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  if (column + kElements > columns) {
    for (int e = 0; e < kElements && column + e < columns; ++e) to[e] = from[e];
  } else if (aligned) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else {
    store_unaligned(to, *reinterpret_cast<const uint4*>(from));
  }
}

// Stores `rows` rows of `columns` elements of a tile of kColumns, whatever their alignment in memory. Tile: the layout,
// whose rows may be longer.
template <class Tile, int kRows, int kColumns, int kThreads, class T = typename Tile::Element>
__device__ __forceinline__ void store_tile(T* to, int64_t row_stride, const T* tile, int rows, int columns) {
  constexpr int kElements = kVectorBytes / sizeof(T), kVectors = kColumns / kElements;
  const bool aligned = reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0 && row_stride % kElements == 0;
  auto store = [&](int vector, bool whole) {
    const int row = vector / kVectors, column = vector % kVectors * kElements;
    if (row >= rows || column >= columns) return;
    store_vector(to + row * row_stride + column, tile + Tile::offset(row, column), whole, column, columns);
  };
  if (aligned) {
#pragma unroll 4
    for (int vector = ptx::opaque(threadIdx.x); vector < kRows * kVectors; vector += kThreads) store(vector, true);
  } else {
#pragma unroll 1
    for (int vector = ptx::opaque(threadIdx.x); vector < kRows * kVectors; vector += kThreads) store(vector, false);
  }
}

}  // namespace flashattn_ext
