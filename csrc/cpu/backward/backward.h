// Backward: dq, dk, dv by recomputing the probabilities from lse (FlashAttention-2, Dao 2023, Algorithm 2).
//
// One work item is a key tile of one KV head: dk and dv stay in scratch memory while it iterates over the query
// tiles of all query heads of its group. Scores are transposed as in forward.h. dq is a sum over key tiles, which add
// to it in ascending order (turns.h), so that the result has the same bits for every number of threads. Next: scores.h
// (from P and dP to dS), backward_workspace.h.
#pragma once

#include "cpu/backward/backward_finish.h"
#include "cpu/backward/key_tile_walk.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op>
struct BackwardScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  BackwardScratch(const AttnGradParams& p, void* base) : BackwardScratch(p, tile_size<Op>(p), ScratchCarver(base)) {}

  int64_t units, units_v;      // units of a padded row of q and k, and of v and dout
  int64_t columns, columns_v;  // their elements
  KeyRowsOperand<In, Op> k;
  Unit *v, *q, *dout;  // staged rows (pack.h)
  // B operands: row panels and transposed panels (pack.h).
  Unit *q_panels, *dout_panels, *q_transposed, *dout_transposed;
  ScoreTile<Op> tile;
  GradientTile<Op> gradients;
  Real *dk, *dv;  // [keys][columns], [keys][columns_v]
  KnownRows<Real> rows;
  IsolatedRows<In, Op> isolated_q, isolated_dout;
  int64_t bytes;

 private:
  FLASHATTN_SHARED BackwardScratch(const AttnGradParams& p, const TileSize& size, ScratchCarver carve)
      : units(padded_units<Op>(p.head_dim)),
        units_v(padded_units<Op>(p.head_dim_v)),
        columns(units * Op::kPack),
        columns_v(units_v * Op::kPack),
        k(p, size, units, true, &carve),
        v(carve.take<Unit>(product_row_units<Op>(size.keys, units_v))),
        q(carve.take<Unit>(size.queries * units)),
        dout(carve.take<Unit>(size.queries * units_v)),
        q_panels(carve.take<Unit>(row_panel_units<Op>(size.queries, units))),
        dout_panels(carve.take<Unit>(row_panel_units<Op>(size.queries, units_v))),
        q_transposed(carve.take<Unit>(units * size.queries)),
        dout_transposed(carve.take<Unit>(units_v * size.queries)),
        tile(p, size, &carve),
        gradients(p, size, &carve),
        dk(carve.take<Real>(size.keys * columns)),
        dv(carve.take<Real>(size.keys * columns_v)),
        rows(size, &carve),
        isolated_q(p.has_mask(), size.queries, units, &carve),
        isolated_dout(p.has_mask(), size.queries, units_v, &carve),
        bytes(carve.used()) {}
};

template <class In, class Op, class Accuracy, class Rule>
class Backward : KeyTileWalk<Backward<In, Op, Accuracy, Rule>, AttnGradParams, In, Op, Rule> {
  using Walk = KeyTileWalk<Backward, AttnGradParams, In, Op, Rule>;
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  friend Walk;
  using Walk::batch;
  using Walk::bias;
  using Walk::key0;
  using Walk::key_count;
  using Walk::keys;
  using Walk::p;
  using Walk::queries;
  using Walk::rule;
  using Walk::size;
  using Walk::workspace;

 public:
  Backward(const AttnGradParams& params, const BackwardWorkspace<In, Op>& call_workspace, void* base)
      : Walk(params, call_workspace), scales(params), scratch(params, base) {}

