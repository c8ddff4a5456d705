// First stage of the backward, one warp for each row: delta = <dout, out> - dlse (Dao 2023, Algorithm 2, line 4), lse
// in units of log2, and zeros for the fp32 sums of dq.
#pragma once

#include "../common/launch.cuh"
#include "../common/rows.cuh"
#include "../common/tile.cuh"

namespace flashattn_ext::sm80 {

// What the stages of one backward call share, in the workspace. Per-row arrays are [Hq][all rows of the call].
struct BackwardShared {
  float *delta, *lse;  // lse in units of log2, +inf for rows that see nothing
  float* dq;           // [Hq][rows][columns]
  int* turns;          // deterministic: [Hq][query tiles][splits], how many key tiles have added to dq
  int64_t rows, columns, turn_tiles, bytes;

  // queries_per_tile, splits: of the main stage.
  __host__ __device__ BackwardShared(const AttnGradParams& p, int64_t columns, int queries_per_tile, int splits)
      : columns(columns) {
    rows = p.is_varlen() ? p.total_q : p.batch * p.seqlen_q;
    char* next = static_cast<char*>(p.workspace);
    auto take = [&next](int64_t size) {
      char* piece = next;
      next += (size + 63) / 64 * 64;
      return piece;
    };
    delta = reinterpret_cast<float*>(take(p.heads_q * rows * 4));
    lse = reinterpret_cast<float*>(take(p.heads_q * rows * 4));
    dq = reinterpret_cast<float*>(take(p.heads_q * rows * columns * 4));
    // Tiles end at sequence ends: at most one partial tile for each batch entry.
    turn_tiles = rows / queries_per_tile + p.batch;
    turns = reinterpret_cast<int*>(take(p.deterministic ? p.heads_q * turn_tiles * splits * 4 : 0));
    bytes = next - static_cast<char*>(p.workspace);
  }

  static __device__ int64_t first_row(const AttnParams& p, int64_t b, const Sequence& queries) {
    return p.is_varlen() ? queries.start : b * p.seqlen_q;
  }
};

constexpr int kPrepareWarps = 8;

template <class T>
__device__ __forceinline__ float dot(const T* a, const T* b, int columns) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  float sum = 0;
  for (int c = threadIdx.x % 32 * kElements; c < columns; c += 32 * kElements) {
    const uint4 x = *reinterpret_cast<const uint4*>(a + c), y = *reinterpret_cast<const uint4*>(b + c);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      sum += widen(reinterpret_cast<const T*>(&x)[e]) * widen(reinterpret_cast<const T*>(&y)[e]);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kPrepareWarps * 32)
    backward_prepare_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardShared shared) {
  const int64_t index = blockIdx.x * int64_t{kPrepareWarps} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (index >= p.heads_q * shared.rows) return;
  const int64_t h = index / shared.rows, flat = index % shared.rows;
  const int64_t b = p.is_varlen() ? 0 : flat / p.seqlen_q, row = p.is_varlen() ? flat : flat % p.seqlen_q;
  const float product = dot(row_pointer<const T>(p.dout, b, h, row), row_pointer<const T>(p.out, b, h, row),
                            static_cast<int>(p.head_dim_v));
  if (lane == 0) {
    const float dlse = p.dlse.data ? *row_statistic(p.dlse, b, h, row) : 0.f;
    const float lse = *row_statistic(p.lse, b, h, row);
    shared.delta[index] = product - dlse;
    shared.lse[index] = lse == -infinity() ? infinity() : lse * kLog2E;
  }
  float4* dq = reinterpret_cast<float4*>(shared.dq + index * shared.columns);
  for (int64_t c = lane; c < shared.columns / 4; c += 32) dq[c] = make_float4(0, 0, 0, 0);
}

}  // namespace flashattn_ext::sm80
