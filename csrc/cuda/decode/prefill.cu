#include <algorithm>
#include <limits>

#include "../../key_locator.h"
#include "../common/aligned_rows.h"
#include "../common/call.h"
#include "../common/device.h"
#include "../common/fp8.cuh"
#include "../common/launch.cuh"
#include "../common/rows.cuh"
#include "../common/tile.cuh"
#include "../common/tile_order.cuh"
#include "kernels.h"
#include "prefill.h"

namespace flashattn_ext::decode {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // rows of a packed tensor

// Distance between cache entries in rows; 0 if it is not a whole number of rows, or if entries overlap.
int64_t entry_rows(const DecodeParams& p, const TensorView& t) {
  if (p.cache.entries == 1) return p.cache.page_size;
  if (t.row_stride <= 0 || t.batch_stride % t.row_stride != 0) return 0;
  const int64_t rows = t.batch_stride / t.row_stride;
  return rows >= p.cache.page_size ? rows : 0;
}

// Whether the rows of all batch entries are equally spaced, so that the batch can be read as one packed tensor.
bool is_packed(const DecodeParams& p, const TensorView& t) {
  return p.is_varlen() || p.batch == 1 || t.batch_stride == p.seqlen_q * t.row_stride;
}

// Keys and values in fp8 are gathered from any cache, and widened on the way.
FLASHATTN_HOST_DEVICE bool gathers(const DecodeParams& p) { return p.cache.block_table != nullptr || p.is_fp8; }

// Rows between the starts of successive sequences (gathered keys) or cache entries in the keys of the varlen call, and
// the total number of rows.
int64_t sequence_rows(const DecodeParams& p) { return gathers(p) ? p.cache.capacity() : entry_rows(p, p.k); }
int64_t all_rows(const DecodeParams& p) {
  if (gathers(p)) return p.batch * p.cache.capacity();
  return (p.cache.entries - 1) * entry_rows(p, p.k) + p.cache.page_size;
}

int64_t packed_queries(const DecodeParams& p) { return p.is_varlen() ? p.total_q : p.batch * p.seqlen_q; }

// The arrays at the beginning of the workspace.
struct Arrays {
  int32_t *cu_seqlens_q, *cu_seqlens_k;  // [2 B + 1]
  float *lse, *row_maxima;               // [Hq, B * Sq]; unused if the decoding call is varlen
  char *q, *k, *v;                       // rotated queries and gathered keys and values, [rows, heads, columns]
  char* end;

  explicit Arrays(const DecodeParams& p) {
    char* next = static_cast<char*>(p.workspace);
    const auto take = [&next](int64_t bytes) {
      char* const begin = next;
      next += (bytes + 63) / 64 * 64;
      return begin;
    };
    const int64_t key_row = p.heads_k * element_bytes(p), gathered = gathers(p) ? all_rows(p) : 0;
    const int64_t query_row = p.heads_q * p.head_dim * element_bytes(p);
    cu_seqlens_q = reinterpret_cast<int32_t*>(take((2 * p.batch + 1) * 4));
    cu_seqlens_k = reinterpret_cast<int32_t*>(take((2 * p.batch + 1) * 4));
    lse = reinterpret_cast<float*>(take(p.is_varlen() ? 0 : packed_queries(p) * p.heads_q * 4));
    row_maxima =
        reinterpret_cast<float*>(take(p.is_varlen() || !p.row_maxima.data ? 0 : packed_queries(p) * p.heads_q * 4));
    q = take(p.rotary.cos ? packed_queries(p) * query_row : 0);
    k = take(gathered * key_row * p.head_dim);
    v = take(gathered * key_row * p.head_dim_v);
    end = next;
  }
};

// Computes the cu_seqlens of the varlen call. rows: sequence_rows(p).
__global__ void __launch_bounds__(kThreads)
    sequences_kernel(const __grid_constant__ DecodeParams p, int32_t* cu_seqlens_q, int32_t* cu_seqlens_k,
                     int64_t rows) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= p.batch) {
    if (b == p.batch) cu_seqlens_q[2 * b] = cu_seqlens_k[2 * b] = 0;  // the sequence after the last has no rows
    return;
  }
  const KeyLocator keys(p, b);
  const Sequence queries = query_sequence(p, b);
  const int64_t first_row = keys.first_new_row + keys.new_keys - keys.length;
  const int64_t start = (gathers(p) ? b : keys.run_of_row(0, 1).entry) * rows + first_row;
  const int64_t first_query = p.is_varlen() ? queries.start : b * p.seqlen_q;
  cu_seqlens_q[2 * b] = static_cast<int32_t>(first_query);
  cu_seqlens_q[2 * b + 1] = static_cast<int32_t>(first_query + queries.length);
  cu_seqlens_k[2 * b] = static_cast<int32_t>(start);
  cu_seqlens_k[2 * b + 1] = static_cast<int32_t>(start + keys.length);
}

