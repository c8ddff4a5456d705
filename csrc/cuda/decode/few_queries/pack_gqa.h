// PackGQA on Hopper, for calls with some dozens of query rows for each KV head: split-KV with the mainloop of the
// forward. The rows of all query heads of a KV head (GQA) fill one tile, in blocks of 16 queries of one head, so that
// each key is read once for all of them (cuda/sm90/few_queries/pack_gqa.cuh). combine.cu combines the parts.
#pragma once

#include <cstddef>

#include "cuda/decode/split/plan.h"

namespace flashattn_ext::decode {

constexpr int kBlockRows = 16;      // queries of one head that are adjacent rows of a tile
constexpr int64_t kMostParts = 64;  // parts that the keys of a KV head are divided into

// The kernel of a row of the table. The plan is a fixed one (plan.h), whose tasks are all rows of a KV head: their row
// tiles share the slots of a part. In a forward a part has part_keys keys, which depend on the shapes of one sequence
// only. A packed sequence of more keys finds its slots by the row at which its keys begin, so that there are at most
// 2 * total_k / part_keys slots for a KV head, whatever max_seqlen_k is.
struct PackGqaKernel {
  void (*run)(const DecodeParams&, const Plan&) = nullptr;
  int rows = 0;  // rows of a tile
  int keys = 0;  // keys of a step
  int columns = 0;
};

size_t pack_gqa_bytes(const DecodeParams& p, const PackGqaKernel& kernel);
void run_pack_gqa(const DecodeParams& p, const PackGqaKernel& kernel);

}  // namespace flashattn_ext::decode
