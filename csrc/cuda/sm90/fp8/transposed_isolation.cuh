// As isolate_panel_rows (cuda/score/isolation.cuh), for transposed values in e4m3, whose keys are columns of a tile.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fp8/transposed_values.h"
#include "cuda/tile/panels.cuh"

namespace flashattn_ext::sm90 {

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

}  // namespace flashattn_ext::sm90
