// Last stage of the backward: dq from its fp32 sums, and the gradient of the sink, -sum of exp(sink - lse) * delta over
// all rows of a head in a fixed order.
#pragma once

#include "backward_prepare.cuh"

namespace flashattn_ext::sm80 {

template <class T>
__global__ void __launch_bounds__(kPrepareWarps * 32)
    dq_finish_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardShared shared) {
  const int64_t index = blockIdx.x * int64_t{kPrepareWarps} + threadIdx.x / 32;
  if (index >= p.heads_q * shared.rows) return;
  const int64_t h = index / shared.rows, flat = index % shared.rows;
  const int64_t b = p.is_varlen() ? 0 : flat / p.seqlen_q, row = p.is_varlen() ? flat : flat % p.seqlen_q;
  const float* from = shared.dq + index * shared.columns;
  T* to = row_pointer<T>(p.dq, b, h, row);
  const float scale = static_cast<float>(p.softmax_scale);
  const int columns = static_cast<int>(p.head_dim), lane = threadIdx.x % 32;
  if (columns % 2 == 0) {  // dq is contiguous: pairs are aligned
    for (int c = 2 * lane; c < columns; c += 64) {
      const float2 x = *reinterpret_cast<const float2*>(from + c);
      TensorCore<T>::store_pair(to + c, x.x * scale, x.y * scale);
    }
  } else {
    for (int c = lane; c < columns; c += 32) narrow(from[c] * scale, to + c);
  }
}

constexpr int kSinkThreads = 512;

static __global__ void __launch_bounds__(kSinkThreads)
    dsink_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardShared shared) {
  __shared__ double part[kSinkThreads];
  const int64_t h = blockIdx.x;
  const float sink = static_cast<const float*>(p.sink)[h];
  double sum = 0;
  for (int64_t i = threadIdx.x; sink > -infinity() && i < shared.rows; i += kSinkThreads) {
    const int64_t b = p.is_varlen() ? 0 : i / p.seqlen_q, row = p.is_varlen() ? i : i % p.seqlen_q;
    const float lse = *row_statistic(p.lse, b, h, row);
    if (lse == -infinity()) continue;  // a packed row of no sequence
    sum -= static_cast<double>(expf(sink - lse)) * shared.delta[h * shared.rows + i];
  }
  part[threadIdx.x] = sum;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<float*>(p.dsink)[h] = static_cast<float>(part[0]);
}

}  // namespace flashattn_ext::sm80
