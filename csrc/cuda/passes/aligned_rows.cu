#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext {
namespace {

constexpr int kCopyThreads = 256, kThreadRows = 4;

// Copies `from` to a contiguous [B or 1][H][rows][columns] tensor whose padding columns are zero. A thread copies one
// vector of kThreadRows rows and loads all of them before the first store. blockIdx.y strides over the heads of all
// batch entries. end: the end of the memory of `from`, beyond which nothing is read.
template <class T>
__global__ void __launch_bounds__(kCopyThreads)
    aligned_rows_kernel(const TensorView from, const TensorView to, int64_t rows, int64_t heads, int64_t all_heads,
                        int columns, int row_vectors, const void* end) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  const int block_rows = kCopyThreads / row_vectors, column = static_cast<int>(threadIdx.x) % row_vectors * kElements;
  const int64_t row = int64_t{blockIdx.x} * block_rows * kThreadRows + threadIdx.x / row_vectors;
  if (static_cast<int>(threadIdx.x) >= block_rows * row_vectors) return;
  for (int64_t head = blockIdx.y; head < all_heads; head += gridDim.y) {
    const int64_t b = head / heads, h = head % heads;
    UnalignedVector<T> vectors[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const T* const source = row_pointer<const T>(from, b, h, row + i * block_rows) + column;
      if (row + i * block_rows < rows) vectors[i].load(source, columns - column, end);
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      T* const target = row_pointer<T>(to, b, h, row + i * block_rows) + column;
      if (row + i * block_rows < rows) *reinterpret_cast<uint4*>(target) = vectors[i].get();
    }
  }
}

int64_t padded_columns(int64_t columns, int64_t element_bytes) {
  const int64_t elements = kVectorBytes / element_bytes;
  return (columns + elements - 1) / elements * elements;
}

// Replaces views that are not aligned by aligned copies, which follow one another in the workspace.
class Aligner {
 public:
  // copies: whether to make the copies, or only to count their bytes.
  Aligner(const AttnParams& params, bool copies)
      : p_(params), copies_(copies), next_(static_cast<char*>(params.workspace)) {}

  void align(TensorView* view, int64_t rows, int64_t heads, int64_t columns) {
    const int64_t bytes = element_bytes(p_);
    if (rows_are_aligned(*view, columns, bytes)) return;
    const int64_t padded = padded_columns(columns, bytes);
    const TensorView copy{next_, p_.is_varlen() ? 0 : heads * rows * padded, padded, rows * padded};
    const int64_t copy_bytes = batch_entries(p_) * heads * rows * padded * bytes;
    next_ += (copy_bytes + 63) / 64 * 64;
    if (copies_ && copy_bytes > 0) copy_rows(*view, copy, rows, heads, columns, padded * bytes / kVectorBytes);
    *view = copy;
  }
  void align_inputs(AttnParams* p) {
    align(&p->q, query_rows(*p), p->heads_q, p->head_dim);
    align(&p->k, key_rows(*p), p->heads_k, p->head_dim);
    align(&p->v, key_rows(*p), p->heads_k, p->head_dim_v);
  }
  void align_inputs(AttnGradParams* p) {
    align_inputs(static_cast<AttnParams*>(p));
    align(&p->dout, query_rows(*p), p->heads_q, p->head_dim_v);
  }
  void align_inputs(JvpParams* p) {
    align_inputs(static_cast<AttnParams*>(p));
    align_tangents(&p->tangents);
  }
  void align_inputs(SecondParams* p) {
    align_inputs(static_cast<AttnGradParams*>(p));
    align_tangents(&p->tangents);
  }

  int64_t bytes() const { return next_ - static_cast<char*>(p_.workspace); }
  void* end() const { return next_; }

 private:
  // The tangents of the inputs have their sizes.
  void align_tangents(AttnParams* tangents) {
    if (tangents->q.data) align(&tangents->q, query_rows(p_), p_.heads_q, p_.head_dim);
    if (tangents->k.data) align(&tangents->k, key_rows(p_), p_.heads_k, p_.head_dim);
    if (tangents->v.data) align(&tangents->v, key_rows(p_), p_.heads_k, p_.head_dim_v);
  }
  void copy_rows(const TensorView& from, const TensorView& to, int64_t rows, int64_t heads, int64_t columns,
                 int64_t row_vectors) const {
    constexpr int64_t kGridHeight = 65535;
    const int64_t bytes = element_bytes(p_), batch = batch_entries(p_), all_heads = batch * heads;
    const auto kernel = bytes == 4   ? aligned_rows_kernel<uint32_t>
                        : bytes == 2 ? aligned_rows_kernel<uint16_t>
                                     : aligned_rows_kernel<uint8_t>;
    const int64_t block_rows = kCopyThreads / row_vectors * kThreadRows;
    const dim3 grid(static_cast<unsigned>((rows + block_rows - 1) / block_rows),
                    static_cast<unsigned>(std::min(all_heads, kGridHeight)));
    kernel<<<grid, kCopyThreads, 0, static_cast<cudaStream_t>(p_.stream)>>>(
        from, to, rows, heads, all_heads, static_cast<int>(columns), static_cast<int>(row_vectors),
        end_of(from, batch, heads, rows, columns, bytes));
    check_launch(cudaGetLastError(), "aligned_rows", p_);
  }

  const AttnParams& p_;
  const bool copies_;
  char* next_;
};

template <class Params>
int64_t copy_bytes(Params p) {
  Aligner aligner(p, false);
  aligner.align_inputs(&p);
  return aligner.bytes();
}

template <class Params>
Params aligned(const Params& p) {
  Params call = p;
  Aligner aligner(p, true);
  aligner.align_inputs(&call);
  call.workspace = aligner.end();
  return call;
}

}  // namespace

int64_t aligned_copy_bytes(const AttnParams& p) { return copy_bytes(p); }
int64_t aligned_copy_bytes(const AttnGradParams& p) { return copy_bytes(p); }
int64_t aligned_copy_bytes(const JvpParams& p) { return copy_bytes(p); }
int64_t aligned_copy_bytes(const SecondParams& p) { return copy_bytes(p); }
AttnParams align_inputs(const AttnParams& p) { return aligned(p); }
AttnGradParams align_inputs(const AttnGradParams& p) { return aligned(p); }
JvpParams align_inputs(const JvpParams& p) { return aligned(p); }
SecondParams align_inputs(const SecondParams& p) { return aligned(p); }

}  // namespace flashattn_ext
