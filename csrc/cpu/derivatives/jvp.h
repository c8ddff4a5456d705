// Forward mode: the tangents of out and lse (docs/derivatives.md), one query tile of one head at a time against all its
// visible key tiles. With the weights P known from lse, A of tangent.h, m = keep / p_keep, and any pivot c of a row:
//
//   tlse = sum_j P A + p_sink * tsink
//   tout = sum_j P m (A - c) v_j + (c - tlse) out + sum_j P m tv_j
//
// Absent tangents cost nothing: their products are not computed. Scores are transposed as in forward.h.
#pragma once

#include "cpu/derivatives/tangent.h"
#include "cpu/score/isolated_rows.h"
#include "cpu/vectors/schedule.h"
#include "cpu/vectors/views.h"
#include "rules/lse_words.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op>
struct JvpScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  JvpScratch(const JvpParams& p, ScratchCarver carve)
      : size(tile_size<Op>(p)),
        units(padded_units<Op>(p.head_dim)),
        units_v(padded_units<Op>(p.head_dim_v)),
        columns_v(units_v * Op::kPack),
        staged(carve.take<Unit>(greater(size.queries * units, size.keys * units_v))),
        q_transposed(carve.take<Unit>(units * size.queries)),
        tq_transposed(carve.take<Unit>(p.tangents.q.data ? units * size.queries : 0)),
        values(carve.take<Unit>(row_panel_units<Op>(size.keys, units_v))),
        keys(carve.take<Unit>(product_row_units<Op>(size.keys, units))),
        tk(carve.take<Unit>(p.tangents.k.data ? product_row_units<Op>(size.keys, units) : 0)),
        tile(p, size, &carve),
        tangents(p, p.tangents, size, &carve),
        out(carve.take<Real>(size.queries * columns_v)),
        row(carve.take<Real>(columns_v)),
        rows(size, &carve),
        isolated_v(p.has_mask(), size.keys, units_v, &carve),
        bytes(carve.used()) {}

  TileSize size;
  int64_t units, units_v, columns_v;   // sizes of a padded row: units of q and k, units and columns of v
  Unit* staged;                        // q, tq, v and tv in turn, as staged rows (pack.h)
  Unit *q_transposed, *tq_transposed;  // B operands
  Unit* values;                        // v and tv in turn, a B operand
  Unit *keys, *tk;                     // staged rows
  ScoreTile<Op> tile;
  TangentTile<Op> tangents;
  Real *out, *row;  // [queries][columns_v], without 1 / p_keep; one row
  TangentRows<Op> rows;
  IsolatedRows<In, Op> isolated_v;
  int64_t bytes;
};

template <class In, class Op, class Accuracy, class Rule>
class Jvp {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

 public:
  Jvp(const JvpParams& params, void* base)
      : p(params), rule(Rule::of(params)), scratch(params, base), size(scratch.size), philox(philox_key_of(p)) {}

  // A query tile of a query head.
  void run(const WorkItem& item) {
    const int64_t b = item.batch, h = item.head;
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const HeadMask mask(p, b, h, queries, KeyLocator(p, b));
    if constexpr (kIsGeneral<Rule>) {
      bias = HeadBias<Real>::of(p, b, h);
      tangent_bias = HeadBias<Real>::of(p.tangents, b, h);
    }
    batch = b;
    head = h;
    row0 = item.tile * size.queries;
    row_count = lesser(size.queries, queries.length - row0);
    first_row = queries.start + row0;
    load_queries();
    if (scratch.tangents.of_biases) {
      walk(mask, keys, TangentPass::kBiases);
      scratch.rows.end_biases(lane_count);
    }
    // Without tangents of logits and values, nothing is summed over keys.
    if (scratch.tangents.has_logit_tangents() || p.tangents.v.data) walk(mask, keys, TangentPass::kWeights);
    write();
  }

 private:
  // All key tiles that the query tile sees.
  void walk(const HeadMask& mask, const Sequence& keys, TangentPass pass) {
    const IndexRange rows{row0, row0 + row_count};
    for (int64_t n = mask.next_tile(size.keys, rows, -1); n >= 0; n = mask.next_tile(size.keys, rows, n)) {
      key_tile(mask, keys, n * size.keys, lesser(size.keys, keys.length - n * size.keys), pass);
    }
  }

