#include <algorithm>

#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext {
namespace {

constexpr int kWidenThreads = 256, kThreadRows = 4, kVectorColumns = 8;  // columns of a vector of bfloat16

// Widens `from` to a contiguous [B or 1][H][rows][columns] tensor whose padding columns are zero. A thread writes one
// vector of kThreadRows rows. blockIdx.y strides over the heads of all batch entries.
__global__ void __launch_bounds__(kWidenThreads)
    widen_kernel(const TensorView from, const TensorView to, int64_t rows, int64_t heads, int64_t all_heads,
                 int columns, int row_vectors) {
  const int block_rows = kWidenThreads / row_vectors;
  const int column = static_cast<int>(threadIdx.x) % row_vectors * kVectorColumns;
  const int64_t row = int64_t{blockIdx.x} * block_rows * kThreadRows + threadIdx.x / row_vectors;
  if (static_cast<int>(threadIdx.x) >= block_rows * row_vectors) return;
  for (int64_t head = blockIdx.y; head < all_heads; head += gridDim.y) {
    const int64_t b = head / heads, h = head % heads;
    uint4 vectors[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const bool exists = row + i * block_rows < rows;
      const Float8* const source = row_pointer<const Float8>(from, b, h, exists ? row + i * block_rows : 0) + column;
      vectors[i] = widen_vector(source, exists ? columns - column : 0);
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (row + i * block_rows >= rows) continue;
      *reinterpret_cast<uint4*>(row_pointer<__nv_bfloat16>(to, b, h, row + i * block_rows) + column) = vectors[i];
    }
  }
}

// Replaces the inputs of a call by copies that follow one another in the workspace.
class Widener {
 public:
  // copies: whether to make the copies, or only to count their bytes.
  Widener(const AttnParams& params, bool copies) : call_(params), copies_(copies) {
    widen(&call_.q, query_rows(params), params.heads_q, params.head_dim);
    widen(&call_.k, key_rows(params), params.heads_k, params.head_dim);
    widen(&call_.v, key_rows(params), params.heads_k, params.head_dim_v);
    call_.dtype = DType::kBFloat16;
  }
  const AttnParams& call() const { return call_; }

 private:
  void widen(TensorView* view, int64_t rows, int64_t heads, int64_t columns) {
    constexpr int64_t kGridHeight = 65535, kBytes = sizeof(__nv_bfloat16), kAlignment = 64;
    const int64_t vectors = (columns + kVectorColumns - 1) / kVectorColumns, padded = vectors * kVectorColumns;
    const int64_t all_heads = batch_entries(call_) * heads;
    const TensorView copy{call_.workspace, call_.is_varlen() ? 0 : heads * rows * padded, padded, rows * padded};
    const int64_t bytes = all_heads * rows * padded * kBytes;
    call_.workspace = static_cast<char*>(call_.workspace) + (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (copies_ && bytes > 0) {
      const int64_t block_rows = kWidenThreads / vectors * kThreadRows;
      const dim3 grid(static_cast<unsigned>((rows + block_rows - 1) / block_rows),
                      static_cast<unsigned>(std::min(all_heads, kGridHeight)));
      widen_kernel<<<grid, kWidenThreads, 0, static_cast<cudaStream_t>(call_.stream)>>>(
          *view, copy, rows, heads, all_heads, static_cast<int>(columns), static_cast<int>(vectors));
      check_launch(cudaGetLastError(), "widen", call_);
    }
    *view = copy;
  }

  AttnParams call_;
  const bool copies_;
};

}  // namespace

int64_t widened_bytes(const AttnParams& p) {
  return static_cast<char*>(Widener(p, false).call().workspace) - static_cast<char*>(p.workspace);
}
AttnParams widen_inputs(const AttnParams& p) { return Widener(p, true).call(); }

}  // namespace flashattn_ext
