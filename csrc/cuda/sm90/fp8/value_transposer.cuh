// Values in e4m3 whose keys are columns of a tile, in the forward (forward.cuh).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fp8/transposed_values.h"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/ring.cuh"

namespace flashattn_ext::sm90 {

// --- values that a Mask may hide -----------------------------------------------------------------------------------
//
// As isolate_panel_rows (cuda/score/isolation.cuh), for tiles of transposed values.

// All bits of the bytes of a word that are NaN, and no others.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t word) {
  const uint32_t top = ((word & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) >> 7;
  return top * 0xFF;
}
__device__ __forceinline__ uint4 nan_bytes(const uint4& x) {
  return make_uint4(nan_bytes(x.x), nan_bytes(x.y), nan_bytes(x.z), nan_bytes(x.w));
}
__device__ __forceinline__ uint4 operator|(const uint4& a, const uint4& b) {
  return make_uint4(a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w);
}

// Keys with a NaN become zeros. Each of two warps handles 64 keys, four lanes in each row of the tile. Every lane of a
// warp calls it. Returns whether the warp has such a key; then it calls each(key, whether it is finite) for each of its
// keys, and ptx::fence_async_shared has to follow before the tile is used.
template <int kWarps, int kColumns, class Each>
__device__ __forceinline__ bool isolate_transposed(ptx::E4m3Pair (&tile)[kColumns][kPanelColumns], int warp,
                                                   const Each& each) {
  static_assert(kWarps == 2 && kColumns % 8 == 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, chunk = warp * 4 + lane % 4, first = lane / 4;
  // 16 keys, in the order of transposed_key. Rows from `first` on in steps of 8 have the same swizzle.
  auto vector = [&](int row) -> uint4& { return reinterpret_cast<uint4*>(tile[row])[chunk ^ first]; };
  uint4 found{};
#pragma unroll 4
  for (int row = first; row < kColumns; row += 8) found = found | nan_bytes(vector(row));
  if (!__any_sync(~0u, (found.x | found.y | found.z | found.w) != 0)) return false;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    found.x |= __shfl_xor_sync(~0u, found.x, step);
    found.y |= __shfl_xor_sync(~0u, found.y, step);
    found.z |= __shfl_xor_sync(~0u, found.z, step);
    found.w |= __shfl_xor_sync(~0u, found.w, step);
  }
#pragma unroll 1
  for (int row = first; row < kColumns; row += 8) {
    uint4& x = vector(row);
    x = make_uint4(x.x & ~found.x, x.y & ~found.y, x.z & ~found.z, x.w & ~found.w);
  }
  // Each lane calls it for two of its 16 positions.
#pragma unroll 1
  for (int position = first; position < 16; position += 8) {
    const uint32_t words[4] = {found.x, found.y, found.z, found.w};
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word = position / 4 == i ? words[i] : word;
    each(chunk * 16 + transposed_key(position), (word >> position % 4 * 8 & 1) == 0);
  }
  return true;
}

// --- transposition in the forward ----------------------------------------------------------------------------------
//
// The warps of the producer warpgroup that load nothing transpose values. TMA brings a tile as rows of values, of 128
// bytes each; the warps write it as the tile that products take, in the order of keys of transposed_values.h, with
// zeros for keys behind the end of the sequence.

constexpr int kTransposingWarps = 3;  // all but the one that loads

// Transposes 16 keys, from 16 * group on. keys: those of the tile that exist. ldmatrix takes two columns as an
// element of 16 bits: of both, a lane gets four keys in a pair of registers. They are neighbours in a transposed row,
// so two byte permutations make the lane's words of the even and of the odd column.
template <int kKeys, int kColumns>
__device__ __forceinline__ void transpose_keys(ptx::E4m3Pair (&columns)[kColumns][kPanelColumns],
                                               const ptx::E4m3Pair (&rows)[kKeys][kPanelColumns], int group, int keys) {
  constexpr int kParts = kColumns / 32;
  // Opaque: there are no registers for what would not change from one call to the next.
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x) % 32), row = lane % 8;
  uint32_t pairs[kParts][4];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    ptx::ldmatrix_transposed(pairs[part], &rows[16 * group + lane % 16][(2 * part ^ lane / 16 ^ row) * 8]);
  }
  if (keys < kKeys) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int left = keys - 16 * group - lane % 4 * 2 - i % 2 * 8;
      const uint32_t existing = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
#pragma unroll
      for (int part = 0; part < kParts; ++part) pairs[part][i] &= existing;
    }
  }
  // Half of the lanes exchange even and odd columns, so that the eight rows of a matrix are in different banks.
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531, odd = even ^ 0x1111;
  const int column = lane / 16 * 16 + 2 * row + (row / 4 ^ lane / 8 % 2);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t (&x)[4] = pairs[part];
    const uint32_t words[4] = {ptx::permute_bytes(x[0], x[1], even), ptx::permute_bytes(x[0], x[1], odd),
                               ptx::permute_bytes(x[2], x[3], even), ptx::permute_bytes(x[2], x[3], odd)};
    ptx::stmatrix(&columns[32 * part + column][(group ^ column % 8) * 8], words);
  }
}

template <class Kernel>
struct ValueTransposer {
  SharedOf<Kernel>& shared;
  const int warp;  // one of kTransposingWarps
  RingPosition<Kernel::kRowStages> rows;
  RingPosition<Kernel::kStages> v;

  // The producer warpgroup: all its warps but the first transpose.
  static __device__ __forceinline__ void run(SharedOf<Kernel>& shared) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp > 0) ValueTransposer{shared, warp - 1}.transpose_tiles();
  }
  __device__ void transpose_tiles() {
    uint32_t parity = 0;
    for (ForwardWork work = receive_work(shared, &parity); work.exists(); work = receive_work(shared, &parity)) {
      int keys = work.length_k - work.last * Kernel::kKeys;  // keys of the tile and those behind it
      for (int left = work.last - work.first; left >= 0; --left) {
        transpose_tile(keys);
        keys += Kernel::kKeys;
      }
    }
  }
  __device__ void transpose_tile(int keys) {
    ptx::barrier_wait(&shared.rows_full[rows.stage], rows.parity);
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
#pragma unroll 1
    for (int group = warp; group < Kernel::kKeys / 16; group += kTransposingWarps) {
      transpose_keys(shared.v[v.stage][0], shared.rows[rows.stage][0], group, keys);
    }
    ptx::fence_async_shared();
    __syncwarp();
    release(shared.v_full[v.stage]);
    release(shared.rows_empty[rows.stage]);
    v.advance();
    rows.advance();
  }
};

}  // namespace flashattn_ext::sm90