  // Processes one key tile of one KV head.
  void run(const WorkItem& item) {
    const int64_t b = item.batch, hk = item.head;
    this->begin(item);
    const int64_t row = keys.start + key0;
    scratch.k.load(row_of<const In>(p.k, b, hk, row), p.k.row_stride, key_count, p.head_dim);
    v = stage_product_rows<Op>(row_of<const In>(p.v, b, hk, row), p.v.row_stride, key_count, p.head_dim_v, scratch.v);
    std::memset(scratch.dk, 0, key_count * scratch.columns * sizeof(Real));
    std::memset(scratch.dv, 0, key_count * scratch.columns_v * sizeof(Real));
    for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
      this->walk(scratch.gradients.biases, h, item.tile_of_call);
    }
    const Real inverse_keep = static_cast<Real>(1.0 / keep_probability(p.dropout_threshold));
    this->write_key_rows(p.dk, hk, scratch.dk, scratch.columns, p.head_dim, Real(1));
    this->write_key_rows(p.dv, hk, scratch.dv, scratch.columns_v, p.head_dim_v, inverse_keep);
  }

 private:
  // Query tile `number` of query head h.
  void query_tile(const HeadMask& head_mask, int64_t h, int64_t number) {
    const int64_t row0 = number * size.queries, rows = lesser(size.queries, queries.length - row0);
    const bool pads = kIsGeneral<Rule> && scratch.gradients.biases.any();
    const PanelMask<Op> mask(head_mask, row0, rows, key0, key_count, pads, scratch.tile.limits);
    const int64_t lane_count = round_up(rows, Op::S::kWidth);
    isolates = p.has_mask() && !mask.is_whole();
    load_rows(h, row0, rows, lane_count);
    if (p.has_dropout()) {
      fill_keep_bits(scratch.tile.keep_bits, size.queries / kWordLanes, this->philox, p, batch, h, row0, rows, key0,
                     key_count);
    }
    const TilePlace place{row0, rows, key0, key_count, head_mask.basic.first_position()};
    if constexpr (kIsGeneral<Rule>) scratch.tile.biases.load(bias, place);
    for (int64_t lane = 0; lane < lane_count; lane += kPanel<Op>) {
      score_panel(head_mask, mask, place, {lane, lesser(lane + kPanel<Op>, lane_count)});
    }
    if constexpr (kIsGeneral<Rule>) {
      scratch.gradients.biases.end_tile(place, queries.start + row0, workspace.bias_turns);
    }
    key_gradients(mask);
    this->add_to_dq(head_mask, h, number, rows, [&](Real* sum, int64_t stride, bool is_first) {
      query_gradient(mask, rows, sum, stride, is_first);
    });
  }

  void load_rows(int64_t h, int64_t row0, int64_t rows, int64_t lane_count) {
    const int64_t row = queries.start + row0;
    const In *const q_data = row_of<const In>(p.q, batch, h, row), *const dout_data =
                                                                       row_of<const In>(p.dout, batch, h, row);
    StagedRows<Op> q = stage_rows<Op>(q_data, p.q.row_stride, rows, p.head_dim, scratch.q);
    StagedRows<Op> dout = stage_rows<Op>(dout_data, p.dout.row_stride, rows, p.head_dim_v, scratch.dout);
    q_transposed = transposed_panels<Op>(scratch.q_transposed, q, rows, lane_count, scratch.units);
    dout_transposed = transposed_panels<Op>(scratch.dout_transposed, dout, rows, lane_count, scratch.units_v);
    if (isolates) {
      q = scratch.isolated_q.find(q_data, p.q.row_stride, rows, p.head_dim, q);
      dout = scratch.isolated_dout.find(dout_data, p.dout.row_stride, rows, p.head_dim_v, dout);
    }
    q_panels = row_panels<Op>(q, rows, scratch.units, scratch.q_panels);
    dout_panels = row_panels<Op>(dout, rows, scratch.units_v, scratch.dout_panels);
    row_delta = workspace.delta + h * workspace.rows + workspace.first_row(p, batch, queries) + row0;
    this->load_statistics(scratch.rows, h, row, rows, lane_count, row_delta, scales.delta);
  }

  // S^T and dP^T, then P^T and dS^T, for the queries `lanes` of a tile.
  void score_panel(const HeadMask& head_mask, const PanelMask<Op>& mask, const TilePlace& place, IndexRange lanes) {
    const int64_t row0 = place.row0, rows = place.rows;
    const ScoreTile<Op>& tile = scratch.tile;
    const GradientTile<Op>& gradients = scratch.gradients;
    const IndexRange panel_keys = mask.panel_keys(lanes.begin);
    const Gemm<Op> qk{scratch.k.rows().data, scratch.k.rows().stride, q_transposed, tile.scores, size.queries};
    const Gemm<Op> dov{v.data, v.stride, dout_transposed, gradients.scores, size.queries};
    const int64_t units = ceil_div(p.head_dim, Op::kPack), units_v = ceil_div(p.head_dim_v, Op::kPack);
    if constexpr (kIsGeneral<Rule>) {
      const PanelOrigin next{row0 + lanes.end < queries.length, row0 + lanes.end, key0};
      tile.biases.load_panel(bias, place, lanes, panel_keys, scratch.rows.lse.narrows);
      score_product(qk, panel_keys, lanes, units, gradients.biases.adds_panels(),
                    [&](IndexRange part) { gradients.biases.ask_for(place, lanes, part); });
      score_product(dov, panel_keys, lanes, units_v, tile.biases.reads_panel(bias, next),
                    [&](IndexRange part) { tile.biases.ask_for(bias, next, part); });
    } else {
      score_product(qk, panel_keys, lanes, units);
      score_product(dov, panel_keys, lanes, units_v);
    }
    const IndexRange panel_rows{row0 + lanes.begin, row0 + lesser(lanes.end, rows)};
    const bool whole_rows = sizeof(In) <= 4 && this->see_no_other_tile(head_mask, panel_rows);
    differentiate<Accuracy>(tile, gradients, rule, scales, scratch.rows, mask, whole_rows, lanes, panel_keys);
    if constexpr (kIsGeneral<Rule>) gradients.biases.end_panel(place, lanes, panel_keys, workspace.bias_turns);
    // The gradient of the sink also uses the recomputed delta, as do the gradients of biases for the weight of the
    // sink. No other key tile reads or writes these rows.
    if (!whole_rows || !(p.dsink || (p.has_sink && p.centres.data)) || scales.delta == 0) return;
    for (int64_t i = lanes.begin; i < lesser(lanes.end, rows); ++i) {
      row_delta[i] = scratch.rows.delta[i] / scales.delta;
    }
  }

  // dv += P^T dout, dk += dS^T q
  void key_gradients(const PanelMask<Op>& mask) {
    const Unit* weights = reinterpret_cast<const Unit*>(scratch.tile.scores);
    const Unit* dscores = reinterpret_cast<const Unit*>(scratch.gradients.scores);
    const Gemm<Op> dv{weights, size.queries, dout_panels, scratch.dv, scratch.columns_v};
    const Gemm<Op> dk{dscores, size.queries, q_panels, scratch.dk, scratch.columns};
    gemm<Order::kRowMajor, Init::kAccumulate>(dv, {0, key_count}, {0, scratch.columns_v}, RowsOfKeys<Op>{mask});
    gemm<Order::kRowMajor, Init::kAccumulate>(dk, {0, key_count}, {0, scratch.columns}, RowsOfKeys<Op>{mask});
    if (!isolates) return;
    const KeysSeen seen{mask.limits(), key_count};
    scratch.isolated_dout.add(scratch.dv, scratch.columns_v, seen, [&](int64_t key, int64_t row) {
      return PanelForms<Op>::of_query(scratch.tile.scores, size.queries, key, row);
    });
    scratch.isolated_q.add(scratch.dk, scratch.columns, seen, [&](int64_t key, int64_t row) {
      return PanelForms<Op>::of_query(scratch.gradients.scores, size.queries, key, row);
    });
  }

  // dq += dS k for the rows of a query tile, whose sums are `stride` apart.
  void query_gradient(const PanelMask<Op>& mask, int64_t rows, Real* sum, int64_t stride, bool is_first) {
    const Unit* dscores =
        Op::kPack == 2 ? scratch.gradients.pairs : reinterpret_cast<const Unit*>(scratch.gradients.scores);
    const Gemm<Op> dq{dscores, size.queries, scratch.k.panels(isolates), sum, stride};
    if (is_first) {
      gemm<Order::kKMajor, Init::kZero>(dq, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    } else {
      gemm<Order::kKMajor, Init::kAccumulate>(dq, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    }
    scratch.k.add_isolated(sum, stride, mask, [&](int64_t r, int64_t key) {
      return PanelForms<Op>::of_key(dscores, size.queries, key, r);
    });
  }

  const GradientScales<Real, Rule> scales;
  BackwardScratch<In, Op> scratch;
  Real* row_delta = nullptr;  // row of the current query tile in the workspace
  StagedRows<Op> v{};
  Panels<Op> q_panels{}, dout_panels{}, q_transposed{}, dout_transposed{};
  bool isolates = false;  // isolated_rows.h: whether the current tile needs it
};

template <class In, class Op, class Accuracy, class Rule>
void backward(const AttnGradParams& p) {
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(p.stream);
  const BackwardWorkspace<In, Op> workspace(p, p.workspace);
  char* scratch = static_cast<char*>(p.workspace) + workspace.bytes;
  const int64_t scratch_bytes = BackwardScratch<In, Op>(p, nullptr).bytes;

  const BackwardPrepare<In, Op> prepare(p, workspace);
  for_heads(p, [&](int64_t b, int64_t h) { prepare.run(b, h); });
  run_key_tiles(p, workspace, [&](int worker) {
    return Backward<In, Op, Accuracy, Rule>(p, workspace, scratch + worker * scratch_bytes);
  });

  std::atomic<int64_t> next_head{0};
  const bool adds_centres = p.centres.data && (p.has_sink || p.dlse.data) && (p.dalibi_slopes || p.drelative_bias);
  run_workers(executor, p.dsink || adds_centres ? p.heads_q : 0, [&](int) {
    int64_t h;
    while ((h = next_head.fetch_add(1, std::memory_order_relaxed)) < p.heads_q) {
      if (p.dsink) finish_sink(p, workspace, h);
      if (adds_centres) finish_biases(p, workspace, h);
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
