#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "cuda/decode/few_queries/pack_gqa.h"
#include "cuda/decode/split/kernels.h"
#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/stages/tile_order.cuh"

namespace flashattn_ext::decode {
namespace {

struct PackGqaLaunch {
  Plan plan{};
  int64_t rows;     // rows of a KV head
  int64_t q_bytes;  // bytes of the rotated queries

  PackGqaLaunch(const DecodeParams& p, const PackGqaKernel& kernel) : rows(p.seqlen_q * p.group_size()) {
    plan.group = static_cast<int>(p.group_size());
    const int64_t head_rows = tile_count(p.seqlen_q, kBlockRows) * kBlockRows;
    plan.row_tiles = static_cast<int>(tile_count(p.group_size() * head_rows, kernel.rows));
    const int64_t tasks = p.batch * p.heads_k;
    int64_t parts = parts_of(p, kernel), slots = tasks * parts;
    if (p.splits_alone) {
      const int64_t keys = tile_count(tile_count(p.seqlen_k, parts), kernel.keys) * kernel.keys;
      plan.part_keys = static_cast<int>(keys);
      parts = tile_count(p.seqlen_k, keys);
      const int64_t whole_parts = p.total_k / keys;
      slots = p.is_varlen() ? p.heads_k * (whole_parts + std::min(p.batch, whole_parts)) : tasks * parts;
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
  int64_t parts_of(const DecodeParams& p, const PackGqaKernel& kernel) const {
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
  size_t set_workspace(const DecodeParams& p, const PackGqaKernel& kernel, TensorView* q) {
    return plan.place(p, q_bytes, p.batch * p.heads_k, kernel.columns, q);
  }
};

}  // namespace

size_t pack_gqa_bytes(const DecodeParams& p, const PackGqaKernel& kernel) {
  TensorView q;
  return PackGqaLaunch(p, kernel).set_workspace(p, kernel, &q);
}

void run_pack_gqa(const DecodeParams& params, const PackGqaKernel& kernel) {
  DecodeParams p = params;
  PackGqaLaunch launch(p, kernel);
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
