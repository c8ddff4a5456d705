// A lane's number, and its place in accumulator tiles (tensor_core.cuh): of a 16x8 tile it holds rows g and g + 8 and
// columns 2t and 2t + 1.
#pragma once

namespace flashattn_ext {

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int t() { return threadIdx.x % 4; }

}  // namespace flashattn_ext
