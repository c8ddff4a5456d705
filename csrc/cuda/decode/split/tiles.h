// Tiles of the decoding kernels.
#pragma once

#include "cuda/table/kernel_table.h"

namespace flashattn_ext::decode {

// The number of a row of the table; -1: it has none. rows: packed rows of its tile.
constexpr int row_of(unsigned type, int head_dim, int rows) {
  int i = 0;
  for (const DecodeRow& row : kernel_table::kDecode) {
    if ((row.types & type) && row.head_dim == head_dim && row.tile.rows() == rows) return i;
    ++i;
  }
  return -1;
}

// The class of head dims of a call.
constexpr int class_of(unsigned type, int64_t head_dim) {
  int last = 0;
  for (const DecodeRow& row : kernel_table::kDecode) {
    if (!(row.types & type)) continue;
    if (head_dim <= row.head_dim) return row.head_dim;
    last = row.head_dim;
  }
  return last;
}

template <class T, int kHeadDim, int kRows>
constexpr Tile tile_of() {
  constexpr int kRow = row_of(kTypeOf<T>, kHeadDim, kRows);
  static_assert(kRow >= 0, "kernel_table.h has no such row");
  return kernel_table::kDecode[kRow].tile;
}

constexpr int kMaxWarps = 4;   // per thread block; GPUs with less shared memory run fewer teams
constexpr int kUnitKeys = 64;  // granule of the KV splits, a multiple of the keys per step of every tile

}  // namespace flashattn_ext::decode
