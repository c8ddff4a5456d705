// Tiles of keys and values in shared memory: rows without padding, whose vectors of 16 bytes change places so that
// eight neighbouring rows have the same columns in different banks.
//
// Padding would do that too, but a row of 16 bytes more than a whole number of sectors (32 bytes) makes every second
// row begin in the middle of one. With such rows the profiler counted 24 sectors read from the L2 cache for an
// asynchronous copy of 16 sectors: a sector that goes to two places is read twice.
#pragma once

#include "../common/tensor_core.cuh"
#include "../common/tile.cuh"

namespace flashattn_ext::decode {

// kKept: whether a lane keeps its places in registers. The compiler takes them for cheap and would compute them for
// every operand again, which a kernel that has registers left can avoid.
template <class T, int kColumns, bool kKept>
struct SwizzledTile {
  using Core = TensorCore<T>;
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));  // elements
  static constexpr bool kWholeLines = kColumns * sizeof(T) % 128 == 0;        // 128 bytes: all banks
  static_assert(kColumns * sizeof(T) % 64 == 0);

  // What the columns of a row are exclusive-ored with.
  static __device__ __forceinline__ int places(int row) { return (kWholeLines ? row % 8u : row / 2u % 4u) * kVector; }
  static __device__ __forceinline__ int offset(int row, int column) { return row * kColumns + (column ^ places(row)); }

  __device__ __forceinline__ SwizzledTile() {
    if (!kKept) return;
    kept_row_place = ptx::opaque(row_place_of(lane()));
    kept_column_place = ptx::opaque(column_place_of(lane()));
  }

  // TensorCore::load_b and load_b_transposed on such a tile; n0 and k0 are multiples of 8.
  __device__ __forceinline__ void load_b(typename Core::B (&b)[2], const T* tile, int n0, int k0) const {
    uint32_t r[4];
    ptx::ldmatrix(r, tile + n0 * kColumns + moved(kKept ? kept_row_place : row_place_of(lane()), k0));
    set(b, r);
  }
  __device__ __forceinline__ void load_b_transposed(typename Core::B (&b)[2], const T* tile, int k0, int n0) const {
    if constexpr (sizeof(T) == 2) {
      uint32_t r[4];
      const int place = kKept ? kept_column_place : column_place_of(lane());
      ptx::ldmatrix_transposed(r, tile + k0 * kColumns + moved(place, n0));
      set(b, r);
    } else {
      const int row = k0 + 2 * (lane() % 4), column = n0 + lane() / 4;
      b[0] = {{tile[offset(row, column)], tile[offset(row + 1, column)]}};
      b[1] = {{tile[offset(row, column + 8)], tile[offset(row + 1, column + 8)]}};
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // The first vector of a lane in load_b, and in load_b_transposed of 16-bit elements.
  static __device__ __forceinline__ int row_place_of(int lane) {
    return offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * kVector);
  }
  static __device__ __forceinline__ int column_place_of(int lane) { return offset(lane % 16, lane / 16 * kVector); }
  // The place `columns` further in the same row.
  static __device__ __forceinline__ int moved(int place, int columns) {
    constexpr int kGroup = (kWholeLines ? 128 : 64) / static_cast<int>(sizeof(T));  // columns that change places
    return (place ^ columns % kGroup) + columns / kGroup * kGroup;
  }
  static __device__ __forceinline__ void set(typename Core::B (&b)[2], const uint32_t (&r)[4]) {
    auto element = [&](int i) {
      if constexpr (sizeof(T) == 2) {
        return r[i];
      } else {
        return __uint_as_float(r[i]);
      }
    };
    b[0] = {{element(0), element(1)}};
    b[1] = {{element(2), element(3)}};
  }

  int kept_row_place = 0, kept_column_place = 0;
};

}  // namespace flashattn_ext::decode
