// What kernel_table.h is made of: the sizes of a tile of each family of kernels, and the columns of a row. Also which
// calls a row serves, and how a kernel finds its row.
#pragma once

#include <cstddef>

#include "cuda/table/options.h"

struct __half;
struct __nv_bfloat16;

// Which tile of its row a kernel is compiled with: the first one, except in private builds that measure other tiles.
#if !defined(FLASHATTN_EXT_TILE_CHOICE)
#define FLASHATTN_EXT_TILE_CHOICE 0
#endif

// --- the sizes of a tile of each family of kernels -----------------------------------------------------------------

namespace flashattn_ext::sm80 {

struct ForwardTile {
  int warps = 0;
  int row_tiles = 0;  // row tiles of a warp: 16 queries each
  int keys = 0;
  int blocks = 0;        // resident on a multiprocessor; bounds the registers
  int stages = 1;        // stages of keys and values; with column_warps, of chunks of keys * 128 elements
  int column_warps = 1;  // warps that have the same queries and divide the columns of `out`: forward_large.cuh
  constexpr int queries() const { return warps / column_warps * row_tiles * 16; }
  constexpr bool exists() const { return warps > 0; }
};

struct BackwardTile {
  int warps, keys, queries;
  int score_key_warps;  // warps among which the keys of the scores are divided; sets of them divide the queries
  int grad_key_warps;   // warps among which the keys of dk and dv are divided; sets of them divide the columns
  int splits;           // thread blocks among which the columns of dq, dk and dv are divided
  int stages;           // stages of queries
  // Whether all tiles are swizzled (operand_tile.cuh), also those that would be padded. They are smaller then, but on
  // an H200 the backward takes 1 to 4 % more time. Only in 16 bits.
  bool swizzles;
  // Whether warps hold their values in registers, as operands. The tile of values in shared memory then becomes stages
  // and scores, and dP reads a half to three quarters of what it would. Only in 16 bits.
  bool holds_values;
  constexpr bool exists() const { return warps > 0; }
  constexpr bool operator==(const BackwardTile& x) const {
    return warps == x.warps && keys == x.keys && queries == x.queries && score_key_warps == x.score_key_warps &&
           grad_key_warps == x.grad_key_warps && splits == x.splits && stages == x.stages && swizzles == x.swizzles &&
           holds_values == x.holds_values;
  }
};

// The kernels of whole heads (cuda/sm80/whole_heads/), whose thread blocks have as many warps as a call has rows.
struct HeadsForwardTile {
  int keys;    // keys of a step
  int warps;   // warps of a thread block, at most
  int blocks;  // blocks of as many warps, resident on a multiprocessor; bounds the registers
  constexpr bool exists() const { return keys > 0; }
};

struct HeadsBackwardTile {
  int queries;  // queries of a tile, at most
  int step;     // queries whose scores a warp holds at a time
  int columns;  // columns of dq that a warp computes at a time
  int warps;    // warps of a thread block, at most: each has 16 keys
  int blocks;   // thread blocks of as many warps, resident on a multiprocessor; bounds the registers
  constexpr bool exists() const { return queries > 0; }
};

}  // namespace flashattn_ext::sm80

