// The forward (forward.cuh) and forward mode (jvp.cuh) share this: a thread block computes one tile of queries of a
// head and walks over the tiles of keys that it sees.
#pragma once

#include "cuda/score/dropout.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/operand_tile.cuh"

namespace flashattn_ext::sm80 {

// Rows of a head's first key and value, or of their tangents.
template <class T>
struct KeyPointers {
  const T *k, *v;
};

// Scalars that a thread block keeps in shared memory rather than in registers, in slots of 16 bytes: slot i is the
// padding of row i of the tiles or, where rows have none, behind the tiles. kElements: of the tiles.
template <class Tile, int kElements, int kSlots>
struct TileSlots {
  using T = typename Tile::Element;
  struct Head {
    int b, h, length_q, length_k;
  };
  static_assert(Tile::kSwizzled || kSlots <= kElements / Tile::kStride);
  static constexpr int kSharedBytes =  // of the tiles and the slots
      kElements * static_cast<int>(sizeof(T)) + (Tile::kSwizzled ? kSlots * kVectorBytes : 0);

  T* tiles;

  template <class X>
  __device__ X* at(int i) const {
    static_assert(sizeof(X) <= kVectorBytes);
    const int element = Tile::kSwizzled ? kElements + i * Tile::kVector : i * Tile::kStride + Tile::kColumns;
    return reinterpret_cast<X*>(tiles + element);
  }
  __device__ Head* head() const { return at<Head>(0); }
  __device__ Dropout* dropout() const { return at<Dropout>(1); }
  __device__ KeyPointers<T>* pointers() const { return at<KeyPointers<T>>(2); }
};

// Computes the tiles of this thread block. QueryTile: the kernel, whose row0 is the first query of its tile.
template <class QueryTile>
__device__ __forceinline__ void compute_tiles(QueryTile&& tile, const TileOrder& order) {
  const int heads = static_cast<int>(tile.p.heads_q);
  const auto [head, block] = order.index(blockIdx.x, heads * static_cast<int>(tile.p.batch));
  tile.start_head(head / heads, head % heads);
  // The longest tiles of a causal head start first. A sequence may be longer than the grid was sized for.
  const int step = order.blocks * tile.kQueries;
  for (tile.row0 = (order.blocks - 1 - block) * tile.kQueries; tile.row0 < tile.length_q();
       tile.row0 = ptx::opaque(tile.row0) + step) {
    tile.start_tile();
    tile.walk_keys();
    tile.finish_tile();
    __syncthreads();
  }
}

}  // namespace flashattn_ext::sm80
