// The lanes of a warp: their numbers and places in accumulator tiles (tensor_core.cuh), and exchanges between them.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.cuh"

namespace flashattn_ext {

// A lane's number, and its place: of a 16x8 tile it holds rows g and g + 8 and columns 2t and 2t + 1.
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int t() { return threadIdx.x % 4; }

// The value of lane 0, in all lanes: the compiler then knows that it is warp-uniform.
template <class X>
__device__ __forceinline__ X uniform(X x) {
  return __shfl_sync(~0u, x, 0);
}

// An address in shared memory as lane 0 has it. Where control flow is too involved for the compiler to infer that, the
// values that depend on such an address (stages and operands of products) are then in uniform registers.
template <class X>
__device__ __forceinline__ X& uniform_shared(X& x) {
  return *static_cast<X*>(ptx::shared_pointer(uniform(ptx::shared_address(&x))));
}

// Over the four lanes that share an accumulator row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Four sums over these lanes; lane t gets the sum of x[t].
__device__ __forceinline__ float quad_sum_of_own(const float (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i] = (odd ? x[2 * i + 1] : x[2 * i]) + __shfl_xor_sync(~0u, odd ? x[2 * i] : x[2 * i + 1], 1);
  }
  return (upper ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, upper ? pair[0] : pair[1], 2);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Transposes four words in each of four lanes: lane t gets word t of every lane, in the order of lanes. kLanes: 1 for
// neighbouring lanes; or how far apart the lanes are, a power of two, with t the number among the four.
template <int kLanes = 1, class Word>
__device__ __forceinline__ void transpose_quad(Word (&x)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step * kLanes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const Word received = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step * kLanes);
      (upper ? x[i] : x[i + step]) = received;
    }
  }
}

}  // namespace flashattn_ext
