// Tiles of the decoding kernels.
#pragma once

#include "cuda/table/kernel_table.h"

namespace flashattn_ext::decode {

// The number of a row of the table; -1: it has none. rows: rows of its tile.
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
constexpr DecodeRow row_of_tile() {
  constexpr int kRow = row_of(kTypeOf<T>, kHeadDim, kRows);
  static_assert(kRow >= 0, "kernel_table.h has no such row");
  return kernel_table::kDecode[kRow];
}

constexpr int kMaxWarps = 4;   // per thread block; GPUs with less shared memory run fewer teams
constexpr int kUnitKeys = 64;  // granule of the KV splits, a multiple of the keys per step of every tile

// The sizes of a tile that decide whether and how a kernel is launched.
struct TileSizes {
  int rows = 0;                         // rows of a KV head
  int heads = 0;                        // KV heads
  int team_warps = 0;                   // warps per team
  int query_bytes = 0, team_bytes = 0;  // shared memory for the queries, and per team
  int team_elements = 0;                // elements of the ring of a team, behind its row sums
  int sums_begin = 0;                   // where the accumulators of a team begin, in elements of its ring
  bool ahead = false;                   // whether the next part is prefetched, which takes a second tile of queries
};

constexpr int kSumPadding = 8;   // floats behind a row of accumulators; they avoid bank conflicts between rows
constexpr int kRowSumBytes = 8;  // sizeof(RowSum)

// The epilogue stores a team's accumulators over its ring. With three stages it starts at the last stage, while the
// other stages already receive the first keys of the next part. Stages in fp8 have half of the bytes that they have in
// 16 bits, but accumulators do not: with more than a stage of them beside the first stages of the next part there would
// be shared memory for one thread block only. kernel_type: that of keys and values.
constexpr TileSizes sizes_of(unsigned kernel_type, const DecodeRow& row) {
  const Tile& tile = row.tile;
  // Elements of a tile in shared memory: fp8 is widened to bfloat16, and two of its keys or values fill one element.
  const int bytes = kernel_type == kFp32 ? 4 : 2, pack = kernel_type == kE4m3 ? 2 : 1;
  const int stage = 2 * tile.keys * tile.heads * row.head_dim / pack;
  const int sums = tile.all_rows() * (row.head_dim + kSumPadding) * 4 / bytes;
  TileSizes sizes;
  sizes.rows = tile.rows();
  sizes.heads = tile.heads;
  sizes.team_warps = tile.row_warps * tile.column_warps;
  sizes.ahead = tile.stages > 2 && (kernel_type != kE4m3 || 4 * sums <= 5 * stage);
  sizes.sums_begin = sizes.ahead ? (tile.stages - 1) * stage : 0;
  const int ring = tile.stages * stage, sums_end = sizes.sums_begin + sums;
  sizes.team_elements = ring > sums_end ? ring : sums_end;
  sizes.team_bytes = tile.all_rows() * kRowSumBytes + sizes.team_elements * bytes;
  const int query_stride = row.head_dim + 16 / bytes;  // kTileStride
  sizes.query_bytes = (sizes.ahead ? 2 : 1) * tile.all_rows() * query_stride * bytes;
  return sizes;
}

}  // namespace flashattn_ext::decode
