#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "rules/bias.h"

namespace flashattn_ext {
namespace {

constexpr int kFillThreads = 256, kMostTensors = 4;

// A packed tensor [heads][rows] of rows of row_bytes bytes. Strides are in bytes, too.
struct PackedRows {
  char* data;
  int64_t row_stride, head_stride, row_bytes, rows, heads;
  const int32_t* cu_seqlens;
  uint32_t bits;  // what the rows are filled with
};
struct Tensors {
  PackedRows of[kMostTensors];
};

// Rows below `first` and from `last` on.
template <class Unit>
__device__ void fill(const PackedRows& t, int64_t first, int64_t last, const Unit& value) {
  const int64_t units = t.row_bytes / static_cast<int64_t>(sizeof(Unit)), rows = first + t.rows - last;
  const int64_t step = int64_t{gridDim.x} * kFillThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFillThreads + threadIdx.x; i < t.heads * rows * units; i += step) {
    const int64_t index = i / units % rows, row = index < first ? index : last + index - first;
    char* const start = t.data + i / units / rows * t.head_stride + row * t.row_stride;
    reinterpret_cast<Unit*>(start)[i % units] = value;
  }
}

// blockIdx.y is the tensor.
__global__ void __launch_bounds__(kFillThreads) unowned_rows_kernel(const Tensors tensors, int64_t batch) {
  const PackedRows& t = tensors.of[blockIdx.y];
  const auto clamped = [&t](int64_t row) { return row < 0 ? 0 : (row > t.rows ? t.rows : row); };
  int64_t first = clamped(t.cu_seqlens[0]), last = clamped(t.cu_seqlens[batch]);
  if (last < first) first = last = 0;  // invalid offsets: all rows
  const int64_t together = reinterpret_cast<int64_t>(t.data) | t.row_stride | t.head_stride | t.row_bytes;
  if (together % 16 == 0) {
    fill(t, first, last, make_uint4(t.bits, t.bits, t.bits, t.bits));
  } else if (together % 4 == 0) {
    fill(t, first, last, t.bits);
  } else {
    fill(t, first, last, static_cast<uint16_t>(t.bits));
  }
}

PackedRows rows_of(const AttnParams& p, const TensorView& t, int64_t heads, int64_t columns, int64_t bytes) {
  return {static_cast<char*>(t.data),
          t.row_stride * bytes,
          t.head_stride * bytes,
          columns * bytes,
          p.total_q,
          heads,
          p.cu_seqlens_q,
          0};
}

PackedRows rows_of_keys(const AttnParams& p, const TensorView& t, int64_t columns) {
  PackedRows rows = rows_of(p, t, p.heads_k, columns, element_bytes(p));
  rows.rows = p.total_k;
  rows.cu_seqlens = p.cu_seqlens_k;
  return rows;
}

void run(const AttnParams& p, const Tensors& tensors, unsigned count) {
  const dim3 grid(static_cast<unsigned>(multiprocessors()), count);
  unowned_rows_kernel<<<grid, kFillThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(tensors, p.batch);
  check_launch(cudaGetLastError(), "unowned_rows", p);
}

}  // namespace

void set_unowned_rows(const AttnParams& p) {
  if (!p.is_varlen()) return;
  PackedRows lse{static_cast<char*>(p.lse.data),
                 4,
                 p.lse.head_stride * 4,
                 4,
                 p.total_q,
                 p.heads_q,
                 p.cu_seqlens_q,
                 0xFF800000};  // -inf
  Tensors tensors{{rows_of(p, p.out, p.heads_q, p.head_dim_v, out_bytes(p)), lse}};
  unsigned count = 2;
  if (p.centres.data) tensors.of[count++] = rows_of(p, p.centres, p.heads_q, kCentres, 4);
  if (p.lse_words.data) {  // weights of 0, as those of LseWords::of_no_key
    PackedRows words = rows_of(p, p.lse_words, p.heads_q, 2, 4);
    words.bits = 0x7F800000;  // +inf
    tensors.of[count++] = words;
  }
  run(p, tensors, count);
}

void set_unowned_rows(const AttnGradParams& p) {
  if (!p.is_varlen()) return;
  const Tensors tensors{{rows_of(p, p.dq, p.heads_q, p.head_dim, element_bytes(p)), rows_of_keys(p, p.dk, p.head_dim),
                         rows_of_keys(p, p.dv, p.head_dim_v)}};
  run(p, tensors, 3);
}

}  // namespace flashattn_ext
