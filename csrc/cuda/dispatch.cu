// The backends "cuda-sm80", every feature on every GPU of compute capability 8.0 and newer, and "cuda-sm90", the same
// with kernels of their own for Hopper where there are some.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../backend.h"
#include "../dropout.h"
#include "../seqlen.h"
#include "common/aligned_rows.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "sm80/kernels.h"
#include "sm90/kernels.h"

namespace flashattn_ext {
namespace {

int64_t element_bytes(const AttnParams& p) { return p.dtype == DType::kFloat32 ? 4 : 2; }

// --- the kernels' table
// -----------------------------------------------------------------------------------------------------------------

struct Kernels {
  size_t forward_bytes;
  void (*forward)(const AttnParams&);
  size_t (*backward_bytes)(const AttnGradParams&);
  void (*backward)(const AttnGradParams&);
};

template <class T, int kHeadDim>
struct Sm80 {
  static constexpr Kernels kKernels{0, sm80::forward<T, kHeadDim>, sm80::backward_bytes<T, kHeadDim>,
                                    sm80::backward<T, kHeadDim>};
};

template <class T, int kHeadDim>
struct Sm90 {  // 16-bit types
  static constexpr Kernels kKernels{sm90::kForwardBytes, sm90::forward<T, kHeadDim>, sm90::backward_bytes<T, kHeadDim>,
                                    sm90::backward<T, kHeadDim>};
};
template <int kHeadDim>
struct Sm90<float, kHeadDim> : Sm80<float, kHeadDim> {};

template <template <class, int> class Architecture, class T>
Kernels kernels_of_head_dim(int64_t head_dim) {
  if (head_dim <= 64) return Architecture<T, 64>::kKernels;
  if (head_dim <= 96) return Architecture<T, 96>::kKernels;
  if (head_dim <= 128) return Architecture<T, 128>::kKernels;
  if (head_dim <= 144) return Architecture<T, 144>::kKernels;
  if (head_dim <= 192) return Architecture<T, 192>::kKernels;
  return Architecture<T, 256>::kKernels;
}

template <template <class, int> class Architecture>
Kernels kernels_of(const AttnParams& p) {
  const int64_t head_dim = std::max(p.head_dim, p.head_dim_v);
  if (p.dtype == DType::kFloat16) return kernels_of_head_dim<Architecture, __half>(head_dim);
  if (p.dtype == DType::kBFloat16) return kernels_of_head_dim<Architecture, __nv_bfloat16>(head_dim);
  return kernels_of_head_dim<Architecture, float>(head_dim);
}

// --- inputs that cannot be read in whole vectors
// ----------------------------------------------------------------------------------------

// Replaces views of unaligned rows by aligned copies at `next` in the workspace, and counts the bytes.
class AlignedRows {
 public:
  explicit AlignedRows(const AttnParams& params) : p_(params), next_(static_cast<char*>(params.workspace)) {}

  // rows: of one batch entry, or of all packed sequences. Copies when `run`.
  TensorView operator()(const TensorView& view, int64_t rows, int64_t heads, int64_t columns, bool run) {
    const int64_t bytes = element_bytes(p_);
    if (rows_are_aligned(view, columns, bytes)) return view;
    const int64_t padded = padded_columns(columns, bytes), batch = p_.is_varlen() ? 1 : p_.batch;
    TensorView copy{next_, p_.is_varlen() ? 0 : heads * rows * padded, padded, rows * padded};
    const int64_t copy_bytes = batch * heads * rows * padded * bytes;
    next_ += (copy_bytes + 63) / 64 * 64;
    if (run && copy_bytes > 0) copy_rows(view, copy, rows, heads, batch, columns, padded * bytes / kVectorBytes);
    return copy;
  }
  int64_t bytes() const { return next_ - static_cast<char*>(p_.workspace); }
  void* end() const { return next_; }

