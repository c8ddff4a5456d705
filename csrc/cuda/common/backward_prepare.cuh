// First stage of the backward: delta = <dout, out> - dlse of every row (Dao 2023, Algorithm 2, line 4), and lse in
// units of log2. With dropout delta is divided by what scales the weights that are kept: then the main stage has
// nothing to scale, and the factor goes to what it sums up.
#pragma once

#include "../../dropout.h"
#include "aligned_rows.cuh"
#include "launch.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace flashattn_ext {

// What the stages of one backward call share, in the workspace. Per-row arrays are [Hq][all rows of the call]. Query
// tiles end at sequence ends, so that packed sequences may have one partial tile each.
struct BackwardShared {
  float *delta, *lse;             // delta / keep_scale; lse in units of log2, +inf for rows that see nothing
  float* dq;                      // [Hq][query tiles][floats of a tile], in the order of the main stage's accumulators
  int* turns;                     // deterministic: [Hq][query tiles][splits], how many key tiles have added to dq
  int* drawn;                     // key tiles that thread blocks have taken beyond their first
  float score_scale, keep_scale;  // of the scores, in units of log2 and signed; of what dropout keeps
  float gradient_scale;           // of the sums for dq and dk
  int64_t rows, tile_rows, tile_floats, tiles, splits;
  int64_t zeros;  // bytes from dq on that the main stage wants to be zero
  int64_t bytes;

  // tile_rows, tile_floats, splits: of the main stage.
  BackwardShared(const AttnGradParams& p, int64_t tile_rows, int64_t tile_floats, int64_t splits)
      : tile_rows(tile_rows), tile_floats(tile_floats), splits(splits) {
    score_scale = p.softmax_scale < 0 ? -log2_scale(p.softmax_scale) : log2_scale(p.softmax_scale);
    keep_scale = 1 / static_cast<float>(keep_probability(p.dropout_threshold));
    gradient_scale = static_cast<float>(p.softmax_scale) * keep_scale;
    rows = p.is_varlen() ? p.total_q : p.batch * p.seqlen_q;
    tiles = p.is_varlen() ? rows / tile_rows + p.batch : p.batch * dense_tiles(p);
    char* next = static_cast<char*>(p.workspace);
    auto take = [&next](int64_t size) {
      char* piece = next;
      next += (size + 63) / 64 * 64;
      return piece;
    };
    delta = reinterpret_cast<float*>(take(p.heads_q * rows * 4));
    lse = reinterpret_cast<float*>(take(p.heads_q * rows * 4));
    dq = reinterpret_cast<float*>(take(p.heads_q * tiles * tile_floats * 4));
    turns = reinterpret_cast<int*>(take(p.deterministic ? p.heads_q * tiles * splits * 4 : 0));
    drawn = reinterpret_cast<int*>(take(sizeof(int)));
    zeros = next - reinterpret_cast<char*>(dq);
    bytes = next - static_cast<char*>(p.workspace);
  }

  __host__ __device__ int64_t dense_tiles(const AttnParams& p) const {
    return (p.seqlen_q + tile_rows - 1) / tile_rows;
  }
  __device__ int64_t first_row(const AttnParams& p, int64_t b, const Sequence& queries) const {
    return p.is_varlen() ? queries.start : b * p.seqlen_q;
  }
  __device__ int64_t first_tile(const AttnParams& p, int64_t b, const Sequence& queries) const {
    return p.is_varlen() ? queries.start / tile_rows + b : b * dense_tiles(p);
  }
};

constexpr int kPrepareThreads = 256;

// So many neighbouring lanes share a row, one vector each where few of them have none then.
template <class T>
int prepare_lanes(int64_t columns) {
  const int64_t vectors = (columns * static_cast<int64_t>(sizeof(T)) + kVectorBytes - 1) / kVectorBytes;
  int lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  return lanes > 1 && 4 * vectors < 3 * lanes ? lanes / 2 : lanes;
}

// kWhole: the rows of out are whole vectors; else none is read beyond out_end.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardShared shared,
                            int lanes, const void* out_end) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  const int64_t thread = blockIdx.x * int64_t{kPrepareThreads} + threadIdx.x, index = thread / lanes;
  const bool valid = index < p.heads_q * shared.rows;
  const int64_t h = index / shared.rows, flat = index % shared.rows;
  const int64_t b = p.is_varlen() ? 0 : flat / p.seqlen_q, row = p.is_varlen() ? flat : flat % p.seqlen_q;
  const int lane = threadIdx.x % lanes, columns = valid ? static_cast<int>(p.head_dim_v) : 0;
  const T *dout = row_pointer<const T>(p.dout, b, h, row), *out = row_pointer<const T>(p.out, b, h, row);
  float delta = 0;
  for (int c = lane * kElements; c < columns; c += lanes * kElements) {
    const uint4 x = *reinterpret_cast<const uint4*>(dout + c);
    uint4 y;
    if constexpr (kWhole) {
      y = *reinterpret_cast<const uint4*>(out + c);
    } else {
      UnalignedVector<T> vector;
      vector.load(out + c, columns - c, out_end);
      y = vector.get();
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      delta += widen(reinterpret_cast<const T*>(&x)[e]) * widen(reinterpret_cast<const T*>(&y)[e]);
    }
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
  if (!valid || lane != 0) return;
  const float lse = *row_statistic(p.lse, b, h, row);
  const float dlse = p.dlse.data ? *row_statistic(p.dlse, b, h, row) : 0.f;
  shared.delta[index] = (delta - dlse) / shared.keep_scale;
  shared.lse[index] = lse == -infinity() ? infinity() : lse * kLog2E;
}

// Runs the stage, and zeroes what the main stage adds to.
template <class T>
void launch_prepare(const AttnGradParams& p, const BackwardShared& shared) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  check_launch(cudaMemsetAsync(shared.dq, 0, static_cast<size_t>(shared.zeros), stream), "memset", p);
  const int lanes = prepare_lanes<T>(p.head_dim_v);
  const bool whole = rows_are_aligned(p.out, p.head_dim_v, sizeof(T));
  const auto kernel = whole ? backward_prepare_kernel<T, true> : backward_prepare_kernel<T, false>;
  const void* const out_end = end_of(p.out, p.is_varlen() ? 1 : p.batch, p.heads_q,
                                     p.is_varlen() ? p.total_q : p.seqlen_q, p.head_dim_v, sizeof(T));
  const int64_t blocks = (p.heads_q * shared.rows * lanes + kPrepareThreads - 1) / kPrepareThreads;
  launch(kernel, "backward_prepare", p, blocks, kPrepareThreads, 0, shared, lanes, out_end);
}

}  // namespace flashattn_ext