namespace flashattn_ext::sm90 {

// How a warpgroup of the forward orders a step. In e4m3 sums of products have registers of their own beside `out`.
enum class ForwardOrder {
  kOverlapped,  // the softmax of a step overlaps the product with the values of the step before
  kInTurn,      // one after the other: scores and sums of the other product share registers
};

struct ForwardTile {
  int groups = 0;  // warpgroups that compute; each has 64 queries
  int keys = 0;
  int stages = 0;  // stages of keys and values
  ForwardOrder order = ForwardOrder::kOverlapped;
  bool in_teams = false;  // whether a thread block has two such sets of warpgroups, each with query tiles of its own
  int query_stages = 1;   // with two, the queries of the next tile are loaded while the warpgroups compute
  constexpr int queries() const { return groups * 64; }
  constexpr int teams() const { return in_teams ? 2 : 1; }
  constexpr bool exists() const { return groups > 0; }
};

// The forward of short sequences (cuda/sm90/forward_short/), whose thread blocks are one warpgroup.
struct ShortForwardTile {
  int keys;    // keys of a step
  int blocks;  // resident on a multiprocessor; bounds the registers
  constexpr bool exists() const { return keys > 0; }
};

// How the warpgroups of the backward share the tensor cores. The fastest order depends on register pressure and was
// measured: lab/logs/sm90_backward.md.
enum class BackwardOrder {
  kPingPong,     // ping-pong: one issues products while the other computes, twice a step, with dq in the next step
  kThreePhases,  // ping-pong, three times a step, with dq in the same step: for head dims that leave few registers
  kApart,        // ping-pong, twice a step, with dq in a third warpgroup (backward_apart.cuh)
  kApartOnce,    // kApart with a single turn of each warpgroup in a step
  kPairs,        // a pipeline of warpgroups, in two thread blocks that exchange dS (backward_wide.cuh)
};

struct BackwardTile {
  int keys;             // 128: two warpgroups compute, or two thread blocks, with 64 each; 64: is_wide()
  int queries;          // queries of a step of the walk
  int stages;           // stages of queries and their output gradients
  int key_stages;       // stages of keys and values: two prefetch the next tile
  BackwardOrder order;  // kPingPong where a row names none; backward_wide.cuh only tests for kPairs
  // One warpgroup each for dv, dk and dq (backward_wide.cuh).
  constexpr bool is_wide() const { return keys == 64 || order == BackwardOrder::kPairs; }
  constexpr bool exists() const { return keys > 0; }
};

struct FewQueriesTile {
  int rows;    // rows of a KV head, at most: a kernel has the multiple of 64 that holds those of the call
  int keys;    // keys of a stage
  int stages;  // stages of keys and values
  constexpr bool exists() const { return rows > 0; }
};

struct SecondTile {
  int keys;     // keys of a thread block
  int queries;  // queries of a step of the walk
  int stages;   // stages of queries, their output gradients and their tangents
  constexpr bool exists() const { return keys > 0; }
};

}  // namespace flashattn_ext::sm90

namespace flashattn_ext::decode {

// A thread block computes one tile of rows of a KV head: the query heads of one KV head (GQA) for query 0, then for
// query 1, and so on. Its warps form n teams. Each team has its own multistage buffer of keys and values in shared
// memory (its ring) and processes every n-th step of keys for the whole tile. Its warps divide the tile by rows or by
// columns.
struct Tile {
  int row_tiles;     // MMA tiles of 16 rows per warp
  int row_warps;     // warps of a team along the rows
  int column_warps;  // warps of a team along the output columns; each recomputes the scores of its rows
  int keys;          // keys per step
  int stages;        // stages of a ring: one is computed while the copies of the others are in flight
  // KV heads that the rows are divided among. Their keys are adjacent in memory, and a team reads them together.
  int heads = 1;
  constexpr int all_rows() const { return 16 * row_tiles * row_warps; }
  constexpr int rows() const { return all_rows() / heads; }  // rows of a KV head
};

}  // namespace flashattn_ext::decode

// --- rows ------------------------------------------------------------------------------------------------------------