  LseWords<Real> words_of(int64_t i) const { return LseWords<Real>::of(p, batch, head, first_row + i); }

  Panels<Op> transposed(const TensorView& t, Unit* to) {
    const StagedRows<Op> rows = stage_rows<Op>(row_of<const In>(t, batch, head, first_row), t.row_stride, row_count,
                                               p.head_dim, scratch.staged);
    return transposed_panels<Op>(to, rows, row_count, lane_count, scratch.units);
  }

  void load_queries() {
    lane_count = round_up(row_count, Op::S::kWidth);
    q_transposed = transposed(p.q, scratch.q_transposed);
    if (p.tangents.q.data) tq_transposed = transposed(p.tangents.q, scratch.tq_transposed);
    TangentRows<Op>& rows = scratch.rows;
    rows.lse.begin(!kIsGeneral<Rule>);
    for (int64_t i = 0; i < lane_count; ++i) {
      rows.lse.set(i, i < row_count ? words_of(i) : LseWords<Real>::of_no_key());
      rows.total[i] = rows.pivot[i] = rows.deviation[i] = 0;
    }
    std::memset(scratch.out, 0, row_count * scratch.columns_v * sizeof(Real));
  }

  void key_tile(const HeadMask& head_mask, const Sequence& keys, int64_t key0, int64_t count, TangentPass pass) {
    const int64_t hk = head / p.group_size(), row = keys.start + key0;
    const ScoreTile<Op>& tile = scratch.tile;
    const TangentTile<Op>& tangents = scratch.tangents;
    const PanelMask<Op> mask(head_mask, row0, row_count, key0, count, false, tile.limits);
    const auto staged = [&](const TensorView& t, Unit* to) {
      return stage_product_rows<Op>(row_of<const In>(t, batch, hk, row), t.row_stride, count, p.head_dim, to);
    };
    const StagedRows<Op> k = staged(p.k, scratch.keys);
    const StagedRows<Op> tk = tangents.of_k ? staged(p.tangents.k, scratch.tk) : StagedRows<Op>{};
    if (p.has_dropout()) {
      fill_keep_bits(tile.keep_bits, size.queries / kWordLanes, philox, p, batch, head, row0, row_count, key0, count);
    }
    const TilePlace place{row0, row_count, key0, count, head_mask.basic.first_position()};
    if constexpr (kIsGeneral<Rule>) {
      tile.biases.load(bias, place);
      tangents.biases.load(tangent_bias, place);
    }
    const Gemm<Op> qk{k.data, k.stride, q_transposed, tile.scores, size.queries};
    const int64_t units = ceil_div(p.head_dim, Op::kPack);
    for (int64_t lane = 0; lane < lane_count; lane += kPanel<Op>) {
      const IndexRange lanes{lane, lesser(lane + kPanel<Op>, lane_count)}, panel_keys = mask.panel_keys(lane);
      if constexpr (kIsGeneral<Rule>) {
        tile.biases.load_panel(bias, place, lanes, panel_keys, scratch.rows.lse.narrows);
        tangents.biases.load_panel(tangent_bias, place, lanes, panel_keys);
      }
      score_product(qk, panel_keys, lanes, units);
      if (pass == TangentPass::kWeights) {
        tangents.multiply(k, tk, q_transposed, tq_transposed, panel_keys, lanes, units);
      }
      weigh_tangents<Accuracy>(tile, tangents, rule, scratch.rows, pass, p.tangents.v.data, mask, lanes, panel_keys);
    }
    if (pass == TangentPass::kBiases) return;
    if (tangents.has_logit_tangents()) add_values(p.v, tangents.scores, mask, hk, row, count);
    if (p.tangents.v.data) add_values(p.tangents.v, tile.scores, mask, hk, row, count);
  }