// Copies the keys and values of sequence blockIdx.y to contiguous rows. A warp copies one row of all heads in 16-byte
// vectors. vectors, vectors_v: vectors per row of one head. kIsFp8: bfloat16 copies of fp8.
template <bool kIsFp8>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ DecodeParams p, uint4* k, uint4* v,
                                                          int vectors, int vectors_v, int vector_elements) {
  constexpr int kWarps = kThreads / 32;
  const int64_t b = blockIdx.y;
  const KeyLocator keys(p, b);
  const int64_t end = keys.first_new_row + keys.new_keys, first = end - keys.length;
  const int heads = static_cast<int>(p.heads_k);
  const auto copy = [&](uint4* to, const TensorView& from, const KeyRun& at, int count) {
    for (int i = static_cast<int>(threadIdx.x) % 32; i < heads * count; i += 32) {
      const int64_t element = at.entry * from.batch_stride + at.row * from.row_stride + i / count * from.head_stride;
      if constexpr (kIsFp8) {
        to[i] = widen_vector(static_cast<const Float8*>(from.data) + element + i % count * vector_elements, 8);
      } else {
        to[i] = static_cast<const uint4*>(from.data)[element / vector_elements + i % count];
      }
    }
  };
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = first + static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < end; row += step) {
    const KeyRun at = keys.run_of_row(row, 1);
    const int64_t to = b * p.cache.capacity() + row;
    copy(k + to * heads * vectors, p.k, at, vectors);
    copy(v + to * heads * vectors_v, p.v, at, vectors_v);
  }
}

// Copies a row statistic from the packed layout [Hq, rows] to `to`. blockIdx.y: the query head.
__global__ void __launch_bounds__(kThreads)
    place_statistic_kernel(RowView to, const float* packed, int64_t rows, int64_t seqlen_q) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, h = blockIdx.y;
  if (row < rows) *row_statistic(to, row / seqlen_q, h, row % seqlen_q) = packed[h * rows + row];
}

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

void gather(const DecodeParams& p, const Arrays& arrays) {
  constexpr int64_t kRowsOfBlock = 32;
  const int elements = kVectorBytes / static_cast<int>(element_bytes(p));
  const dim3 grid(static_cast<unsigned>(tile_count(p.cache.capacity(), kRowsOfBlock)), static_cast<unsigned>(p.batch));
  const auto kernel = p.is_fp8 ? gather_kernel<true> : gather_kernel<false>;
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
      p, reinterpret_cast<uint4*>(arrays.k), reinterpret_cast<uint4*>(arrays.v),
      static_cast<int>(p.head_dim) / elements, static_cast<int>(p.head_dim_v) / elements, elements);
  check_launch(cudaGetLastError(), "prefill_gather", p);
}

}  // namespace

