#include "call.h"
#include "launch.cuh"
#include "packed_rows.h"
#include "rows.cuh"

namespace flashattn_ext {
namespace {

// The tensors are contiguous, because this package allocated them.
void clear(const AttnParams& p, const TensorView& t, int64_t total, int64_t heads, int64_t columns) {
  if (!p.is_varlen() || total == 0) return;
  const size_t bytes = static_cast<size_t>(total * heads * columns * element_bytes(p));
  check_launch(cudaMemsetAsync(t.data, 0, bytes, static_cast<cudaStream_t>(p.stream)), "memset", p);
}

__global__ void clear_lse_kernel(float* lse, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += step) lse[i] = -infinity();
}

void clear_lse(const AttnParams& p) {
  const int64_t count = p.heads_q * p.total_q;
  if (!p.is_varlen() || count == 0) return;
  clear_lse_kernel<<<256, 256, 0, static_cast<cudaStream_t>(p.stream)>>>(static_cast<float*>(p.lse.data), count);
  check_launch(cudaGetLastError(), "clear_lse", p);
}

}  // namespace

void clear_packed_outputs(const AttnParams& p) {
  clear(p, p.out, p.total_q, p.heads_q, p.head_dim_v);
  clear_lse(p);
}

void clear_packed_gradients(const AttnGradParams& p) {
  clear(p, p.dq, p.total_q, p.heads_q, p.head_dim);
  clear(p, p.dk, p.total_k, p.heads_k, p.head_dim);
  clear(p, p.dv, p.total_k, p.heads_k, p.head_dim_v);
}

}  // namespace flashattn_ext
