#include <algorithm>
#include <limits>

#include "../../key_locator.h"
#include "../common/aligned_rows.h"
#include "../common/call.h"
#include "../common/device.h"
#include "../common/launch.cuh"
#include "../common/rows.cuh"
#include "../common/tile_order.cuh"
#include "kernels.h"
#include "prefill.h"

namespace flashattn_ext::decode {
namespace {

constexpr int kThreads = 256;

// Rows from one entry of a cache to the next; 0 where there is no such number.
int64_t entry_rows(const DecodeParams& p, const TensorView& t) {
  if (p.cache.entries == 1) return p.cache.page_size;
  if (t.row_stride <= 0 || t.batch_stride % t.row_stride != 0) return 0;
  const int64_t rows = t.batch_stride / t.row_stride;
  return rows >= p.cache.page_size ? rows : 0;
}

// Whether the rows of all batch entries follow one another.
bool is_packed(const DecodeParams& p, const TensorView& t) {
  return p.batch == 1 || t.batch_stride == p.seqlen_q * t.row_stride;
}

// The arrays at the beginning of the workspace.
struct Arrays {
  int32_t *cu_seqlens_q, *cu_seqlens_k;  // [2 B + 1]
  float* lse;                            // [Hq, B * Sq]
  char* q;                               // rotated, [B * Sq, Hq, D]
  char* end;

  explicit Arrays(const DecodeParams& p) {
    char* next = static_cast<char*>(p.workspace);
    const auto take = [&next](int64_t bytes) {
      char* const begin = next;
      next += (bytes + 63) / 64 * 64;
      return begin;
    };
    const int64_t rows = p.batch * p.seqlen_q;
    cu_seqlens_q = reinterpret_cast<int32_t*>(take((2 * p.batch + 1) * 4));
    cu_seqlens_k = reinterpret_cast<int32_t*>(take((2 * p.batch + 1) * 4));
    lse = reinterpret_cast<float*>(take(rows * p.heads_q * 4));
    q = take(p.rotary.cos ? rows * p.heads_q * p.head_dim * element_bytes(p) : 0);
    end = next;
  }
};

__global__ void __launch_bounds__(kThreads)
    sequences_kernel(const __grid_constant__ DecodeParams p, int32_t* cu_seqlens_q, int32_t* cu_seqlens_k,
                     int64_t entry_rows) {
  const int b = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int queries = static_cast<int>(p.seqlen_q);
  if (b == static_cast<int>(p.batch)) cu_seqlens_q[2 * b] = cu_seqlens_k[2 * b] = b * queries;
  if (b >= static_cast<int>(p.batch)) return;
  const KeyLocator keys(p, b);
  const KeyRun first = keys.run(0, 1);
  const int64_t start = first.entry * entry_rows + first.row;
  cu_seqlens_q[2 * b] = b * queries;
  cu_seqlens_q[2 * b + 1] = (b + 1) * queries;
  cu_seqlens_k[2 * b] = static_cast<int32_t>(start);
  cu_seqlens_k[2 * b + 1] = static_cast<int32_t>(start + keys.length);
}

// blockIdx.y: the query head.
__global__ void __launch_bounds__(kThreads)
    place_lse_kernel(const __grid_constant__ DecodeParams p, const float* packed, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, h = blockIdx.y;
  if (row < rows) *row_statistic(p.lse, row / p.seqlen_q, h, row % p.seqlen_q) = packed[h * rows + row];
}

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

}  // namespace

bool is_prefill(const DecodeParams& p) {
  // Fewer queries, or fewer tiles of them than half of the multiprocessors, leave the forward kernels idle; splitting
  // keys does not.
  constexpr int64_t kManyQueries = 65, kTileQueries = 128, kMostColumns = 256;
  if (p.is_varlen() || p.cache.block_table || p.has_intervals() || p.num_splits > 1 || p.cache.entries == 0)
    return false;
  if (p.seqlen_q < kManyQueries || std::max(p.head_dim, p.head_dim_v) > kMostColumns) return false;
  if (2 * p.batch * p.heads_q * tile_count(p.seqlen_q, kTileQueries) < multiprocessors()) return false;
  const int64_t rows = entry_rows(p, p.k), bytes = element_bytes(p);
  return rows > 0 && rows == entry_rows(p, p.v) && rows * p.cache.entries <= std::numeric_limits<int32_t>::max() &&
         p.batch * p.seqlen_q <= std::numeric_limits<int32_t>::max() && p.alibi_batch_stride % 2 == 0 &&
         rows_are_aligned(p.k, p.head_dim, bytes) && rows_are_aligned(p.v, p.head_dim_v, bytes) &&
         (p.rotary.cos || is_packed(p, p.q)) && is_packed(p, p.out);
}

AttnParams packed_call(const DecodeParams& p) {
  const Arrays arrays(p);
  AttnParams packed = p;
  packed.batch = 2 * p.batch;
  packed.cu_seqlens_q = arrays.cu_seqlens_q;
  packed.cu_seqlens_k = arrays.cu_seqlens_k;
  packed.total_q = p.batch * p.seqlen_q;
  packed.total_k = (p.cache.entries - 1) * entry_rows(p, p.k) + p.cache.page_size;
  packed.seqlen_k = p.cache.page_size;
  if (p.rotary.cos) packed.q = {arrays.q, 0, p.heads_q * p.head_dim, p.head_dim};
  packed.q.batch_stride = packed.k.batch_stride = packed.v.batch_stride = packed.out.batch_stride = 0;
  packed.lse = {arrays.lse, 0, packed.total_q};
  packed.alibi_batch_stride = p.alibi_batch_stride / 2;
  packed.workspace = arrays.end;
  return packed;
}

size_t prefill_bytes(const DecodeParams& p) {
  return static_cast<size_t>(Arrays(p).end - static_cast<char*>(p.workspace));
}

AttnParams begin_prefill(const DecodeParams& p) {
  const Arrays arrays(p);
  const int64_t row = p.heads_q * p.head_dim;
  append(p, {arrays.q, p.seqlen_q * row, row, p.head_dim});
  sequences_kernel<<<blocks_of(p.batch + 1), kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
      p, arrays.cu_seqlens_q, arrays.cu_seqlens_k, entry_rows(p, p.k));
  check_launch(cudaGetLastError(), "prefill_sequences", p);
  return packed_call(p);
}

void finish_prefill(const DecodeParams& p, const AttnParams& packed) {
  const dim3 grid(blocks_of(packed.total_q), static_cast<unsigned>(p.heads_q));
  place_lse_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
      p, static_cast<const float*>(packed.lse.data), packed.total_q);
  check_launch(cudaGetLastError(), "prefill_lse", p);
}

}  // namespace flashattn_ext::decode
