// The entry points of the decoding kernels, called by decode.cu. Each compiled source instantiates them for one element
// type and one kHeadDim.
#pragma once

#include "cuda/decode/split/plan.h"

namespace flashattn_ext::decode {

// Tile properties that the host needs for a launch.
struct TileSizes {
  int rows;                     // packed rows of a KV head
  int heads;                    // KV heads
  int team_warps;               // warps per team (tiles.h)
  int query_bytes, team_bytes;  // shared memory for the queries, and per team
};

// Key: the type of keys and values. kHeadDim is at least head_dim and head_dim_v. kTileRows: packed rows of the tile, a
// row of cuda/table/kernel_table.h.
template <class Key, int kHeadDim, int kTileRows>
TileSizes tile_sizes();
// The attention kernel. aligned: whether rows of k and v can be read in 16-byte vectors, the last possibly partial.
template <class Key, int kHeadDim, int kTileRows>
void split(const DecodeParams& p, const Plan& plan, int warps, int shared_bytes, bool aligned);

// The call as a kernel sees it in whose tasks `heads` adjacent KV heads (Tile::heads) are one.
inline DecodeParams in_groups(DecodeParams p, int heads) {
  p.heads_k /= heads;
  p.k.head_stride *= heads;
  p.v.head_stride *= heads;
  return p;
}

// Combines the partial results of split tasks. T: the type of out. rows, columns: dimensions of a slot.
template <class T>
void combine(const DecodeParams& p, const Plan& plan, int64_t tasks, int rows, int columns);
// The same for tasks of two KV heads.
template <class T>
void combine_pairs(const DecodeParams& p, const Plan& plan, int64_t tasks, int rows, int columns) {
  combine<T>(in_groups(p, 2), plan, tasks, rows, columns);
}

// Appends new keys and values to the KV cache, and copies the queries to `q` unless it has no data. With rotary
// embeddings both the new keys and the copies are rotated.
void append(const DecodeParams& p, const TensorView& q);

}  // namespace flashattn_ext::decode
