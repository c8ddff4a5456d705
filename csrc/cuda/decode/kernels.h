// The entry points of the decoding kernels, which decode.cu calls. Each source that is compiled instantiates them for
// one element type and class of head dims.
#pragma once

#include "plan.h"

namespace flashattn_ext::decode {

// What the host needs to know of a tile.
struct TileSizes {
  int rows;                     // packed rows
  int team_warps;               // of each team
  int query_bytes, team_bytes;  // of shared memory: for the queries, and for each team
};

// kHeadDim: 64, 96, 128, 192, 256 or 512, at least head_dim and head_dim_v. kWide: tiles.h; there are no wide tiles
// above 256.
template <class T, int kHeadDim, bool kWide>
TileSizes tile_sizes();
// aligned: whether rows of the caches can be read in whole vectors of 16 bytes, the last of which may be cut short.
template <class T, int kHeadDim, bool kWide>
void split(const DecodeParams& p, const Plan& plan, int warps, int shared_bytes, bool aligned);

// Adds up the parts of tasks that are split; `rows` and `columns` are those of a slot.
template <class T>
void combine(const DecodeParams& p, const Plan& plan, int64_t tasks, int rows, int columns);

// Appends new keys and values to the caches. Rotates them and the queries where the call says so, those into `q`.
void append(const DecodeParams& p, const TensorView& q);

}  // namespace flashattn_ext::decode
