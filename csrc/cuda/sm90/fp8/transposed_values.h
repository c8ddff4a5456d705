// Values in e4m3 for products with weights (forward_operands.cuh): transposed, in tiles of 128 keys. In the workspace
// they are [heads][tiles of a head][columns][128 keys]; heads are those of all batch entries. The first tile of a
// packed sequence begins with its first key, so each sequence may have one tile more than its keys alone need.
//
// In every 16 keys, position 4 * t + j holds key 2 * t + j % 2 + 8 * (j / 2): four neighbours are what lane t of four
// has of a row of scores. Keys behind the end of a sequence are zero.
#pragma once

#include "params.h"

namespace flashattn_ext::sm90 {

constexpr int kTransposedKeys = 128;

// Whether a forward can transpose values itself (value_transposer.cuh): kernels without intervals have idle warps for
// that, and up to 128 columns room in shared memory.
constexpr bool can_transpose(bool has_intervals, int head_dim_v) { return !has_intervals && head_dim_v <= 128; }

struct TransposedTile {
  int head, first;  // the first tile of the sequence among those of the head
};
inline int64_t transposed_heads(const AttnParams& p) { return p.is_varlen() ? p.heads_k : p.batch * p.heads_k; }
// Tiles of all sequences of a head.
FLASHATTN_HOST_DEVICE int64_t transposed_tiles(const AttnParams& p) {
  return p.is_varlen() ? p.total_k / kTransposedKeys + p.batch : (p.seqlen_k + kTransposedKeys - 1) / kTransposedKeys;
}
// Where the sequence of batch entry b begins, whose first key is `key_start` of the packed ones.
FLASHATTN_HOST_DEVICE TransposedTile transposed_tile(const AttnParams& p, int b, int hk, int key_start) {
  if (p.is_varlen()) return {hk, key_start / kTransposedKeys + b};
  return {b * static_cast<int>(p.heads_k) + hk, 0};
}

// The key at a position of 16.
FLASHATTN_HOST_DEVICE int transposed_key(int position) {
  const int t = position / 4, j = position % 4;
  return 2 * t + j % 2 + j / 2 * 8;
}

// Bytes of workspace for the tiles, which come after the first kForwardBytes.
size_t transposed_bytes(const AttnParams& p);
// Writes them, and zeroes TileGrid::taken for the kernel that follows. Rows of v are 16-byte aligned, and padding
// columns are zero.
void transpose_values(const AttnParams& p, int* taken);
// The tiles, with a head as a batch entry and a tile as a head of it.
TensorView transposed_view(const AttnParams& p);

}  // namespace flashattn_ext::sm90
