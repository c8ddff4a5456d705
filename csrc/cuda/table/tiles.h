// The sizes of a tile of each family of kernels, for kernel_table.h.
#pragma once

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
  int keys;    // of a step
  int warps;   // of a thread block, at most
  int blocks;  // of as many warps, resident on a multiprocessor; bounds the registers
  constexpr bool exists() const { return keys > 0; }
};

struct HeadsBackwardTile {
  int queries;  // of a tile, at most
  int step;     // queries whose scores a warp holds at a time
  int columns;  // of dq that a warp computes at a time
  int warps;    // of a thread block, at most: each has 16 keys
  int blocks;   // as above
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
  int groups;  // warpgroups that compute; each has 64 queries
  int keys;
  int stages;          // stages of keys and values
  ForwardOrder order;  // kOverlapped where a row names none
  bool in_teams;       // whether a thread block has two such sets of warpgroups, each with query tiles of its own
  constexpr int queries() const { return groups * 64; }
  constexpr int teams() const { return in_teams ? 2 : 1; }
  constexpr bool exists() const { return groups > 0; }
};

// The forward of short sequences (cuda/sm90/forward_short/), whose thread blocks are one warpgroup.
struct ShortForwardTile {
  int keys;    // of a step
  int blocks;  // resident on a multiprocessor; bounds the registers
  constexpr bool exists() const { return keys > 0; }
};

// How the warpgroups of the backward share the tensor cores. The fastest order depends on register pressure and was
// measured: lab/logs/sm90_backward.md.
enum class BackwardOrder {
  kPingPong,     // ping-pong: one issues products while the other computes, twice a step, with dq in the next step
  kThreePhases,  // ping-pong, three times a step, with dq in the same step: for head dims that leave few registers
  kApart,        // ping-pong, twice a step, with dq in a third warpgroup (backward_apart.cuh)
  kApartOnce,    // the same with a single turn of each warpgroup in a step
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

struct ResidentTile {
  int rows;    // packed rows of a KV head, at most: a kernel has the multiple of 64 that holds those of the call
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

// A thread block computes one tile of packed rows: the query heads of one KV head (GQA) for query 0, then for query 1,
// and so on. Its warps form n teams. Each team has its own multistage buffer of keys and values in shared memory (its
// ring) and processes every n-th step of keys for the whole tile. Its warps divide the tile by rows or by columns.
struct Tile {
  int row_tiles;     // MMA tiles of 16 packed rows per warp
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
