// How decoding (decode.h) divides a call into work, and the workspace of the call.
#pragma once

#include "cpu/decode/cache_rows.h"
#include "cpu/decode/decode_products.h"
#include "cpu/forward/forward.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// How a call is divided into work. A tile is one split of the keys for one block of rows; a work item is a tile for
// some adjacent KV heads.
class DecodePlan {
 public:
  explicit DecodePlan(const DecodeParams& params) : p(params) {}

  int64_t most_rows() const { return p.invariant ? 64 : 128; }  // of a block
  // Rows per KV head: queries times query heads per KV head; 0 for sequences that forward.h computes.
  int64_t rows(int64_t b) const {
    return has_few_queries(p, b, kFloatLanes) ? query_sequence(p, b).length * p.group_size() : 0;
  }
  int64_t blocks(int64_t b) const { return ceil_div(rows(b), most_rows()); }
  int64_t block_rows(int64_t b) const { return lesser(rows(b), most_rows()); }  // rows of the largest block
  // Number of KV splits; invariant calls have one. The choice depends only on the sequence, so that the result is
  // bit-identical for every batch and number of threads: few enough that combining the splits and the latency of their
  // first keys cost little, and enough for a few sequences to keep many threads busy.
  int64_t splits(int64_t b) const {
    constexpr int64_t kFewestKeys = 512, kMostKeys = 2048, kKeysOfRow = 16, kMostParts = 32;
    if (p.invariant) return 1;
    if (p.num_splits > 0) return p.num_splits;
    const int64_t length = KeyLocator(p, b).length;
    int64_t keys = lesser(kMostKeys, greater(kFewestKeys, length / 8));
    keys = greater(keys, kKeysOfRow * block_rows(b));
    return lesser(kMostParts, greater<int64_t>(1, ceil_div(length, keys)));
  }
  int64_t tiles(int64_t b) const { return blocks(b) * splits(b); }

  const DecodeParams& p;
};

// The partial result of one split for the rows of a block: running maximum, sum of weights and unnormalised output of
// each row, relative to the maximum.
template <class Real>
struct PartialRows {
  // For blocks of at most `rows` rows.
  PartialRows(int64_t rows, int64_t columns_v, ScratchCarver* carve)
      : max(carve->take<Real>(rows)), sum(carve->take<Real>(rows)), out(carve->take<Real>(rows * columns_v)) {}

  Real *max, *sum, *out;
};

// The partial results of the KV heads of a tile, and behind them those of the next tiles.
template <class Real>
struct PartialHeads {
  char* first;
  int64_t bytes, rows, columns_v;  // of a head

  PartialRows<Real> operator[](int64_t n) const {
    ScratchCarver carve(first + n * bytes);
    return PartialRows<Real>(rows, columns_v, &carve);
  }
};

// The workspace of a call: rotated queries, partial results of the splits, scratch of each worker.
template <class In, class Op>
struct DecodeWorkspace {
  using Real = typename Op::Real;
  static constexpr int W = Op::S::kWidth;

  DecodeWorkspace(const DecodeParams& p, int64_t workers, ScratchCarver carve)
      : has_no_parts(p.invariant),
        units(padded_units<Op>(p.head_dim)),
        columns_v(padded_units<Op>(p.head_dim_v) * Op::kPack) {
    const DecodePlan plan(p);
    int64_t tiles = 0, all_partials = 0;
    block_rows = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      block_rows = greater(block_rows, head_rows(plan, b));
      tiles += plan.tiles(b);
      all_partials += plan.tiles(b) * p.heads_k * partial_bytes(head_rows(plan, b));
    }
    heads = heads_of_item(p, tiles, workers);
    rotated_q = carve.take<Widened<In>>(rotated_elements(p));
    partials = carve.take<char>(all_partials);
    scratch = carve.take<char>(0);
    bytes = carve.used();
  }

  bool has_no_parts;         // in an invariant call
  int64_t block_rows;        // rows of the largest block of the call, in whole bands
  int64_t units, columns_v;  // units per padded row of q and k, elements per padded row of v
  int64_t heads;             // maximum KV heads per work item
  Widened<In>* rotated_q;
  char* partials;  // sequence after sequence [tiles][heads_k] PartialRows
  char* scratch;   // the rest of the workspace, for the workers
  int64_t bytes;   // size of the workspace without scratch

  // Rows of scratch for each KV head in a work item of this sequence.
  int64_t head_rows(const DecodePlan& plan, int64_t b) const { return padded_rows<W>(plan.block_rows(b)); }
  // Bytes of the partial result of a block with so many rows, for one KV head. Invariant calls have none.
  int64_t partial_bytes(int64_t rows) const {
    if (has_no_parts) return 0;
    ScratchCarver measure(nullptr);
    PartialRows<Real>(rows, columns_v, &measure);
    return measure.used();
  }

 private:
  // KV heads per work item: as many adjacent heads as keep their rows in the L1 cache, while every worker still gets
  // several items. The result does not depend on this number.
  int64_t heads_of_item(const DecodeParams& p, int64_t tiles, int64_t workers) const {
    constexpr int64_t kRows = 64;  // at most 64 heads: SplitSums has a 64-bit mask of heads
    const int64_t items_of_worker = p.invariant ? 2 : 4;
    if (p.k.head_stride > p.k.row_stride || p.v.head_stride > p.v.row_stride || block_rows == 0) return 1;
    int64_t most = lesser(p.heads_k, greater<int64_t>(1, kRows / block_rows));
    while (most > 1 && tiles * ceil_div(p.heads_k, most) < items_of_worker * workers) most = ceil_div(most, 2);
    return ceil_div(p.heads_k, ceil_div(p.heads_k, most));
  }
};

// Finds partial results, for sequences in ascending order. Those of successive splits of a block are heads_k apart.
template <class In, class Op>
class PartialCursor {
 public:
  PartialCursor(const DecodePlan& plan, const DecodeWorkspace<In, Op>& workspace) : plan_(plan), w_(workspace) {}

  PartialHeads<typename Op::Real> find(int64_t b, int64_t tile, int64_t head) {
    const int64_t heads = plan_.p.heads_k;
    for (; batch_ < b; ++batch_) first_ += plan_.tiles(batch_) * heads * w_.partial_bytes(w_.head_rows(plan_, batch_));
    const int64_t rows = w_.head_rows(plan_, b), bytes = w_.partial_bytes(rows);
    return {w_.partials + first_ + (tile * heads + head) * bytes, bytes, rows, w_.columns_v};
  }

 private:
  const DecodePlan& plan_;
  const DecodeWorkspace<In, Op>& w_;
  int64_t batch_ = 0, first_ = 0;  // a sequence, and the bytes of the partial results of those before it
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
