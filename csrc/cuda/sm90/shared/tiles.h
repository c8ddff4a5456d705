// What the tiles of the sm_90 kernels (cuda/table/kernel_table.h) share: warpgroups, register budgets, shared memory,
// workspace.
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

}  // namespace flashattn_ext::sm90
