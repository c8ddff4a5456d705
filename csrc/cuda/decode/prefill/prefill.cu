#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "backend/key_locator.h"
#include "cuda/decode/prefill/cache_rows.h"
#include "cuda/decode/prefill/prefill.h"
#include "cuda/decode/split/kernels.h"
#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "cuda/ptx/async.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext::decode {
namespace {

constexpr int kThreads = 256;
// Columns of gathered rows, which are whole vectors.
int64_t whole_vectors(const DecodeParams& p, int64_t columns) {
  const int64_t elements = kVectorBytes / element_bytes(p);
  return (columns + elements - 1) / elements * elements;
}

// The packed call has two sequences for each of this call, so that strides of its batch entries are halved. An odd
// stride is increased by one, in a copy.
int64_t even(int64_t stride) { return stride + stride % 2; }

// Granules and supers of the intervals of one head (mask.h).
int64_t extremes_of_rows(int64_t rows) {
  const int64_t granules = (rows + kMaskGranule - 1) / kMaskGranule;
  return granules + (granules + kMaskSuper - 1) / kMaskSuper;
}

// The arrays at the beginning of the workspace.
struct Arrays {
  int* counter;                           // zeroed
  int32_t *cu_seqlens_q, *cu_seqlens_k;   // [2 B + 1]
  float *lse, *row_maxima;                // [Hq, B * Sq]; unused if the decoding call is varlen
  char *q, *k, *v;                        // copied queries and gathered keys and values, [rows, heads, columns]
  float *slopes, *descale_k, *descale_v;  // [B, even(heads)]; unused if the strides of the call are even
  int32_t *intervals, *extremes;          // [Hm, rows] pairs and [Hm, extremes_of_rows(rows)] extremes
  char* end;

  Arrays(const DecodeParams& p, bool in_pages) {
    Carver carver(p.workspace);
    const auto take_floats = [&](bool wanted, int64_t heads) {
      return carver.take<float>(wanted ? p.batch * even(heads) : 0);
    };
    const int64_t key_row = p.heads_k * element_bytes(p), gathered = gathers(p) && !in_pages ? all_rows(p) : 0;
    const int64_t query_row = p.heads_q * p.head_dim * element_bytes(p);
    counter = carver.take<int>(1);
    cu_seqlens_q = carver.take<int32_t>(2 * p.batch + 1);
    cu_seqlens_k = carver.take<int32_t>(2 * p.batch + 1);
    lse = carver.take<float>(p.is_varlen() ? 0 : packed_queries(p) * p.heads_q);
    row_maxima = carver.take<float>(p.is_varlen() || !p.row_maxima.data ? 0 : packed_queries(p) * p.heads_q);
    q = carver.take<char>(copies_queries(p) ? packed_queries(p) * query_row : 0);
    k = carver.take<char>(gathered * key_row * whole_vectors(p, p.head_dim));
    v = carver.take<char>(gathered * key_row * whole_vectors(p, p.head_dim_v));
    slopes = take_floats(p.alibi_batch_stride % 2 != 0, p.heads_q);
    descale_k = take_floats(p.descale_k.batch_stride % 2 != 0, p.heads_k);
    descale_v = take_floats(p.descale_v.batch_stride % 2 != 0, p.heads_k);
    const int64_t masked = p.has_intervals() ? p.intervals.heads : 0;
    intervals = carver.take<int32_t>(masked * gathered * 2);
    extremes = reinterpret_cast<int32_t*>(carver.take<IntervalExtremes>(masked * extremes_of_rows(gathered)));
    end = carver.rest();
  }
};

// Computes the cu_seqlens of the varlen call, and zeroes the counter. rows: sequence_rows(p); gathered: gathers(p).
__global__ void __launch_bounds__(kThreads)
    sequences_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Arrays arrays, int64_t rows,
                     bool gathered) {
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  int32_t *const cu_seqlens_q = arrays.cu_seqlens_q, *const cu_seqlens_k = arrays.cu_seqlens_k;
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= p.batch) {
    if (b == p.batch) cu_seqlens_q[2 * b] = cu_seqlens_k[2 * b] = 0;  // the sequence after the last has no rows
    if (b == p.batch) *arrays.counter = 0;
    return;
  }
  const KeyLocator keys(p, b);
  const Sequence queries = query_sequence(p, b);
  const int64_t first_row = keys.first_new_row + keys.new_keys - keys.length;
  const int64_t start = (gathered ? b : keys.run_of_row(0, 1).entry) * rows + first_row;
  const int64_t first_query = p.is_varlen() ? queries.start : b * p.seqlen_q;
  cu_seqlens_q[2 * b] = static_cast<int32_t>(first_query);
  cu_seqlens_q[2 * b + 1] = static_cast<int32_t>(first_query + queries.length);
  cu_seqlens_k[2 * b] = static_cast<int32_t>(start);
  cu_seqlens_k[2 * b + 1] = static_cast<int32_t>(start + keys.length);
}

