#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "rules/dropout.h"

namespace flashattn_ext {
namespace {

__global__ void dropout_mask_kernel(const AttnParams p, bool* mask, int64_t count) {
  const PhiloxKey key = philox_key(p);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t j = i % p.seqlen_k, row = i / p.seqlen_k % p.seqlen_q, head = i / p.seqlen_k / p.seqlen_q;
    mask[i] = dropout_keep(key, p.dropout_threshold, head / p.heads_q + p.origin.batch,
                           head % p.heads_q + p.origin.head, row + p.origin.row, j + p.origin.key);
  }
}

}  // namespace

void cuda_dropout_mask(const AttnParams& p, bool* mask) {
  const int64_t count = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k;
  if (count == 0) return;
  dropout_mask_kernel<<<1024, 256, 0, static_cast<cudaStream_t>(p.stream)>>>(p, mask, count);
  check_launch(cudaGetLastError(), "dropout_mask", p);
}

}  // namespace flashattn_ext
