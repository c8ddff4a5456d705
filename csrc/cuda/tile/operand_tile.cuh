// Tiles in shared memory whose rows mma.sync reads as operands, without bank conflicts: eight neighbouring rows have
// the same columns in different banks.
//
// Padded rows are 16 bytes longer than their columns. That is more than a whole number of sectors (32 bytes), so that
// every second row begins in the middle of one; with such rows the profiler counted 24 sectors read from the L2 cache
// for an asynchronous copy of 16 sectors: a sector that goes to two places is read twice. A swizzled tile permutes the
// 16-byte vectors of a row instead. That costs one instruction per operand, and registers.
#pragma once

#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

template <class T, int kTileColumns, bool kIsSwizzled>
struct OperandTile {
  using Element = T;
  using Core = TensorCore<T>;
  static constexpr int kColumns = kTileColumns;
  static constexpr bool kSwizzled = kIsSwizzled;
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));  // elements
  static constexpr int kStride = kIsSwizzled ? kColumns : kTileStride<T, kColumns>;
  // The vectors of a swizzle group: as many bytes as divide a row, at most 128, which are all banks. Where a group has
  // fewer than 8 vectors, the neighbouring rows that fill 128 bytes start in different banks anyway.
  static constexpr int kRowBytes = kStride * static_cast<int>(sizeof(T));
  static constexpr int kGroupVectors = !kIsSwizzled ? 1 : kRowBytes % 128 == 0 ? 8 : kRowBytes % 64 == 0 ? 4 : 2;
  static constexpr int kGroup = kGroupVectors * kVector;  // columns
  static_assert(kRowBytes % (kGroupVectors * kVectorBytes) == 0);

  // The XOR mask of the columns of a row.
  static __device__ __forceinline__ int places(int row) {
    return static_cast<unsigned>(row) / (8u / kGroupVectors) % kGroupVectors * kVector;
  }
  static __device__ __forceinline__ int offset(int row, int column) { return row * kStride + (column ^ places(row)); }

  // An operand is addressed by a place: the byte offset of this lane's load from the first of 16 rows. `moved` gives
  // the place `columns`, a multiple of 8, further in the same rows.
  static __device__ __forceinline__ int moved(int place, int columns) {
    constexpr int kGroupBytes = kGroupVectors * kVectorBytes;
    const int bytes = columns * kBytes;
    return (place ^ bytes % kGroupBytes) + bytes / kGroupBytes * kGroupBytes;
  }
  static __device__ __forceinline__ int first_place_a(int lane = threadIdx.x % 32) {
    return offset(lane % 16, lane / 16 * kVector) * kBytes;
  }
  // The registers of an operand have to be consecutive, so lanes address other rows in load_b.
  static __device__ __forceinline__ int first_place_b(int lane = threadIdx.x % 32) {
    return offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * kVector) * kBytes;
  }
  // For load_b_transposed. With 32-bit elements a lane loads one element of row 2t and one of row 2t + 1, t = lane % 4.
  static __device__ __forceinline__ int first_place_transposed(int lane = threadIdx.x % 32) {
    return sizeof(T) == 2 ? first_place_a(lane) : offset(lane % 4 * 2, lane / 4) * kBytes;
  }

  // The places for the three kinds of load. The places of all columns are loop invariants, which the compiler would
  // keep in registers. A kernel under register pressure calls one of the functions below in each step: the places stay
  // the same, but a shuffle hides that from the compiler.
  struct Places {
    int a, b, transposed;
    __device__ __forceinline__ explicit Places(int lane = threadIdx.x % 32)
        : a(first_place_a(lane)), b(first_place_b(lane)), transposed(first_place_transposed(lane)) {}
    // For places that are kept from step to step.
    __device__ __forceinline__ void renew() {
      if constexpr (!kIsSwizzled) return;  // columns are an immediate offset of the load
      a = shuffled(a);
      b = shuffled(b);
      transposed = sizeof(T) == 2 ? a : shuffled(transposed);
    }
    // Computes them again, so that they need not be kept: some ten instructions.
    __device__ __forceinline__ void recompute() { *this = Places(shuffled(threadIdx.x % 32)); }

   private:
    static __device__ __forceinline__ int shuffled(int x) { return __shfl_xor_sync(~0u, x, 0); }
  };

  // A(m, k) = tile[m][k]
  static __device__ __forceinline__ typename Core::A load_a(const T* tile, int place) {
    uint32_t r[4];
    ptx::ldmatrix(r, at(tile, place));
    return {{element(r[0]), element(r[1]), element(r[2]), element(r[3])}};
  }
  // A(m, k) = tile[k][m], at a place of load_b; 16-bit elements.
  static __device__ __forceinline__ typename Core::A load_a_transposed(const T* tile, int place) {
    static_assert(sizeof(T) == 2);
    typename Core::A a;
    ptx::ldmatrix_transposed(a.x, at(tile, place));
    return a;
  }
  // Two neighbouring B: B(k, n) = tile[n][k], and n + 8.
  static __device__ __forceinline__ void load_b(typename Core::B (&b)[2], const T* tile, int place) {
    uint32_t r[4];
    ptx::ldmatrix(r, at(tile, place));
    b[0] = {{element(r[0]), element(r[1])}};
    b[1] = {{element(r[2]), element(r[3])}};
  }
  // Two neighbouring B: B(k, n) = tile[k][n], and n + 8. With 32-bit elements k is in the order of accumulators.
  static __device__ __forceinline__ void load_b_transposed(typename Core::B (&b)[2], const T* tile, int place) {
    if constexpr (sizeof(T) == 2) {
      uint32_t r[4];
      ptx::ldmatrix_transposed(r, at(tile, place));
      b[0] = {{r[0], r[1]}};
      b[1] = {{r[2], r[3]}};
    } else {
      // With groups of 8 vectors, rows 2t and 2t + 1 have different XOR masks.
      const int odd = place ^ (kGroupVectors == 8 ? kVectorBytes : 0);
      const T* const next = tile + kStride;
      b[0] = {{*at(tile, place), *at(next, odd)}};
      b[1] = {{*at(tile, moved(place, 8)), *at(next, moved(odd, 8))}};
    }
  }

 private:
  static constexpr int kBytes = sizeof(T);

  static __device__ __forceinline__ const T* at(const T* tile, int place) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(tile) + place);
  }
  static __device__ __forceinline__ auto element(uint32_t x) {
    if constexpr (sizeof(T) == 2) {
      return x;
    } else {
      return __uint_as_float(x);
    }
  }
};

template <class T, int kColumns>
using SwizzledTile = OperandTile<T, kColumns, true>;
template <class T, int kColumns>
using PaddedTile = OperandTile<T, kColumns, false>;

}  // namespace flashattn_ext
