// Tiles in shared memory, filled from rows in global memory that are 16-byte aligned, and vectors at any address. The
// type of a tile, SwizzledTile or PaddedTile (operand_tile.cuh), defines its layout.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/memory.cuh"
#include "params.h"

namespace flashattn_ext {

// --- vectors -------------------------------------------------------------------------------------------------------
//
// Vectors of 16 bytes whose addresses are aligned to one element (8, 16 or 32 bits) only.

// Bytes `shift` (below 16) to `shift` + 15 of two vectors that follow each other.
__device__ __forceinline__ uint4 shift_vectors(const uint4& low, const uint4& high, int shift) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t by_two[6], by_one[5], x[4];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_two[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_one[i] = shift & 4 ? by_two[i + 1] : by_two[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __funnelshift_r(by_one[i], by_one[i + 1], shift % 4 * 8);
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// Up to 16 bytes of elements at any address. Loading and getting are separate, so that a thread can load several
// vectors before it waits for the first.
template <class T>
class UnalignedVector {
 public:
  // Loads `count` elements, at least 1, from `from` on: as one or two whole aligned vectors, which neighbouring threads
  // share in the L1 cache, or one by one in get() when these reach beyond `end`.
  __device__ __forceinline__ void load(const T* from, int count, const void* end) {
    from_ = from;
    bytes_ = min(count, kElements) * kSize;
    const uint4* const base = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(from) - shift());
    const bool two = shift() + bytes_ > 16;
    whole_ = base + 1 + two <= end;
    if (whole_) low_ = base[0];
    if (whole_ && two) high_ = base[1];
  }
  // The elements, and zeros after them.
  __device__ __forceinline__ uint4 get() const {
    if (!whole_) return single_elements();
    const uint4 x = shift() == 0 ? low_ : shift_vectors(low_, high_, shift());
    return bytes_ == 16
               ? x
               : make_uint4(keep(x.x, bytes_), keep(x.y, bytes_ - 4), keep(x.z, bytes_ - 8), keep(x.w, bytes_ - 12));
  }

 private:
  static constexpr int kSize = sizeof(T), kElements = 16 / kSize;

  __device__ __forceinline__ int shift() const { return static_cast<int>(reinterpret_cast<uintptr_t>(from_) % 16); }
  static __device__ __forceinline__ uint32_t keep(uint32_t word, int bytes) {
    return bytes >= 4 ? word : bytes <= 0 ? 0 : word & (kSize == 1 ? (1u << 8 * bytes) - 1 : 0xFFFFu);
  }
  __device__ __forceinline__ uint4 single_elements() const {
    using Bits = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (e * kSize >= bytes_) break;
      words[e * kSize / 4] |= static_cast<uint32_t>(reinterpret_cast<const Bits*>(from_)[e]) << e * kSize % 4 * 8;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  const T* from_;
  int bytes_;
  bool whole_;
  uint4 low_, high_ = {};
};

template <class T>
__device__ __forceinline__ void store_unaligned(T* to, const uint4& x) {
  const bool odd = sizeof(T) == 2 && reinterpret_cast<uintptr_t>(to) % 4 != 0;
  if (!odd) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(to);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    return;
  }
  uint16_t* const halves = reinterpret_cast<uint16_t*>(to);
  uint32_t* const words = reinterpret_cast<uint32_t*>(halves + 1);
  halves[0] = static_cast<uint16_t>(x.x);
  words[0] = __funnelshift_l(x.x, x.y, 16);
  words[1] = __funnelshift_l(x.y, x.z, 16);
  words[2] = __funnelshift_l(x.z, x.w, 16);
  halves[7] = static_cast<uint16_t>(x.w >> 16);
}

// --- tiles ---------------------------------------------------------------------------------------------------------

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
