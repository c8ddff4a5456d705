#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "../common/aligned_rows.h"
#include "../common/chunks.cuh"
#include "../common/launch.cuh"
#include "../common/tensor_core.cuh"
#include "../common/tile.cuh"
#include "../common/tile_order.cuh"
#include "../ptx/grid.cuh"
#include "chunks.h"
#include "prefill.h"

namespace flashattn_ext::decode {
namespace {

constexpr int kWarps = 4, kLaneColumns = 4, kVectors = 2;  // of a block; float4 of a lane and a row of 256 columns
constexpr int kAtOnce = 4;                                 // chunks that a lane loads before it adds them

// Adds up the chunks of one row of a head: a warp each. packed: the call that computed the chunks.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    sum_chunks_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ AttnParams packed,
                      const __grid_constant__ ChunkPartials partials) {
  ptx::wait_for_previous_kernel();
  const int queries = static_cast<int>(p.seqlen_q), heads = static_cast<int>(p.heads_q);
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (i >= p.batch * heads * queries) return;
  const int query = static_cast<int>(i % queries), h = static_cast<int>(i / queries % heads);
  const int64_t b = i / queries / heads;
  const int group = heads / static_cast<int>(packed.heads_q);  // above 1: the heads of a KV head are the rows of a tile
  const int keys = static_cast<int>(key_sequence(packed, 2 * b).length);
  const Limits visible = Mask32(packed, partials.rows, keys).keys_of(0, partials.rows);
  const int begin = visible.begin / partials.keys;
  const int end = visible.begin < visible.end ? (visible.end - 1) / partials.keys + 1 : begin;
  const int64_t slot = (b * packed.heads_q + h / group) * partials.chunks;
  const int row = group > 1 ? h % group : query, lane = static_cast<int>(threadIdx.x) % 32;

  ChunkSum sum{-infinity(), 0};
  float largest = -infinity(), out[kVectors][kLaneColumns] = {};
  const auto column = [&](int v) { return (v * 32 + lane) * kLaneColumns; };
  for (int last = end - 1; last >= begin; last -= kAtOnce) {
    ChunkSum next[kAtOnce];
    float4 x[kAtOnce][kVectors];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t at = (slot + max(last - k, begin)) * partials.rows + row;
      next[k] = partials.sums[at];
      if (partials.largest && last - k >= begin) largest = fmaxf(largest, partials.largest[at]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const bool exists = column(v) < partials.columns;
        x[k][v] =
            exists ? *reinterpret_cast<const float4*>(partials.out + at * partials.columns + column(v)) : float4{};
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (last - k < begin) break;
      const ChunkFactors factors = add_chunk(&sum, next[k]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float added[kLaneColumns] = {x[k][v].x, x[k][v].y, x[k][v].z, x[k][v].w};
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) out[v][c] = factors.add(out[v][c], added[c]);
      }
    }
  }

  const float factor = finish_chunks(&sum, head_sink(p, h));
  T* const to = row_pointer<T>(p.out, b, h, query);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if (column(v) + c < p.head_dim_v) narrow(sum.sum == 0 ? 0.f : out[v][c] * factor, to + column(v) + c);
    }
  }
  if (lane != 0) return;
  *row_statistic(p.lse, b, h, query) = lse_of(sum);
  if (partials.largest) *row_statistic(p.row_maxima, b, h, query) = largest * kLn2<float>;
}

int64_t chunks_of(const DecodeParams& p, const ChunkKernel& kernel) {
  return tile_count(p.cache.capacity(), kernel.keys);
}
int64_t columns_of(const DecodeParams& p) { return (p.head_dim_v + 7) / 8 * 8; }
// Rows of all partial results.
int64_t partial_rows(const DecodeParams& p, const ChunkKernel& kernel) {
  return p.batch * p.heads_q * p.seqlen_q * chunks_of(p, kernel);
}

// Whether the query heads of a KV head are rows of one tile, so that its keys are read once. One query without a left
// bound sees all keys of its sequence, wherever its row is in the tile.
bool packs_heads(const DecodeParams& p, const AttnParams& packed, const ChunkKernel& kernel) {
  const bool sees_all = p.seqlen_q == 1 && p.window_left == kUnbounded && !p.has_intervals();
  const bool spaced = packed.q.head_stride > 0 && packed.q.row_stride % packed.q.head_stride == 0;
  return sees_all && p.group_size() <= kernel.rows && (spaced || p.batch == 1);
}

