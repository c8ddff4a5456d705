// Decoding: attention of few queries to a KV cache, or to many keys without one (few_queries.h), bound by memory
// bandwidth (docs/decoding.md). The query heads of a KV head (GQA) form one block of rows, so that keys and values are
// read once for all of them. A work item processes keys for several KV heads at once. The loop over its keys is here;
// the sums are those of split_sums.h, which any worker may begin at any group of keys, or in invariant calls those of
// invariant_sums.h.
#pragma once

#include "cpu/decode/append.h"
#include "cpu/decode/invariant_sums.h"
#include "cpu/decode/split_sums.h"
#include "cpu/forward/forward.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Attention of the item to the keys of a tile, in three passes over all heads: scores, softmax, values. Each group of
// kDecodeKeys keys prefetches the one after it, the last group of scores the first values, and the last group of values
// the first keys of the tile `next`, in the order of addresses: faster than prefetching both a whole tile ahead.
template <class In, class Sums>
void add_tile(Sums& sums, const typename Sums::Tile& here, const typename Sums::Tile& next) {
  constexpr int64_t G = kDecodeKeys;
  const DecodeItem& item = sums;
  const DecodeParams& p = item.p;
  const auto ahead_of = [&](const In* const* rows, int64_t left, const TensorView& t, int64_t columns) {
    return Ahead<In>(rows, lesser(G, left), item.head_count, t.head_stride, columns);
  };
  sums.begin_tile(here);
  for (int64_t j = 0; j < here.count; j += G) {
    Ahead<In> ahead = j + G < here.count ? ahead_of(here.k + j + G, here.count - j - G, p.k, p.head_dim)
                                         : ahead_of(here.v, here.count, p.v, p.head_dim_v);
    for (int64_t n = 0; n < item.head_count; ++n) sums.score_group(here, j, n, &ahead);
    ahead.ask_for_rest();
  }
  sums.weigh_tile(here);
  for (int64_t j = 0; j < here.count; j += G) {
    Ahead<In> ahead = j + G < here.count ? ahead_of(here.v + j + G, here.count - j - G, p.v, p.head_dim_v)
                                         : ahead_of(next.k, next.count, p.k, p.head_dim);
    for (int64_t n = 0; n < item.head_count; ++n) sums.add_values(here, j, n, &ahead);
    ahead.ask_for_rest();
  }
  sums.end_tile(here);
}

// Attention of the item to a range of keys. The next tile's rows are known while the current one is processed, for the
// prefetch.
template <class In, class Sums>
void add_keys(Sums& sums, IndexRange range) {
  const DecodeItem& item = sums;
  const int64_t keys = sums.tile_keys();
  typename Sums::Tile tiles[2];
  const auto find = [&](int64_t key0, typename Sums::Tile* tile) {
    tile->find(item.p, item.keys, item.first_head, key0, lesser(key0 + keys, range.end), kDecodeKeys);
  };
  sums.start();
  find(range.begin, &tiles[0]);
  for (int64_t n = 0; tiles[n % 2].count > 0; ++n) {
    const auto& here = tiles[n % 2];
    auto& next = tiles[(n + 1) % 2];
    find(here.key0 + here.count, &next);
    add_tile<In>(sums, here, next);
  }
  sums.store();
}

template <class In, class Op>
inline int64_t decode_workspace_bytes(const DecodeParams& p, int64_t workers) {
  const DecodeWorkspace<In, Op> w(p, workers, nullptr);
  const int64_t sums =
      p.invariant ? InvariantScratch<In, Op>(p, w, nullptr).bytes : SplitScratch<In, Op>(w, nullptr).bytes;
  return w.bytes + workers * greater(sums, ForwardScratch<In, Op>(p, nullptr).bytes);
}

// Computes all sequences with few queries.
template <class In, class Op, class Sums>
void decode_few_queries(const DecodeParams& p, const DecodeWorkspace<In, Op>& w, int64_t scratch_bytes) {
  const DecodePlan plan(p);
  // Calls body(item, scratch of a worker, cursor) for each tile of each of `heads`.
  const auto run_items = [&](int64_t heads, auto tiles_of, auto body) {
    struct Worker {
      const decltype(body)& process;
      char* scratch;
      PartialCursor<In, Op> partials;

      void run(const WorkItem& item) { process(item, scratch, partials); }
    };
    run_tiles(p, heads, WorkOrder::kTilesFirst, tiles_of,
              [&](int worker) { return Worker{body, w.scratch + worker * scratch_bytes, {plan, w}}; });
  };
  const int64_t head_groups = p.heads_k > 0 ? ceil_div(p.heads_k, w.heads) : 0;
  const auto tiles_of = [&plan](int64_t b) { return plan.tiles(b); };
  run_items(head_groups, tiles_of, [&](const WorkItem& item, char* scratch, auto& partials) {
    const int64_t b = item.batch, parts = plan.splits(b), head = item.head * w.heads;
    const auto partial = partials.find(b, item.tile, head);
    const DecodeItem decode_item(p, b, head, lesser(w.heads, p.heads_k - head), item.tile / parts, partial.rows);
    Sums sums(decode_item, w, scratch, partial);
    add_keys<In>(sums, sums.keys_of_part(item.tile % parts, parts));
  });
  if constexpr (Sums::kCombinesParts) {
    const auto blocks_of = [&plan](int64_t b) { return plan.blocks(b); };
    run_items(p.heads_k, blocks_of, [&](const WorkItem& item, char*, auto& partials) {
      const int64_t b = item.batch, parts = plan.splits(b);
      const auto partial = partials.find(b, item.tile * parts, item.head);
      const DecodeItem decode_item(p, b, item.head, 1, item.tile, partial.rows);
      for (int64_t r = 0; r < decode_item.row_count; ++r) finish_row<In>(decode_item, partial, r, parts);
    });
  }
}

template <class In, class Op, class Accuracy>
void decode(const DecodeParams& params) {
  using Real = typename Op::Real;
  DecodeParams p = params;
  const DecodeWorkspace<In, Op> w(p, static_cast<const CpuExecutor*>(p.stream)->num_threads, p.workspace);
  append<Real, In>(&p, w.rotated_q);
  if (p.invariant) {
    decode_few_queries<In, Op, InvariantSums<In, Op, Accuracy>>(p, w, InvariantScratch<In, Op>(p, w, nullptr).bytes);
  } else {
    decode_few_queries<In, Op, SplitSums<In, Op, Accuracy>>(p, w, SplitScratch<In, Op>(w, nullptr).bytes);
  }
  p.workspace = w.scratch;
  if (p.has_score_option() || p.has_bias()) {
    forward<In, Op, Accuracy, GeneralScore<Real, Accuracy>>(p, &p);
  } else {
    forward<In, Op, Accuracy, ScoreRule<Real, PlainProducts<true>>>(p, &p);
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