// How a vector of gathered rows is read.
enum class Reads {
  kVectors,  // rows are aligned, and whole vectors long
  kHalves,   // elements of 16 bits at any address
  kWords,    // elements of 32 bits at any address
  kFloat8,   // fp8, which becomes bfloat16
};

// The vector of `count` elements, or fewer than a vector has, from `element` on. end: of the memory of the tensor.
template <Reads kReads>
__device__ __forceinline__ uint4 read_vector(const TensorView& from, int64_t element, int count, const void* end) {
  if constexpr (kReads == Reads::kFloat8) {
    return widen_vector(static_cast<const Float8*>(from.data) + element, count);
  } else if constexpr (kReads == Reads::kVectors) {
    return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from.data) + element);
  } else {
    using T = std::conditional_t<kReads == Reads::kHalves, uint16_t, uint32_t>;
    UnalignedVector<T> vector;
    vector.load(static_cast<const T*>(from.data) + element, count, end);
    return vector.get();
  }
}

// Where gathered rows go, and what is read for them.
struct Gathered {
  uint4 *k, *v;
  const void *k_end, *v_end;  // ends of the caches
  int elements;               // elements of a vector
};

// Copies the keys and values of the sequences to contiguous rows, which begin capacity() rows after those of the
// sequence before. A warp copies one row of all heads in 16-byte vectors.
template <Reads kReads>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Gathered to) {
  constexpr int kWarps = kThreads / 32;
  const int heads = static_cast<int>(p.heads_k);
  const auto copy = [&](uint4* row, const TensorView& from, const KeyRun& at, int columns, const void* end) {
    const int count = (columns + to.elements - 1) / to.elements;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < heads * count; i += 32) {
      const int column = i % count * to.elements;
      const int64_t first = at.entry * from.batch_stride + at.row * from.row_stride + i / count * from.head_stride;
      row[i] = read_vector<kReads>(from, first + column, min(columns - column, to.elements), end);
    }
  };
  const int columns = static_cast<int>(p.head_dim), columns_v = static_cast<int>(p.head_dim_v);
  const int64_t vectors = heads * ((columns + to.elements - 1) / to.elements),
                vectors_v = heads * ((columns_v + to.elements - 1) / to.elements);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const KeyLocator keys(p, b);
    const int64_t end = keys.first_new_row + keys.new_keys, first = end - keys.length;
    for (int64_t row = first + static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < end; row += step) {
      const KeyRun at = keys.run_of_row(row, 1);
      const int64_t place = b * p.cache.capacity() + row;
      copy(to.k + place * vectors, p.k, at, columns, to.k_end);
      copy(to.v + place * vectors_v, p.v, at, columns_v, to.v_end);
    }
  }
}

// The intervals of gathered keys, [Hm, rows] pairs. A key for which the Mask has none is seen by every row.
__global__ void __launch_bounds__(kThreads)
    gather_intervals_kernel(const __grid_constant__ DecodeParams p, int2* pairs, int64_t rows) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const KeyLocator keys(p, b);
    if (key >= keys.length) continue;
    const int64_t row = b * p.cache.capacity() + keys.first_new_row + keys.new_keys - keys.length + key;
    const int64_t n = keys.first_interval + key;
    const int2* const own = reinterpret_cast<const int2*>(p.intervals.data) + b * p.intervals.batch_stride + n;
