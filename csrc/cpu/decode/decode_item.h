// A work item of decoding: a block of rows of each of some adjacent KV heads. What both orders of sums (split_sums.h,
// invariant_sums.h) do with it.
#pragma once

#include "cpu/decode/cache_rows.h"
#include "cpu/decode/decode_plan.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Which keys a row sees.
struct RowVisibility {
  IndexRange range;
  const int32_t* intervals;  // of the first key, for the row's head; null without a Mask
  int64_t first_interval, query;

  bool operator()(int64_t key) const {
    if (key < range.begin || range.end <= key) return false;
    if (!intervals || first_interval + key < 0) return true;
    return intervals[2 * key] <= query && query < intervals[2 * key + 1];
  }
};

struct DecodeItem {
  // Block number `block` of the KV heads [head, head + heads), which are `scratch_rows` rows apart in scratch.
  DecodeItem(const DecodeParams& params, int64_t b, int64_t head, int64_t heads, int64_t block, int64_t scratch_rows)
      : p(params),
        queries(query_sequence(params, b)),
        keys(params, b),
        mask(params, queries.length, keys.length),
        batch(b),
        first_head(head),
        head_count(heads),
        row0(block * DecodePlan(params).most_rows()),
        row_count(lesser(DecodePlan(params).most_rows(), queries.length * params.group_size() - row0)),
        head_rows(scratch_rows) {}

  // Query and head of row r of the block of head number n; adjacent rows are the heads of one query.
  int64_t query_of(int64_t r) const { return (row0 + r) / p.group_size(); }
  int64_t head_of(int64_t n, int64_t r) const {
    return (first_head + n) * p.group_size() + (row0 + r) % p.group_size();
  }
  // Keys that any row of the block sees.
  IndexRange visible() const { return mask.keys_of(query_of(0), query_of(row_count - 1) + 1); }
  RowVisibility seen_by(int64_t n, int64_t r) const {
    const int64_t query = query_of(r);
    const int32_t* const intervals =
        p.has_intervals() ? head_intervals(p, batch, head_of(n, r), keys.first_interval) : nullptr;
    return {mask.keys_of(query, query + 1), intervals, keys.first_interval, query};
  }

  const DecodeParams& p;
  const Sequence queries;
  const KeyLocator keys;
  const Mask mask;
  const int64_t batch, first_head, head_count, row0, row_count, head_rows;
};

// The part of a worker's scratch that both orders have. "rows" are those of all heads of an item.
template <class In, class Op>
struct DecodeScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using Staged = Widened<In>;

  // tile: keys whose scores are kept.
  DecodeScratch(const DecodeWorkspace<In, Op>& w, int64_t tile, ScratchCarver* carve)
      : rows(w.heads * w.block_rows),
        units(w.units),
        columns_v(w.columns_v),
        q(carve->take<Unit>(rows * units)),
        q_row(carve->take<Unit>(units)),
        scores(carve->take<Real>(rows * tile)),
        pairs(carve->take<Unit>(Op::kPack == 2 ? rows * tile / 2 : 0)),
        staged_k(carve->take<Staged>(kDecodeKeys * units * Op::kPack)),
        staged_v(carve->take<Staged>(kDecodeKeys * columns_v)) {}

  int64_t rows, units, columns_v;
  Unit *q, *q_row;              // [rows][units], [units]
  Real* scores;                 // [rows][tile], later weights
  Unit* pairs;                  // [rows][tile / 2]: pairs of weights, bfloat16 only
  Staged *staged_k, *staged_v;  // [kDecodeKeys][columns]: rows padded to whole vectors, and all rows of fp8

  // Copies row r of the block of head number n to q_row, with zeros after it; zeros alone for a row of padding.
  FLASHATTN_SHARED void stage_query(const DecodeItem& item, int64_t n, int64_t r) const {
    using Element = typename Op::Element;
    const DecodeParams& p = item.p;
    auto* const row = reinterpret_cast<Element*>(q_row);
    const bool there = r < item.row_count;
    if (there) {
      with_type_of_q<In>(p, [&](auto element) {
        using Query = const decltype(element);
        copy_row(row, row_of<Query>(p.q, item.batch, item.head_of(n, r), item.queries.start + item.query_of(r)),
                 p.head_dim);
      });
    }
    std::fill(row + (there ? p.head_dim : 0), row + units * Op::kPack, Element{});
  }

  // The first kKeys rows of keys, or the rows of values, of head number n for a group of `count` keys: those of the
  // first head are `rows`. pointers: storage of the result.
  template <int64_t kKeys>
  const Staged* const* keys_of(const DecodeItem& item, const In* const* rows, int64_t count, int64_t n,
                               const Staged** pointers) const {
    return rows_of_head<kKeys>(rows, n * item.p.k.head_stride, count, item.p.head_dim, units * Op::kPack, staged_k,
                               pointers);
  }
  const Staged* const* values_of(const DecodeItem& item, const In* const* rows, int64_t count, int64_t n,
                                 const Staged** pointers) const {
    return rows_of_head<kDecodeKeys>(rows, n * item.p.v.head_stride, count, item.p.head_dim_v, columns_v, staged_v,
                                     pointers);
  }

  // What products prefetch. Rows of fp8 are prefetched all at once, by ask_for_rest(), because products read copies of
  // them.
  static Ahead<Staged>* used([[maybe_unused]] Ahead<In>* ahead) {
    if constexpr (kIsFloat8<In>) {
      return nullptr;
    } else {
      return ahead->any() ? ahead : nullptr;
    }
  }
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