namespace flashattn_ext {

struct Float8;

// Element types of a row, as bits in the order of DType.
// kE4m3: keys and values in fp8, and in rows of the forward queries as well; other kernels get fp8 inputs widened to
// bfloat16.
enum Types : unsigned { kFp16 = 1, kBf16 = 2, kFp32 = 4, kE4m3 = 16, k16Bit = kFp16 | kBf16 };
template <class T>
inline constexpr Types kTypeOf = kFp32;
template <>
inline constexpr Types kTypeOf<__half> = kFp16;
template <>
inline constexpr Types kTypeOf<__nv_bfloat16> = kBf16;
template <>
inline constexpr Types kTypeOf<Float8> = kE4m3;
constexpr unsigned type_bit(DType type) {
  return type == DType::kFloat16    ? kFp16
         : type == DType::kBFloat16 ? kBf16
         : type == DType::kFloat32  ? kFp32
         : type == DType::kFloat8   ? kE4m3
                                    : 0;
}

// A class of head dims: the most columns of q and k, and of v and out, that its kernels take. They are the same in
// nearly all classes.
struct HeadDims {
  int qk, v;
  constexpr HeadDims(int both) : HeadDims(both, both) {}
  constexpr HeadDims(int qk, int v) : qk(qk), v(v) {}
  constexpr bool operator==(const HeadDims& other) const { return qk == other.qk && v == other.v; }
};

// The GPUs whose dispatch picks a row, and whose code a build therefore compiles.
enum Gpus {
  kHopper,     // compute capability 9.0 alone
  kOtherGpus,  // all but Hopper, which has kernels of its own for these calls
  kEveryGpu,
};

constexpr int kTileChoices = 3;
static_assert(FLASHATTN_EXT_TILE_CHOICE >= 0 && FLASHATTN_EXT_TILE_CHOICE < kTileChoices);

template <class Tile>
struct KernelRow {
  unsigned types;
  HeadDims head_dims;
  Options options;  // that its policies support
  Gpus gpus;
  int spill;                 // bytes of registers that ptxas may spill, with room for other versions of it
  Tile tiles[kTileChoices];  // a row with fewer ends in zeros
};
struct DecodeRow {
  unsigned types;
  int head_dim;
  int spill;
  decode::Tile tile;
  constexpr int kernel_rows() const { return tile.rows(); }  // the last template argument of its kernel
};
struct FewQueriesRow {
  unsigned types;
  int head_dim;
  int row_tiles;
  int spill;
  constexpr int kernel_rows() const { return row_tiles; }
};

// What a call asks of the table.
struct KernelCall {
  unsigned type;  // one of Types
  int64_t head_dim, head_dim_v;
  Options options;
  bool wants_largest = false;  // AttnParams::row_maxima
  bool is_invariant = false;
};

// A kernel runs the calls that use no other options than its policies support; a kernel for fp8, for groups or for few
// keys runs those calls alone.
template <class Row>
constexpr bool serves(const Row& row, const KernelCall& call) {
  return (row.types & call.type) && call.head_dim <= row.head_dims.qk && call.head_dim_v <= row.head_dims.v &&
         includes(row.options, call.options) &&
         includes(call.options, static_cast<Options>(row.options & (kFp8 | kGroups | kBrief | kFewTiles)));
}

// The number of the row that a kernel is compiled from; -1: the table does not have it.
template <class Row, size_t kRows>
constexpr int row_of_kernel(const Row (&table)[kRows], unsigned type, HeadDims head_dims, Options options) {
  for (size_t i = 0; i < kRows; ++i) {
    if ((table[i].types & type) && table[i].head_dims == head_dims && table[i].options == options)
      return static_cast<int>(i);
  }
  return -1;
}

template <class Tile>
constexpr Tile compiled_tile(const Tile (&tiles)[kTileChoices]) {
  return tiles[tiles[FLASHATTN_EXT_TILE_CHOICE].exists() ? FLASHATTN_EXT_TILE_CHOICE : 0];
}

// The tile of a kernel.
template <const auto& kTable, class T, int kHeadDim, Options kOptions, int kHeadDimV = kHeadDim>
constexpr auto tile_of() {
  constexpr int kRow = row_of_kernel(kTable, kTypeOf<T>, {kHeadDim, kHeadDimV}, kOptions);
  static_assert(kRow >= 0, "kernel_table.h has no such row");
  return compiled_tile(kTable[kRow].tiles);
}

// The tile of a kernel as a type.
template <const auto& kTable, class T, int kHeadDim, Options kOptions, int kHeadDimV>
struct TileOf {
  static constexpr auto kTile = tile_of<kTable, T, kHeadDim, kOptions, kHeadDimV>();
};

}  // namespace flashattn_ext
