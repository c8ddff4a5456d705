#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "cuda/tile/rows.cuh"

namespace flashattn_ext {
namespace {

constexpr int kThreads = 256;

// A NaN is larger than every number, as for torch.amax.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

// One thread block reduces the rows of one head of one batch entry or packed sequence. results: [B, Hq].
__global__ void __launch_bounds__(kThreads) max_logits_kernel(AttnParams p, float* results) {
  const int64_t b = blockIdx.x / p.heads_q, h = blockIdx.x % p.heads_q;
  int64_t begin = 0, end = p.seqlen_q;
  if (p.cu_seqlens_q) {  // whose values the host has not checked
    begin = max(int64_t{p.cu_seqlens_q[b]}, int64_t{0});
    end = min(int64_t{p.cu_seqlens_q[b + 1]}, p.total_q);
  }
  float largest = -infinity();
  for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
    largest = larger(*row_statistic(p.row_maxima, b, h, row), largest);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = larger(__shfl_xor_sync(~0u, largest, distance), largest);
  }
  __shared__ float of_warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = larger(of_warps[warp], largest);
  results[blockIdx.x] = largest;
}

}  // namespace

void cuda_max_logits(const AttnParams& p, float* results) {
  const int64_t blocks = p.batch * p.heads_q;
  if (blocks == 0) return;
  if (blocks > INT32_MAX) check_launch(cudaErrorInvalidConfiguration, "max_logits", p);
  max_logits_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p, results);
  check_launch(cudaGetLastError(), "max_logits", p);
}

}  // namespace flashattn_ext
