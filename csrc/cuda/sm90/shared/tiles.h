// What the tiles of the sm_90 kernels (cuda/table/kernel_table.h) share: warpgroups, register budgets, shared memory,
// workspace, named barriers.
#pragma once

#include <cstddef>

#include "cuda/host/call.h"
#include "cuda/table/kernel_table.h"

namespace flashattn_ext::sm90 {

constexpr int kGroupThreads = 128;  // threads of a warpgroup

// Registers per thread, multiples of 8, of the producer warpgroup and of each consumer warpgroup. A multiprocessor has
// 64 Ki.
struct RegisterBudget {
  int producer;
  int consumer;
};
constexpr RegisterBudget register_budget(int groups) {
  return groups == 4 ? RegisterBudget{32, 112} : groups == 3 ? RegisterBudget{32, 160} : RegisterBudget{40, 232};
}
constexpr RegisterBudget kBackwardRegisters{24, 240};

// The registers of the forward of head dims above 256: the loading warpgroup and the warpgroup of scores, which both
// release some of the 128 that they start with, and the two that accumulate `out`.
struct LargeRegisterBudget {
  int loader;
  int scores;
  int sums;
};
constexpr LargeRegisterBudget kLargeRegisters{40, 120, 176};

// The registers of the backward of head dims above 128: the loading warpgroup, the warpgroups of dv and of dk, and the
// warpgroup of dq.
struct WideRegisterBudget {
  int loader;
  int keys;
  int queries;
};
// in_pairs: of thread blocks, whose loading warps have more to keep.
constexpr WideRegisterBudget wide_register_budget(int head_dim, bool in_pairs) {
  return head_dim > 256 ? WideRegisterBudget{56, 192, 72}
         : in_pairs     ? WideRegisterBudget{40, 200, 72}
                        : WideRegisterBudget{24, 208, 72};
}

// The registers of the backward with dq apart (backward_apart.cuh).
constexpr WideRegisterBudget kApartRegisters = wide_register_budget(128, false);

constexpr int kSharedLimit = 227 * 1024;

// The scores of a head that tiles of a forward compute, those of rows and keys that do not exist included.
inline int64_t padded_products(const AttnParams& p, const ForwardTile& tile) {
  return tile_count(p.seqlen_q, tile.queries()) * tile.queries() * tile_count(p.seqlen_k, tile.keys) * tile.keys;
}

// The query rows of the multiprocessor that computes most of them. A tile computes no warpgroup without rows. Causal
// warpgroups see half of the keys on average, and tiles start in the order of their lengths, so that they are spread
// evenly.
inline int64_t busiest_rows(const AttnParams& p, const ForwardTile& tile, int64_t multiprocessors) {
  const int64_t of_head = tile_count(p.seqlen_q, tile.queries()), tiles = p.batch * p.heads_q * of_head;
  const int64_t rows = std::min<int64_t>(tile.queries(), tile_count(p.seqlen_q, 64) * 64);
  if (p.window_right != 0) return tile_count(tiles, multiprocessors) * rows;
  const int64_t groups = tile_count(p.seqlen_q, 64);
  return std::max(rows, tiles * rows * (groups + 1) / (2 * groups * multiprocessors));
}

constexpr size_t kForwardBytes = 64;  // workspace of the forward and of forward mode: TileGrid::taken

// Sums of dq of half a query tile, in vectors of four floats.
constexpr int kHalfVectors = 8 * kGroupThreads;
// All those of a call of many short sequences (heads.cuh) in which `blocks` thread blocks have one KV head each. With
// one key tile there are none.
inline int64_t head_sum_vectors(const AttnGradParams& p, const BackwardTile& tile, int64_t blocks) {
  return p.seqlen_k > tile.keys ? blocks * p.group_size() * tile_count(p.seqlen_q, tile.queries) * 2 * kHalfVectors : 0;
}
// Thread blocks of such a call, which are resident together: each takes every so many heads.
inline int64_t head_blocks(const AttnGradParams& p, int64_t multiprocessors) {
  return std::min<int64_t>(p.batch * p.heads_k, multiprocessors);
}

// --- named barriers ------------------------------------------------------------------------------------------------
//
// Number 0 is that of __syncthreads. A range has one barrier for each warpgroup that computes, or for each half of the
// columns.

// forward.cuh
enum ForwardBarrier : int {
  kForwardPingPong = 1,  // to 4: a warpgroup waits at its own before it issues products; the one before it arrives
};

// jvp.cuh
enum JvpBarrier : int {
  kJvpPingPong = 1,  // to 3: as kForwardPingPong
};

// forward_large.cuh
enum LargeForwardBarrier : int {
  kHalfCleared = 1,  // and 2: the warps of a half have zeroed rows of values behind the last key
};

// backward.cuh, backward_turns.cuh, backward_bias.cuh, dq_adder.cuh, heads*.cuh, second*.cuh
enum BackwardBarrier : int {
  kBackwardPingPong = 1,  // and 2: a warpgroup waits at its own before it issues products; the other one arrives
  kGroupCleared = 3,      // and 4: the warps of a warpgroup have zeroed rows behind the last key or query
  kDqFull = 5,            // and 6: the warpgroup arrives when its part of dq is in shared memory; the adder waits
  kDqEmpty = 7,           // and 8: the adder arrives when it has read the part; the warpgroup waits
  kAddersMeet = 9,        // the two adders of a deterministic call with a bias wait for each other
  kDscores = 10,          // dS^T of both warpgroups is written. In three phases also 11: a warpgroup arrives at the
                          // barrier of the other one and waits at its own
  kScoresWritten = 12,    // second.cuh: F, T and the weights of both warpgroups are in shared memory
  kScoresRead = 13,       // second.cuh: both warpgroups have read them, and they may be overwritten
  kKeysCleared = 14,      // second*.cuh: both warpgroups have zeroed their parts of the rows behind the last key
};

// few_queries/: backward_work.cuh, backward.cuh, backward_together.cuh
enum FewQueriesBarrier : int {
  kFewQueriesGroup = 1,     // and 2 for the second warpgroup: its warps have written dS, or have read the keys
  kFewQueriesBoth = 3,      // both warpgroups have written scores, or have read the memory in which they exchange dq
  kFewQueriesKeysRead = 4,  // backward_together.cuh: the products of the warpgroup of dv with the keys are complete
};

// backward_wide.cuh
enum WideBackwardBarrier : int {
  kWideGroup = 1,  // to 3: the warps of a warpgroup have zeroed rows, or have read the buffer of kept weights
};

}  // namespace flashattn_ext::sm90
