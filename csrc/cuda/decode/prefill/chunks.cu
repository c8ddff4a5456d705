#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <numeric>

#include "cuda/decode/prefill/chunks.h"
#include "cuda/decode/prefill/prefill.h"
#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "cuda/ptx/async.cuh"
#include "cuda/score/chunks.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::decode {
namespace {

constexpr int kThreads = 128, kColumns = 2;  // threads of a block, which adds up one row; columns of a thread
static_assert(kThreads * kColumns == kMostChunkColumns);
constexpr int kAtOnce = 16;  // chunks that a thread loads before it adds them

// Adds up the chunks of one row of a head. packed: the call that computed the chunks.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_chunks_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ AttnParams packed,
                      const __grid_constant__ ChunkPartials partials) {
  ptx::wait_for_previous_kernel();
  const int queries = static_cast<int>(p.seqlen_q), heads = static_cast<int>(p.heads_q), group = partials.group;
  const int block = static_cast<int>(blockIdx.x), query = block % queries, h = block / queries % heads;
  const int b = block / queries / heads;
  const int keys = static_cast<int>(key_sequence(packed, 2 * b).length);
  const Limits visible = Mask32(packed, queries, keys).keys_of(0, queries);
  const int begin = visible.begin / partials.keys;
  const int end = visible.begin < visible.end ? (visible.end - 1) / partials.keys + 1 : begin;
  const int64_t slot = (int64_t{b} * partials.heads + h / group) * partials.chunks;
  const int row = query * group + h % group;

  ChunkSum sum{-infinity(), 0};
  float largest = -infinity(), out[kColumns] = {};
  const auto column = [&](int c) { return c * kThreads + static_cast<int>(threadIdx.x); };
  for (int last = end - 1; last >= begin; last -= kAtOnce) {
    ChunkSum next[kAtOnce];
    float x[kAtOnce][kColumns];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (last - k < begin) break;
      const int64_t at = (slot + last - k) * partials.rows + row;
      next[k] = partials.sums[at];
      if (partials.largest) largest = fmaxf(largest, partials.largest[at]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        x[k][c] = column(c) < partials.columns ? partials.out[at * partials.columns + column(c)] : 0;
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (last - k < begin) break;
      const ChunkFactors factors = add_chunk(&sum, next[k]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[c] = factors.add(out[c], x[k][c]);
    }
  }

  const float factor = finish_chunks(&sum, head_sink(p, h));
  T* const to = row_pointer<T>(p.out, b, h, query);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (column(c) < p.head_dim_v) narrow(sum.sum == 0 ? 0.f : out[c] * factor, to + column(c));
  }
  if (threadIdx.x != 0) return;
  store_lse(p, b, h, query, sum.max, sum.sum);
  if (partials.largest) store_largest(p, b, h, query, largest);
}

// Query heads of a KV head that are rows of one tile, so that its keys are read once.
int heads_together(const DecodeParams& p, const ChunkKernel& kernel) {
  const bool packs = !p.has_intervals() && p.seqlen_q * p.group_size() <= kernel.rows;
  return packs ? static_cast<int>(p.group_size()) : 1;
}

// Places the arrays from `workspace` on, and returns their size in bytes.
size_t place_arrays(const DecodeParams& p, const ChunkKernel& kernel, void* workspace, ChunkPartials* partials) {
  Carver carver(workspace);
  const int64_t rows = partial_rows(p, kernel);
  partials->sums = carver.take<ChunkSum>(rows);
  partials->largest = p.row_maxima.data ? carver.take<float>(rows) : nullptr;
  partials->out = carver.take<float>(rows * columns_of(p));
  return carver.bytes();
}

template <class T>
void launch_sum(const DecodeParams& p, const AttnParams& packed, const ChunkPartials& partials) {
  const char* const name = "decode_sum_chunks";
  launch_early(sum_chunks_kernel<T>, name, p, row_of_blocks(p.batch * p.heads_q * p.seqlen_q, name, p), kThreads, 0, p,
               packed, partials);
}

}  // namespace

size_t chunk_bytes(const DecodeParams& p, const ChunkKernel& kernel) {
  ChunkPartials partials;
  const bool in_pages = reads_pages(p);
  return prefill_bytes(p, in_pages) + static_cast<size_t>(aligned_copy_bytes(packed_call(p, in_pages))) +
         place_arrays(p, kernel, nullptr, &partials);
}

void run_chunks(const DecodeParams& p, const ChunkKernel& kernel) {
  const bool in_pages = reads_pages(p);
  AttnParams packed = align_inputs(begin_prefill(p, in_pages));
  ChunkPartials partials;
  place_arrays(p, kernel, packed.workspace, &partials);
  partials.chunks = static_cast<int>(chunks_of(p, kernel));
  partials.keys = kernel.keys;
  partials.columns = static_cast<int>(columns_of(p));
  partials.group = heads_together(p, kernel);
  partials.heads = static_cast<int>(p.heads_q) / partials.group;
  partials.rows = static_cast<int>(p.seqlen_q) * partials.group;
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