  // Adds weights^T * (rows of v, or of its tangent) to the sums.
  void add_values(const TensorView& v, const Real* weights, const PanelMask<Op>& mask, int64_t hk, int64_t row,
                  int64_t count) {
    const In* const data = row_of<const In>(v, batch, hk, row);
    const bool isolates = p.has_mask() && !mask.is_whole();
    StagedRows<Op> rows = stage_rows<Op>(data, v.row_stride, count, p.head_dim_v, scratch.staged);
    if (isolates) rows = scratch.isolated_v.find(data, v.row_stride, count, p.head_dim_v, rows);
    const Panels<Op> panels = row_panels<Op>(rows, count, scratch.units_v, scratch.values);
    const Gemm<Op> product{reinterpret_cast<const Unit*>(weights), size.queries, panels, scratch.out,
                           scratch.columns_v};
    gemm<Order::kKMajor, Init::kAccumulate>(product, {0, row_count}, {0, scratch.columns_v}, KeysOfRows<Op>{mask});
    if (!isolates) return;
    scratch.isolated_v.add(scratch.out, scratch.columns_v, RowsThatSee{mask.limits()}, [&](int64_t to, int64_t key) {
      return PanelForms<Op>::of_key(product.a, size.queries, key, to);
    });
  }

  void write() {
    const Real inverse_keep = static_cast<Real>(1.0 / keep_probability(p.dropout_threshold));
    const Real sink = p.sink ? static_cast<const Real*>(p.sink)[head] : Real(0);
    const bool has_sink = p.has_sink && sink_counts(sink);
    const Real tangent_of_sink = p.tangents.sink ? static_cast<const Real*>(p.tangents.sink)[head] : Real(0);
    const TangentRows<Op>& rows = scratch.rows;
    for (int64_t i = 0; i < row_count; ++i) {
      const LseWords<Real> words = words_of(i);
      const bool used = !words.is_of_no_key();
      const Real sink_weight = used && has_sink ? std::exp2(words.sink_log2_weight(sink)) : Real(0);
      // The weights of a row add up to 1 with that of its sink, unless the caller passed the lse of a larger call.
      const Real sum = rows.total[i] + sink_weight;
      const bool has_all = std::abs(sum - 1) < weight_error(words.top);
      const Real factor = has_all ? 1 / sum : Real(1),
                 weight_of_keys = has_all ? 1 - factor * sink_weight : rows.total[i];
      const Real mean = factor * (rows.deviation[i] + sink_weight * tangent_of_sink) + rows.pivot[i] * weight_of_keys;
      *row_of<Real>(p.tangents.lse, batch, head, first_row + i) = used ? mean : Real(0);
      write_row(first_row + i, scratch.out + i * scratch.columns_v, factor * inverse_keep,
                used ? rows.pivot[i] - mean : Real(0));
    }
  }
  void write_row(int64_t row, Real* sums, Real factor_of_sums, Real factor_of_out) {
    widen_row(scratch.row, row_of<const In>(p.out, batch, head, row), p.head_dim_v);
    for (int64_t d = 0; d < p.head_dim_v; ++d) sums[d] = sums[d] * factor_of_sums + factor_of_out * scratch.row[d];
    narrow_row(row_of<In>(p.tangents.out, batch, head, row), sums, p.head_dim_v, Real(1));
  }

  const JvpParams& p;
  const Rule rule;
  JvpScratch<In, Op> scratch;
  const TileSize size;
  const PhiloxKey philox;
  HeadBias<Real> bias, tangent_bias;
  Panels<Op> q_transposed{}, tq_transposed{};
  // The current query tile; lane_count is row_count rounded up to whole vectors, first_row an index into the tensors.
  int64_t batch = 0, head = 0, row0 = 0, first_row = 0, row_count = 0, lane_count = 0;
};

template <class In, class Op, class Accuracy, class Rule>
void jvp(const JvpParams& p) {
  const TileSize size = tile_size<Op>(p);
  const int64_t scratch_bytes = JvpScratch<In, Op>(p, nullptr).bytes;
  const auto tiles_of = [&](int64_t b) { return ceil_div(query_sequence(p, b).length, size.queries); };
  run_query_tiles(p, tiles_of, [&](int worker) {
    return Jvp<In, Op, Accuracy, Rule>(p, static_cast<char*>(p.workspace) + worker * scratch_bytes);
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