// Places the arrays behind those of the kernel, and returns the end of the workspace.
char* place_arrays(const DecodeParams& p, const ChunkKernel& kernel, char* next, ChunkPartials* partials) {
  const auto take = [&next](int64_t bytes) {
    char* const begin = next;
    next += (bytes + 63) / 64 * 64;
    return begin;
  };
  const int64_t rows = partial_rows(p, kernel);
  partials->sums = reinterpret_cast<ChunkSum*>(take(rows * 8));
  partials->largest = p.row_maxima.data ? reinterpret_cast<float*>(take(rows * 4)) : nullptr;
  partials->out = reinterpret_cast<float*>(take(rows * columns_of(p) * 4));
  return next;
}

template <class T>
void launch_sum(const DecodeParams& p, const AttnParams& packed, const ChunkPartials& partials) {
  const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
  launch_early(sum_chunks_kernel<T>, "decode_sum_chunks", p, dim3(static_cast<unsigned>(tile_count(rows, kWarps))),
               kWarps * 32, 0, p, packed, partials);
}

}  // namespace

bool has_chunks(const DecodeParams& p, const ChunkKernel& kernel) {
  constexpr int64_t kMostBytes = 256 << 20;  // of partial results of several queries
  if (!kernel.run || p.is_varlen() || p.seqlen_q > kernel.rows || p.head_dim_v > kVectors * 32 * kLaneColumns) {
    return false;
  }
  const int64_t rows = partial_rows(p, kernel);
  return rows <= std::numeric_limits<int32_t>::max() && (p.seqlen_q == 1 || rows * columns_of(p) * 4 <= kMostBytes);
}

size_t chunk_bytes(const DecodeParams& p, const ChunkKernel& kernel) {
  ChunkPartials partials;
  char* const begin = nullptr;
  const bool in_pages = reads_pages(p);
  return prefill_bytes(p, in_pages) + static_cast<size_t>(aligned_copy_bytes(packed_call(p, in_pages))) +
         static_cast<size_t>(place_arrays(p, kernel, begin, &partials) - begin);
}

void run_chunks(const DecodeParams& p, const ChunkKernel& kernel) {
  const bool in_pages = reads_pages(p);
  AttnParams packed = align_inputs(begin_prefill(p, in_pages));
  ChunkPartials partials;
  place_arrays(p, kernel, static_cast<char*>(packed.workspace), &partials);
  partials.chunks = static_cast<int>(chunks_of(p, kernel));
  partials.keys = kernel.keys;
  partials.columns = static_cast<int>(columns_of(p));
  partials.rows = partials.row_step = static_cast<int>(p.seqlen_q);
  if (packs_heads(p, packed, kernel)) {
    const TensorView& q = packed.q;
    partials.rows = static_cast<int>(p.group_size());
    partials.row_step = p.batch == 1 ? partials.rows : static_cast<int>(q.row_stride / q.head_stride);
    packed.q = {q.data, 0, q.head_stride, p.group_size() * q.head_stride};
    packed.heads_q = p.heads_k;
    packed.total_q = (p.batch - 1) * partials.row_step + partials.rows;
    packed.window_right = kUnbounded;
  }
  packed.seqlen_q = partials.rows;
  if (in_pages) {
    const KeyCache& cache = p.cache;
    partials.pages = {p.k,
                      p.v,
                      cache.block_table,
                      cache.block_table_stride,
                      static_cast<int>(cache.page_size),
                      static_cast<int>(cache.entries),
                      std::gcd(static_cast<int>(cache.page_size), kernel.tile_keys)};
  }
  partials.taken = zeroed_counter(p, in_pages);
  kernel.run(packed, partials);
  p.dtype == DType::kFloat16 ? launch_sum<__half>(p, packed, partials) : launch_sum<__nv_bfloat16>(p, packed, partials);
}

}  // namespace flashattn_ext::decode
