// What the sm_90 kernels share: rings of stages, the order of tiles, copies in panels, and results from registers.
#pragma once

#include "../common/tensor_core.cuh"
#include "../common/tile.cuh"
#include "../common/tile_order.cuh"
#include "../common/vector.cuh"
#include "../ptx/tma.cuh"

namespace flashattn_ext::sm90 {

constexpr int kGroupThreads = 128, kPanelColumns = 64;

// A place in a ring of stages, and the parity of its barriers in this round.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct TileGrid : TileOrder {
  int tiles;   // of the whole call
  int* drawn;  // tiles beyond the first of each thread block that have been taken

  // Thread blocks that are done early take more tiles.
  __device__ int draw() const {
    const int thread_blocks = static_cast<int>(gridDim.x);
    return tiles > thread_blocks ? thread_blocks + atomicAdd(drawn, 1) : tiles;
  }
};

// The same in all lanes, and known to the compiler as that.
template <class X>
__device__ __forceinline__ X uniform(X x) {
  return __shfl_sync(~0u, x, 0);
}

__device__ __forceinline__ void release(ptx::Barrier& empty) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&empty);
}

// One thread copies rows of all columns, 64 in each panel.
template <class T, int kPanels, int kRows>
__device__ __forceinline__ void load_panels(T (&to)[kPanels][kRows][kPanelColumns], ptx::Barrier& full,
                                            const CUtensorMap& map, int row, int head, int batch) {
  ptx::barrier_arrive_expect(&full, kPanels * kRows * kPanelColumns * static_cast<int>(sizeof(T)));
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    ptx::tma_load(to[panel], &map, &full, panel * kPanelColumns, row, head, batch);
  }
}

// Lane t of four gets word t of each of them, in their order.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = received;
    }
  }
}

// Writes row r of two of an accumulator, times a factor. Four lanes hold a row, two columns of eight each: exchanged,
// they write 16 bytes each.
template <class T, int N>
__device__ __forceinline__ void store_row(T* to, const float (&x)[N][4], int r, float factor, bool zero, bool exists,
                                          int columns) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0;
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&tile)[4] = x[n + i < N ? n + i : n];
      words[i] = zero ? 0 : TensorCore<T>::pack(tile[2 * r] * factor, tile[2 * r + 1] * factor);
    }
    transpose_quad(words);
    const int column = (n + static_cast<int>(threadIdx.x) % 4) * 8;
    if (!exists || column >= columns) continue;
    const uint4 vector = make_uint4(words[0], words[1], words[2], words[3]);
    if (aligned && column + 8 <= columns) {
      *reinterpret_cast<uint4*>(to + column) = vector;
    } else if (column + 8 <= columns) {
      store_unaligned(to + column, vector);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (column + e < columns) to[column + e] = reinterpret_cast<const T*>(words)[e];
      }
    }
  }
}

}  // namespace flashattn_ext::sm90
