#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "cuda/decode/few_rows/few_rows.h"
#include "cuda/decode/few_rows/packed.h"
#include "cuda/decode/split/kernels.h"
#include "cuda/host/call.h"
#include "cuda/host/device.h"
#include "cuda/passes/aligned_rows.h"
#include "cuda/stages/tile_order.cuh"

namespace flashattn_ext::decode {
namespace {

constexpr int64_t kMostParts = 64;

struct PackedLaunch {
  Plan plan{};
  int64_t rows;     // of a KV head
  int64_t q_bytes;  // bytes of the rotated queries

  PackedLaunch(const DecodeParams& p, const PackedKernel& kernel) : rows(p.seqlen_q * p.group_size()) {
    plan.group = static_cast<int>(p.group_size());
    const int64_t head_rows = tile_count(p.seqlen_q, kBlockRows) * kBlockRows;
    plan.row_tiles = static_cast<int>(tile_count(p.group_size() * head_rows, kernel.rows));
    const int64_t tasks = p.batch * p.heads_k;
    int64_t parts = parts_of(p, kernel), slots = tasks * parts;
    if (p.splits_alone) {
      const int64_t keys = tile_count(tile_count(p.seqlen_k, parts), kernel.keys) * kernel.keys;
      plan.part_keys = static_cast<int>(keys);
      parts = tile_count(p.seqlen_k, keys);
      const int64_t packed = p.total_k / keys;
      slots = p.is_varlen() ? p.heads_k * (packed + std::min(p.batch, packed)) : tasks * parts;
    }
    plan.splits = plan.most_parts = static_cast<int>(parts);
    plan.blocks = static_cast<int>(tasks * plan.row_tiles * parts);
    plan.by_task = true;
    plan.slots = static_cast<int>(parts > 1 ? slots : 0);
    plan.slot_rows = static_cast<int>(rows);
    q_bytes = p.rotary.cos ? p.seqlen_q * p.batch * p.heads_q * p.head_dim * element_bytes(p) : 0;
  }

  // The number of parts with which the last thread block ends first. A part takes as long as its keys and some more.
  // Where the results of a sequence must not depend on its batch, the batch is one sequence, and longer parts are a
  // compromise with large batches.
  int64_t parts_of(const DecodeParams& p, const PackedKernel& kernel) const {
    constexpr int64_t kEpilogueKeys = 512;
    const int64_t least_bytes = p.splits_alone ? 512 << 10 : 256 << 10;
    const int64_t least_keys = least_bytes / ((p.head_dim + p.head_dim_v) * element_bytes(p));
    const int64_t tiles = (p.splits_alone ? 1 : p.batch) * p.heads_k * plan.row_tiles, length = p.seqlen_k;
    int64_t best = 1, least = std::numeric_limits<int64_t>::max();
    for (int64_t parts = 1; parts <= std::min(kMostParts, std::max<int64_t>(1, length / least_keys)); ++parts) {
      const int64_t waves = tile_count(tiles * parts, multiprocessors());
      const int64_t keys = tile_count(tile_count(length, parts), kernel.keys) * kernel.keys;
      if (waves * (keys + kEpilogueKeys) < least) best = parts, least = waves * (keys + kEpilogueKeys);
    }
    return best;
  }

  // Returns the size of the workspace in bytes. q: the rotated queries.
  size_t set_workspace(const DecodeParams& p, const PackedKernel& kernel, TensorView* q) {
    return plan.place(p, q_bytes, p.batch * p.heads_k, kernel.columns, q);
  }
};

}  // namespace

bool has_packed_rows(const DecodeParams& p, const PackedKernel* kernel) {
  if (!kernel || p.is_fp8 || p.invariant || p.num_splits > 0 || p.cache.block_table) return false;
  if ((p.is_varlen() && !p.splits_alone) || p.seqlen_q > kMostPackedQueries) return false;
  if (p.batch * p.heads_q * query_rows(p) == 0 || p.cache.entries == 0 || p.seqlen_k < kLeastSplitKeys) return false;
  // Tiles of 16 rows of the other kernels are as fast; in a forward with more than 128 columns 0.86 times. Few queries
  // leave most rows of a block empty, which costs nothing as long as there is one tile.
  const int64_t rows = p.seqlen_q * p.group_size(), least = kernel->columns > 128 ? 9 : 17;
  const int64_t padded = tile_count(p.seqlen_q, kBlockRows) * kBlockRows * p.group_size();
  // Works are numbered in 32 bits.
  const int64_t tiles = p.batch * p.heads_k * tile_count(padded, kernel->rows);
  if (tiles > std::numeric_limits<int32_t>::max() / (2 * kMostParts)) return false;
  return rows >= least && (padded <= kernel->rows || 2 * rows >= padded);
}

bool has_aligned_rows(const DecodeParams& p) {
  const auto aligned = [&](const TensorView& t, int64_t columns) {
    return rows_are_aligned(t, columns, element_bytes(p));
  };
  const bool has_q = p.rotary.cos ? p.head_dim % 8 == 0 : aligned(p.q, p.head_dim);
  return has_q && aligned(p.k, p.head_dim) && aligned(p.v, p.head_dim_v);
}

size_t packed_bytes(const DecodeParams& p, const PackedKernel& kernel) {
  TensorView q;
  return PackedLaunch(p, kernel).set_workspace(p, kernel, &q);
}

void run_packed(const DecodeParams& params, const PackedKernel& kernel) {
  DecodeParams p = params;
  PackedLaunch launch(p, kernel);
  TensorView rotated;
  launch.set_workspace(p, kernel, &rotated);
  append(p, p.rotary.cos ? rotated : TensorView{});
  if (p.rotary.cos) p.q = rotated;
  kernel.run(p, launch.plan);
  if (launch.plan.splits == 1) return;
  const auto combine_parts = p.dtype == DType::kFloat16 ? combine<__half> : combine<__nv_bfloat16>;
  combine_parts(p, launch.plan, p.batch * p.heads_k, launch.plan.slot_rows, kernel.columns);
}

}  // namespace flashattn_ext::decode
