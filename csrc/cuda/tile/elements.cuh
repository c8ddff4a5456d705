// The elements of a lane in accumulator tiles (tensor_core.cuh).
#pragma once

namespace flashattn_ext {

// Calls body(row tile, column tile, element) for all elements of kRowTiles x kColumnTiles accumulator tiles.
template <int kRowTiles, int kColumnTiles, class Body>
__device__ __forceinline__ void each_element(const Body& body) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(i, n, e);
    }
  }
}

}  // namespace flashattn_ext