#pragma unroll 1  // unrolled it spills on sm_80
    for (int64_t h = 0; h < p.intervals.heads; ++h) {
      pairs[h * rows + row] = n < 0 ? make_int2(0, INT32_MAX) : own[h * p.intervals.head_stride];
    }
  }
}

// [batch, heads] floats with an even distance between batch entries.
__global__ void __launch_bounds__(kThreads) spread_kernel(float* to, const float* from, int64_t batch_stride,
                                                          int64_t head_stride, int64_t batch, int64_t heads) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, b = i / heads, h = i % heads;
  if (b < batch) to[b * (heads + heads % 2) + h] = from[b * batch_stride + h * head_stride];
}

// Copies a row statistic from the packed layout [Hq, rows] to `to`. blockIdx.y: the query head.
__global__ void __launch_bounds__(kThreads)
    place_statistic_kernel(RowView to, const float* packed, int64_t rows, int64_t seqlen_q) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, h = blockIdx.y;
  if (row < rows) *row_statistic(to, row / seqlen_q, h, row % seqlen_q) = packed[h * rows + row];
}

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

dim3 grid_of(const DecodeParams& p, int64_t rows_of_block) {
  return dim3(static_cast<unsigned>(tile_count(p.cache.capacity(), rows_of_block)),
              static_cast<unsigned>(std::min<int64_t>(p.batch, 65535)));
}

void gather(const DecodeParams& p, const Arrays& arrays) {
  constexpr int64_t kRowsOfBlock = 32;
  const auto end = [&](const TensorView& t, int64_t columns) {
    return end_of(t, p.cache.entries, p.heads_k, p.cache.page_size, columns, key_bytes(p));
  };
  const Gathered to{reinterpret_cast<uint4*>(arrays.k), reinterpret_cast<uint4*>(arrays.v), end(p.k, p.head_dim),
                    end(p.v, p.head_dim_v), kVectorBytes / static_cast<int>(element_bytes(p))};
  const auto kernel = p.is_fp8                ? gather_kernel<Reads::kFloat8>
                      : element_bytes(p) == 4 ? gather_kernel<Reads::kWords>
                      : is_aligned(p)         ? gather_kernel<Reads::kVectors>
                                              : gather_kernel<Reads::kHalves>;
  const auto stream = static_cast<cudaStream_t>(p.stream);
  kernel<<<grid_of(p, kRowsOfBlock), kThreads, 0, stream>>>(p, to);
  check_launch(cudaGetLastError(), "prefill_gather", p);
  if (!p.has_intervals()) return;
  // The keys between sequences, which no row sees, are in granules with those of sequences.
  AttnParams masked = p;
  masked.seqlen_k = all_rows(p);
  masked.intervals.data = arrays.intervals;
  const size_t bytes = static_cast<size_t>(p.intervals.heads * masked.seqlen_k * 8);
  check_launch(cudaMemsetAsync(arrays.intervals, 0, bytes, stream), "memset", p);
  gather_intervals_kernel<<<grid_of(p, kThreads), kThreads, 0, stream>>>(p, reinterpret_cast<int2*>(arrays.intervals),
                                                                         masked.seqlen_k);
  check_launch(cudaGetLastError(), "prefill_intervals", p);
  cuda_mask_extremes(masked, arrays.extremes);
}

void spread(const DecodeParams& p, float* to, const float* from, int64_t batch_stride, int64_t head_stride,
            int64_t heads) {
  if (batch_stride % 2 == 0) return;
  spread_kernel<<<blocks_of(p.batch * heads), kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
      to, from, batch_stride, head_stride, p.batch, heads);
  check_launch(cudaGetLastError(), "prefill_spread", p);
}

}  // namespace

std::string refuses_prefill(const DecodeParams& p) {
  if (p.dtype == DType::kFloat8) {
    return "invariant=True with q of float8_e4m3fn is not implemented by the CUDA decoding kernels; convert q to "
           "bfloat16, or leave invariant out";
  }
  if (all_rows(p) <= kMostRows && packed_queries(p) <= kMostRows) return {};
  return "invariant=True with a KV cache of more than 2^31 - 1 rows (batch entries times the keys for which a block "
         "table has room) is not implemented by the CUDA kernels, got " +
         std::to_string(all_rows(p)) + "; pass a block table with fewer columns, or leave invariant out";
}

