// Tiles of keys and values in shared memory: rows without padding, whose vectors of 16 bytes change places so that
// eight neighbouring rows have the same columns in different banks.
//
// Padding would do that too, but a row of 16 bytes more than a whole number of sectors (32 bytes) makes every second
// row begin in the middle of one, and a sector that an asynchronous copy puts in two places is read from the L2 cache
// twice: half as many reads again, which decoding cannot afford.
#pragma once

#include "../common/tensor_core.cuh"
#include "../common/tile.cuh"

namespace flashattn_ext::decode {

template <class T, int kColumns>
struct SwizzledTile {
  using Core = TensorCore<T>;
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));  // elements
  static constexpr bool kWholeLines = kColumns * sizeof(T) % 128 == 0;        // 128 bytes: all banks
  static_assert(kColumns * sizeof(T) % 64 == 0);

  // What the columns of a row are exclusive-ored with.
  static __device__ __forceinline__ int places(int row) { return (kWholeLines ? row % 8u : row / 2u % 4u) * kVector; }
  static __device__ __forceinline__ int offset(int row, int column) { return row * kColumns + (column ^ places(row)); }

  // TensorCore::load_b and load_b_transposed on such a tile.
  static __device__ __forceinline__ void load_b(typename Core::B (&b)[2], const T* tile, int n0, int k0) {
    const int lane = threadIdx.x % 32;
    uint32_t r[4];
    ptx::ldmatrix(r, tile + offset(n0 + lane % 8 + lane / 16 * 8, k0 + lane / 8 % 2 * kVector));
    set(b, r);
  }
  static __device__ __forceinline__ void load_b_transposed(typename Core::B (&b)[2], const T* tile, int k0, int n0) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
      uint32_t r[4];
      ptx::ldmatrix_transposed(r, tile + offset(k0 + lane % 16, n0 + lane / 16 * kVector));
      set(b, r);
    } else {
      const int row = k0 + 2 * (lane % 4), column = n0 + lane / 4;
      b[0] = {{tile[offset(row, column)], tile[offset(row + 1, column)]}};
      b[1] = {{tile[offset(row, column + 8)], tile[offset(row + 1, column + 8)]}};
    }
  }

 private:
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
};

}  // namespace flashattn_ext::decode