bool is_prefill(const DecodeParams& p) {
  // With fewer queries, or with fewer query tiles than half of the multiprocessors, the forward kernels do not fill the
  // GPU; split-KV does. Gathering pages pays off if every key is used by many rows.
  constexpr int64_t kManyQueries = 65, kManyRows = 1024, kTileQueries = 128, kMostSequences = 65535;
  const int64_t bytes = element_bytes(p);
  if (p.num_splits > 0) return false;  // bit-identical in every batch, so the kernel must not depend on the batch size
  if (p.seqlen_q < kManyQueries || p.has_intervals() || p.cache.entries == 0) return false;
  if (p.alibi_batch_stride % 2 != 0) return false;
  // Fp8 queries are not widened here, and keys and values are widened in whole vectors only. The packed call has two
  // sequences for each of this call, so that the batch strides of descales are halved.
  const bool odd_descales = (p.descale_k.batch_stride | p.descale_v.batch_stride) % 2 != 0;
  if (p.is_fp8 && (p.dtype == DType::kFloat8 || odd_descales || (p.head_dim | p.head_dim_v) % 8 != 0)) return false;
  if (2 * p.batch * p.heads_q * tile_count(p.seqlen_q, kTileQueries) < multiprocessors()) return false;
  const bool aligned = rows_are_aligned(p.k, p.head_dim, bytes) && rows_are_aligned(p.v, p.head_dim_v, bytes);
  if (!p.is_fp8 && !aligned) return false;
  if (!is_packed(p, p.out) || !(p.rotary.cos || is_packed(p, p.q)) || packed_queries(p) > kMostRows) return false;
  if (gathers(p)) {
    // The copy must not exceed the size of the cache: block tables may have room for far more pages.
    return p.seqlen_q * p.group_size() >= kManyRows && p.batch <= kMostSequences &&
           all_rows(p) <= std::min(kMostRows, p.cache.entries * p.cache.page_size);
  }
  return entry_rows(p, p.k) > 0 && entry_rows(p, p.k) == entry_rows(p, p.v) && all_rows(p) <= kMostRows;
}

AttnParams packed_call(const DecodeParams& p) {
  const Arrays arrays(p);
  AttnParams packed = p;
  packed.batch = 2 * p.batch;
  packed.cu_seqlens_q = arrays.cu_seqlens_q;
  packed.cu_seqlens_k = arrays.cu_seqlens_k;
  packed.total_q = packed_queries(p);
  packed.total_k = all_rows(p);
  packed.seqlen_k = p.cache.capacity();
  if (p.rotary.cos) packed.q = {arrays.q, 0, p.heads_q * p.head_dim, p.head_dim};
  if (gathers(p)) {
    packed.k = {arrays.k, 0, p.heads_k * p.head_dim, p.head_dim};
    packed.v = {arrays.v, 0, p.heads_k * p.head_dim_v, p.head_dim_v};
  }
  packed.q.batch_stride = packed.k.batch_stride = packed.v.batch_stride = packed.out.batch_stride = 0;
  if (!p.is_varlen()) {
    packed.lse = {arrays.lse, 0, packed.total_q};
    if (p.row_maxima.data) packed.row_maxima = {arrays.row_maxima, 0, packed.total_q};
  }
  packed.alibi_batch_stride = p.alibi_batch_stride / 2;
  packed.descale_k.batch_stride = p.descale_k.batch_stride / 2;
  packed.descale_v.batch_stride = p.descale_v.batch_stride / 2;
  packed.workspace = arrays.end;
  return packed;
}

size_t prefill_bytes(const DecodeParams& p) {
  return static_cast<size_t>(Arrays(p).end - static_cast<char*>(p.workspace));
}

AttnParams begin_prefill(const DecodeParams& p) {
  const Arrays arrays(p);
  const int64_t row = p.heads_q * p.head_dim;
  append(p, {arrays.q, p.is_varlen() ? 0 : p.seqlen_q * row, row, p.head_dim});
  if (gathers(p)) gather(p, arrays);
  sequences_kernel<<<blocks_of(p.batch + 1), kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
      p, arrays.cu_seqlens_q, arrays.cu_seqlens_k, sequence_rows(p));
  check_launch(cudaGetLastError(), "prefill_sequences", p);
  return packed_call(p);
}

void finish_prefill(const DecodeParams& p, const AttnParams& packed) {
  if (p.is_varlen()) return;
  const dim3 grid(blocks_of(packed.total_q), static_cast<unsigned>(p.heads_q));
  const auto place = [&](const RowView& to, const RowView& from) {
    place_statistic_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
        to, static_cast<const float*>(from.data), packed.total_q, p.seqlen_q);
    check_launch(cudaGetLastError(), "prefill_statistic", p);
  };
  place(p.lse, packed.lse);
  if (p.row_maxima.data) place(p.row_maxima, packed.row_maxima);
}

}  // namespace flashattn_ext::decode