bool reads_pages(const DecodeParams& p) {
  return p.cache.block_table && !p.cache.leftpad && !p.is_fp8 && !p.has_intervals() && p.cache.entries > 0 &&
         p.cache.entries <= kMostRows && is_aligned(p);
}

AttnParams packed_call(const DecodeParams& p, bool in_pages) {
  const Arrays arrays(p, in_pages);
  AttnParams packed = p;
  packed.batch = 2 * p.batch;
  packed.cu_seqlens_q = arrays.cu_seqlens_q;
  packed.cu_seqlens_k = arrays.cu_seqlens_k;
  packed.total_q = packed_queries(p);
  packed.total_k = all_rows(p);
  packed.seqlen_k = p.cache.capacity();
  if (copies_queries(p)) packed.q = {arrays.q, 0, p.heads_q * p.head_dim, p.head_dim};
  if (gathers(p) && !in_pages) {
    const int64_t columns = whole_vectors(p, p.head_dim), columns_v = whole_vectors(p, p.head_dim_v);
    packed.k = {arrays.k, 0, p.heads_k * columns, columns};
    packed.v = {arrays.v, 0, p.heads_k * columns_v, columns_v};
  }
  if (p.has_intervals()) {
    packed.intervals = {
        arrays.intervals, p.intervals.heads, 0, packed.total_k, arrays.extremes, 0, extremes_of_rows(packed.total_k)};
  }
  packed.q.batch_stride = packed.k.batch_stride = packed.v.batch_stride = packed.out.batch_stride = 0;
  if (!p.is_varlen()) {
    packed.lse = {arrays.lse, 0, packed.total_q};
    packed.lse_words = {};  // decoding has no derivatives
    if (p.row_maxima.data) packed.row_maxima = {arrays.row_maxima, 0, packed.total_q};
  }
  packed.alibi_batch_stride = p.alibi_batch_stride / 2;
  if (p.alibi_batch_stride % 2 != 0) {
    packed.alibi_slopes = arrays.slopes;
    packed.alibi_batch_stride = even(p.heads_q) / 2;
  }
  const auto halve = [&](const DescaleView& from, const float* copy) {
    return from.batch_stride % 2 == 0 ? DescaleView{from.data, from.batch_stride / 2, from.head_stride}
                                      : DescaleView{copy, even(p.heads_k) / 2, 1};
  };
  packed.descale_k = halve(p.descale_k, arrays.descale_k);
  packed.descale_v = halve(p.descale_v, arrays.descale_v);
  packed.workspace = arrays.end;
  return packed;
}

int* zeroed_counter(const DecodeParams& p, bool in_pages) { return Arrays(p, in_pages).counter; }

size_t prefill_bytes(const DecodeParams& p, bool in_pages) {
  return static_cast<size_t>(Arrays(p, in_pages).end - static_cast<char*>(p.workspace));
}

AttnParams begin_prefill(const DecodeParams& p, bool in_pages) {
  const Arrays arrays(p, in_pages);
  const int64_t row = p.heads_q * p.head_dim;
  append(p, copies_queries(p) ? TensorView{arrays.q, p.is_varlen() ? 0 : p.seqlen_q * row, row, p.head_dim}
                              : TensorView{});
  if (gathers(p) && !in_pages && all_rows(p) > 0) gather(p, arrays);
  const auto* const slopes = static_cast<const float*>(p.alibi_slopes);
  spread(p, arrays.slopes, slopes, p.alibi_batch_stride, 1, p.heads_q);
  spread(p, arrays.descale_k, p.descale_k.data, p.descale_k.batch_stride, p.descale_k.head_stride, p.heads_k);
  spread(p, arrays.descale_v, p.descale_v.data, p.descale_v.batch_stride, p.descale_v.head_stride, p.heads_k);
  launch_early(sequences_kernel, "prefill_sequences", p, dim3(blocks_of(p.batch + 1)), kThreads, 0, p, arrays,
               sequence_rows(p), gathers(p));
  return packed_call(p, in_pages);
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
