#include <algorithm>

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/sm90/fp8/transposed_values.h"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext::sm90 {
namespace {

// A thread block transposes 128 keys of 64 columns, a thread 16 keys of four columns.
constexpr int kBlockColumns = 64, kThreadKeys = 16, kThreadColumns = 4, kRowThreads = kBlockColumns / kThreadColumns;
constexpr int kTransposeThreads = kRowThreads * (kTransposedKeys / kThreadKeys);

int64_t tile_bytes(const AttnParams& p) { return p.head_dim_v * kTransposedKeys; }

// Transposes four keys of four columns.
__device__ __forceinline__ void transpose_bytes(uint32_t (&columns)[4], const uint32_t (&keys)[4]) {
  const uint32_t low01 = ptx::permute_bytes(keys[0], keys[1], 0x5140),
                 high01 = ptx::permute_bytes(keys[0], keys[1], 0x7362),
                 low23 = ptx::permute_bytes(keys[2], keys[3], 0x5140),
                 high23 = ptx::permute_bytes(keys[2], keys[3], 0x7362);
  columns[0] = ptx::permute_bytes(low01, low23, 0x5410);
  columns[1] = ptx::permute_bytes(low01, low23, 0x7632);
  columns[2] = ptx::permute_bytes(high01, high23, 0x5410);
  columns[3] = ptx::permute_bytes(high01, high23, 0x7632);
}

// blockIdx: {tile of a sequence, batch entry and KV head, 64 columns}. A block makes every gridDim.x-th tile of its
// sequence, which may be longer than the host knows.
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const __grid_constant__ AttnParams p, unsigned char* tiles, int* taken) {
  __shared__ uint4 chunks[kBlockColumns][kTransposedKeys / 16];  // a chunk is 16 keys of a column
  const int group = static_cast<int>(threadIdx.x) / kRowThreads, four = static_cast<int>(threadIdx.x) % kRowThreads;
  const int heads = static_cast<int>(p.heads_k), columns = static_cast<int>(p.head_dim_v);
  const int first_column = static_cast<int>(blockIdx.z) * kBlockColumns, column = first_column + 4 * four;
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  if (taken && threadIdx.x == 0 && blockIdx.x + blockIdx.y + blockIdx.z == 0) *taken = 0;
  for (int head = static_cast<int>(blockIdx.y); head < heads * static_cast<int>(p.batch);
       head += static_cast<int>(gridDim.y)) {
    const int b = head / heads, hk = head % heads;
    const Sequence sequence = key_sequence(p, b);
    const int start = static_cast<int>(sequence.start), length = static_cast<int>(sequence.length);
    const TransposedTile tile = transposed_tile(p, b, hk, start);
    const int64_t first_tile = tile.head * transposed_tiles(p) + tile.first;
    for (int n = static_cast<int>(blockIdx.x); n * kTransposedKeys < length; n += static_cast<int>(gridDim.x)) {
      const int key = n * kTransposedKeys + group * kThreadKeys;
      const uint8_t* const rows = row_pointer<const uint8_t>(p.v, p.is_varlen() ? 0 : b, hk, start + key) + column;
      uint32_t words[kThreadKeys];
#pragma unroll
      for (int i = 0; i < kThreadKeys; ++i) {
        words[i] =
            key + i < length && column < columns ? *reinterpret_cast<const uint32_t*>(rows + i * p.v.row_stride) : 0;
      }
      uint32_t transposed[4][4];  // [column][word of four keys]
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const uint32_t keys[4] = {words[2 * t], words[2 * t + 1], words[2 * t + 8], words[2 * t + 9]};
        uint32_t words_of_columns[4];
        transpose_bytes(words_of_columns, keys);
#pragma unroll
        for (int c = 0; c < 4; ++c) transposed[c][t] = words_of_columns[c];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        // Chunks are exchanged within a row of shared memory, so that the lanes of a warp write to different banks.
        chunks[4 * four + c][group ^ four % 8] =
            make_uint4(transposed[c][0], transposed[c][1], transposed[c][2], transposed[c][3]);
      }
      __syncthreads();
      uint4* const to = reinterpret_cast<uint4*>(tiles + ((first_tile + n) * columns + first_column) * kTransposedKeys);
#pragma unroll
      for (int i = static_cast<int>(threadIdx.x); i < kBlockColumns * 8; i += kTransposeThreads) {
        const int c = i / 8;
        if (first_column + c < columns) to[i] = chunks[c][i % 8 ^ c / 4 % 8];
      }
      __syncthreads();
    }
  }
}

unsigned char* tiles_of(const AttnParams& p) { return static_cast<unsigned char*>(p.workspace) + kForwardBytes; }

}  // namespace

size_t transposed_bytes(const AttnParams& p) {
  return static_cast<size_t>(transposed_heads(p) * transposed_tiles(p) * tile_bytes(p));
}

void transpose_values(const AttnParams& p, int* taken) {
  constexpr int64_t kGridHeight = 65535;
  const int64_t heads = p.batch * p.heads_k, parts = (p.head_dim_v + kBlockColumns - 1) / kBlockColumns;
  const dim3 grid(static_cast<unsigned>(tile_count(p.seqlen_k, kTransposedKeys)),
                  static_cast<unsigned>(std::min(heads, kGridHeight)), static_cast<unsigned>(parts));
  launch_early(transpose_kernel, "transpose values", p, grid, kTransposeThreads, 0, p, tiles_of(p), taken);
}

TensorView transposed_view(const AttnParams& p) {
  return {tiles_of(p), transposed_tiles(p) * tile_bytes(p), kTransposedKeys, tile_bytes(p)};
}

}  // namespace flashattn_ext::sm90