 private:
  void copy_rows(const TensorView& from, const TensorView& to, int64_t rows, int64_t heads, int64_t batch,
                 int64_t columns, int64_t row_vectors) const {
    constexpr int64_t kGridHeight = 65535;
    const int64_t bytes = element_bytes(p_), all_heads = batch * heads;
    const auto kernel = bytes == 4 ? aligned_rows_kernel<uint32_t> : aligned_rows_kernel<uint16_t>;
    const int64_t block_rows = kCopyThreads / row_vectors * kThreadRows;
    const dim3 grid(static_cast<unsigned>((rows + block_rows - 1) / block_rows),
                    static_cast<unsigned>(std::min(all_heads, kGridHeight)));
    kernel<<<grid, kCopyThreads, 0, static_cast<cudaStream_t>(p_.stream)>>>(
        from, to, rows, heads, all_heads, static_cast<int>(columns), static_cast<int>(row_vectors),
        end_of(from, batch, heads, rows, columns, bytes));
    check_launch(cudaGetLastError(), "aligned_rows", p_);
  }

  const AttnParams& p_;
  char* next_;
};

int64_t query_rows(const AttnParams& p) { return p.is_varlen() ? p.total_q : p.seqlen_q; }
int64_t key_rows(const AttnParams& p) { return p.is_varlen() ? p.total_k : p.seqlen_k; }

// The call with aligned q, k and v. The copies lie first in the workspace, that of the returned call behind them.
void align_inputs(AttnParams* p, AlignedRows* aligned, bool run) {
  p->q = (*aligned)(p->q, query_rows(*p), p->heads_q, p->head_dim, run);
  p->k = (*aligned)(p->k, key_rows(*p), p->heads_k, p->head_dim, run);
  p->v = (*aligned)(p->v, key_rows(*p), p->heads_k, p->head_dim_v, run);
}

AttnParams aligned_call(const AttnParams& p, bool run, int64_t* bytes) {
  AttnParams call = p;
  AlignedRows aligned(p);
  align_inputs(&call, &aligned, run);
  call.workspace = aligned.end();
  *bytes = aligned.bytes();
  return call;
}

// Also dout; `out` is read once, where it lies.
AttnGradParams aligned_call(const AttnGradParams& p, bool run, int64_t* bytes) {
  AttnGradParams call = p;
  AlignedRows aligned(p);
  align_inputs(&call, &aligned, run);
  call.dout = aligned(p.dout, query_rows(p), p.heads_q, p.head_dim_v, run);
  call.workspace = aligned.end();
  *bytes = aligned.bytes();
  return call;
}

// --- packed rows that belong to no sequence
// -----------------------------------------------------------------------------------------------

// Only the device knows which rows those are: behind the last sequence, and anywhere when cu_seqlens lies. They get
// what a row that sees nothing gets, in tensors that are contiguous because this package allocated them.
void clear_packed(const AttnParams& p, const TensorView& t, int64_t total, int64_t heads, int64_t columns) {
  if (!p.is_varlen() || total == 0) return;
  const size_t bytes = static_cast<size_t>(total * heads * columns * element_bytes(p));
  check_launch(cudaMemsetAsync(t.data, 0, bytes, static_cast<cudaStream_t>(p.stream)), "memset", p);
}

__global__ void clear_lse_kernel(float* lse, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += step) lse[i] = -infinity();
}

void clear_packed_lse(const AttnParams& p) {
  const int64_t count = p.heads_q * p.total_q;
  if (!p.is_varlen() || count == 0) return;
  clear_lse_kernel<<<256, 256, 0, static_cast<cudaStream_t>(p.stream)>>>(static_cast<float*>(p.lse.data), count);
  check_launch(cudaGetLastError(), "clear_lse", p);
}

// --- the backend
// ------------------------------------------------------------------------------------------------------------------

int compute_capability() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

std::string found(int capability) {
  return "found " + std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string supports_sm80(const AttnParams& p, bool) {
  if (p.dtype == DType::kFloat64) return "float64 is supported on the CPU only; use float32";
  const int capability = compute_capability();
  if (capability >= 80) return {};
  return "needs a GPU of compute capability 8.0 or newer, " + found(capability) +
         "; use torch's scaled_dot_product_attention there";
}

template <template <class, int> class Architecture>
size_t forward_workspace_bytes(const AttnParams& p) {
  int64_t bytes = 0;
  aligned_call(p, false, &bytes);
  return static_cast<size_t>(bytes) + kernels_of<Architecture>(p).forward_bytes;
}

template <template <class, int> class Architecture>
size_t backward_workspace_bytes(const AttnGradParams& p) {
  int64_t bytes = 0;
  aligned_call(p, false, &bytes);
  return static_cast<size_t>(bytes) + kernels_of<Architecture>(p).backward_bytes(p);
}

template <template <class, int> class Architecture>
void forward(const AttnParams& p) {
  int64_t bytes = 0;
  const AttnParams call = aligned_call(p, true, &bytes);
  clear_packed(p, p.out, p.total_q, p.heads_q, p.head_dim_v);
  clear_packed_lse(p);
  // The kernels see padded head dims of q, k and v; the columns beyond are zeros.
  kernels_of<Architecture>(call).forward(call);
}

template <template <class, int> class Architecture>
void backward(const AttnGradParams& p) {
  int64_t bytes = 0;
  const AttnGradParams call = aligned_call(p, true, &bytes);
  clear_packed(p, p.dq, p.total_q, p.heads_q, p.head_dim);
  clear_packed(p, p.dk, p.total_k, p.heads_k, p.head_dim);
  clear_packed(p, p.dv, p.total_k, p.heads_k, p.head_dim_v);
  kernels_of<Architecture>(call).backward(call);
}

__global__ void dropout_mask_kernel(const AttnParams p, bool* mask, int64_t count) {
  const PhiloxKey key = philox_key(static_cast<uint64_t>(p.rng_state[0]), static_cast<uint64_t>(p.rng_state[1]));
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t j = i % p.seqlen_k, row = i / p.seqlen_k % p.seqlen_q, head = i / p.seqlen_k / p.seqlen_q;
    mask[i] = dropout_keep(key, p.dropout_threshold, head / p.heads_q, head % p.heads_q, row, j);
  }
}

void dropout_mask(const AttnParams& p, bool* mask) {
  const int64_t count = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k;
  if (count == 0) return;
  dropout_mask_kernel<<<1024, 256, 0, static_cast<cudaStream_t>(p.stream)>>>(p, mask, count);
  check_launch(cudaGetLastError(), "dropout_mask", p);
}

__global__ void rng_state_kernel(int64_t* state, const RngSource source) {
  state[0] = source.seed_pointer ? *source.seed_pointer : source.seed;
  state[1] = source.offset_pointer ? *source.offset_pointer + source.offset : source.offset;
}

void write_rng_state(const AttnParams& p, const RngSource& source, int64_t* state) {
  rng_state_kernel<<<1, 1, 0, static_cast<cudaStream_t>(p.stream)>>>(state, source);
  check_launch(cudaGetLastError(), "rng_state", p);
}

template <template <class, int> class Architecture>
constexpr Backend backend(const char* name, std::string (*supports)(const AttnParams&, bool)) {
  return {name,
          "cuda",
          supports,
          forward_workspace_bytes<Architecture>,
          backward_workspace_bytes<Architecture>,
          forward<Architecture>,
          backward<Architecture>,
          dropout_mask,
          write_rng_state};
}

}  // namespace

const Backend& cuda_sm80_backend() {
  static const Backend sm80 = backend<Sm80>("cuda-sm80", supports_sm80);
  return sm80;
}

#if defined(FLASHATTN_EXT_SM90)
namespace {

std::string supports_sm90(const AttnParams& p, bool backward) {
  const int capability = compute_capability();
  if (capability == 90) return supports_sm80(p, backward);
  return "needs a GPU of compute capability 9.0, " + found(capability) + "; use 'cuda-sm80' there";
}

}  // namespace

const Backend& cuda_sm90_backend() {
  static const Backend sm90 = backend<Sm90>("cuda-sm90", supports_sm90);
  return sm90;
}
#endif

}  // namespace flashattn_ext
