// Backward: dq, dk, dv by recomputing the probabilities from lse (FlashAttention-2, Dao 2023, Algorithm 2).
//
// One work item is a key tile of one key head: dk and dv stay in scratch memory while it walks the query tiles of all
// query heads of its group. Scores are transposed as in forward.h. dq is a sum over key tiles: each query tile counts
// the parts that it has, and key tiles add theirs in ascending order, so that the result has the same bits for every
// number of threads. Next: scores.h (from P and dP to dS), backward_workspace.h.
#pragma once

#include "backward_finish.h"
#include "backward_prepare.h"
#include "isolated_rows.h"
#include "schedule.h"
#include "scores.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op>
struct BackwardScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  BackwardScratch(const AttnGradParams& p, void* base) : BackwardScratch(p, tile_size<Op>(p), ScratchCarver(base)) {}

  int64_t units, units_v;      // of a padded row of q and k, and of v and dout
  int64_t columns, columns_v;  // the same in elements
  Unit *k, *v, *q, *dout;      // rows that can be read in units
  // B operands: of rows, and transposed.
  Unit *k_panels, *q_panels, *dout_panels, *q_transposed, *dout_transposed;
  ScoreTile<Op> tile;
  GradientTile<Op> gradients;
  Real *dk, *dv;  // [keys][columns], [keys][columns_v]
  KnownRows<Real> rows;
  IsolatedRows<In, Op> isolated_q, isolated_dout, isolated_k;
  int64_t bytes;

 private:
  BackwardScratch(const AttnGradParams& p, const TileSize& size, ScratchCarver carve)
      : units(padded_units<Op>(p.head_dim)),
        units_v(padded_units<Op>(p.head_dim_v)),
        columns(units * Op::kPack),
        columns_v(units_v * Op::kPack),
        k(carve.take<Unit>(size.keys * units)),
        v(carve.take<Unit>(size.keys * units_v)),
        q(carve.take<Unit>(size.queries * units)),
        dout(carve.take<Unit>(size.queries * units_v)),
        k_panels(carve.take<Unit>(row_panel_units<Op>(size.keys, units))),
        q_panels(carve.take<Unit>(row_panel_units<Op>(size.queries, units))),
        dout_panels(carve.take<Unit>(row_panel_units<Op>(size.queries, units_v))),
        q_transposed(carve.take<Unit>(units * size.queries)),
        dout_transposed(carve.take<Unit>(units_v * size.queries)),
        tile(p, size, &carve),
        gradients(p, size, &carve),
        dk(carve.take<Real>(size.keys * columns)),
        dv(carve.take<Real>(size.keys * columns_v)),
        rows(size, &carve),
        isolated_q(p, size.queries, units, &carve),
        isolated_dout(p, size.queries, units_v, &carve),
        isolated_k(p, size.keys, units, &carve),
        bytes(carve.used()) {}
};

template <class In, class Op, class Accuracy, class Rule>
class Backward {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

 public:
  Backward(const AttnGradParams& params, const BackwardWorkspace<In, Op>& call_workspace, void* base)
      : p(params),
        workspace(call_workspace),
        size(workspace.size),
        rule(make_rule<Rule>(params)),
        scales(params),
        scratch(params, base) {
    if (p.has_dropout()) {
      philox = philox_key(static_cast<uint64_t>(p.rng_state[0]), static_cast<uint64_t>(p.rng_state[1]));
    }
  }

  // One key tile of a key head.
  void run(const WorkItem& item) {
    const int64_t b = item.batch, hk = item.head;
    batch = b;
    queries = query_sequence(p, b);
    keys = key_sequence(p, b);
    key_tile = item.tile;
    key0 = key_tile * size.keys;
    key_count = lesser(size.keys, keys.length - key0);
    const int64_t row = keys.start + key0;
    k = stage_rows<Op>(row_of<const In>(p.k, b, hk, row), p.k.row_stride, key_count, p.head_dim, scratch.k);
    v = stage_rows<Op>(row_of<const In>(p.v, b, hk, row), p.v.row_stride, key_count, p.head_dim_v, scratch.v);
    k_panels = row_panels<Op>(k, key_count, scratch.units, scratch.k_panels);
    panels_are_finite = false;
    if (p.has_intervals()) {
      finite_k = scratch.isolated_k.find(row_of<const In>(p.k, b, hk, row), p.k.row_stride, key_count, p.head_dim, k);
    }
    std::memset(scratch.dk, 0, key_count * scratch.columns * sizeof(Real));
    std::memset(scratch.dv, 0, key_count * scratch.columns_v * sizeof(Real));
    for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) walk(h, item.tile_of_call);
    const Real inverse_keep = static_cast<Real>(1.0 / keep_probability(p.dropout_threshold));
    for (int64_t j = 0; j < key_count; ++j) {
      narrow_row(row_of<In>(p.dk, b, hk, row + j), scratch.dk + j * scratch.columns, p.head_dim, Real(1));
      narrow_row(row_of<In>(p.dv, b, hk, row + j), scratch.dv + j * scratch.columns_v, p.head_dim_v, inverse_keep);
    }
  }

 private:
  // All query tiles of query head h that see the key tile. tile_of_call: the key tile, counted through all batch
  // entries.
  void walk(int64_t h, int64_t tile_of_call) {
    const HeadMask mask(p, batch, h, queries, KeyLocator(p, batch));
    BiasGradient<Op>& bias_gradient = scratch.gradients.biases;
    if constexpr (kIsGeneral<Rule>) {
      bias = HeadBias<Real>::of(p, batch, h);
      bias_gradient.begin_head(batch, h, queries.length, key0, mask.basic.first_position());
    }
    const IndexRange seen_by = mask.basic.rows_of(key0, key0 + key_count);
    for (int64_t m = seen_by.begin / size.queries; m * size.queries < seen_by.end; ++m) {
      const IndexRange rows{m * size.queries, lesser((m + 1) * size.queries, queries.length)};
      if (mask.sees_tile(size.keys, rows, key_tile)) {
        query_tile(mask, h, m);
      } else if constexpr (kIsGeneral<Rule>) {
        bias_gradient.skip_tile(rows.begin, key0, workspace.bias_turns);
      }
    }
    if constexpr (kIsGeneral<Rule>) bias_gradient.end_head(tile_of_call, key0, key_count, workspace.bias_turns);
  }

  // Query tile `number` of query head h.
  void query_tile(const HeadMask& head_mask, int64_t h, int64_t number) {
    const int64_t row0 = number * size.queries, rows = lesser(size.queries, queries.length - row0);
    const bool pads = kIsGeneral<Rule> && scratch.gradients.biases.any();
    const PanelMask<Op> mask(head_mask, row0, rows, key0, key_count, pads, scratch.tile.limits);
    const int64_t lane_count = round_up(rows, Op::S::kWidth);
    isolates = p.has_intervals() && !mask.is_whole();
    load_rows(h, row0, rows, lane_count);
    if (p.has_dropout()) {
      fill_keep_bits(scratch.tile.keep_bits, size.queries / kDropoutLanes, philox, p, batch, h, row0, rows, key0,
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
    const IndexRange tile_rows{row0, row0 + rows};
    query_gradient(mask, h, number, rows, head_mask.previous_tile(size.keys, tile_rows, key_tile),
                   head_mask.next_tile(size.keys, tile_rows, key_tile) < 0);
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
    const Real infinity = std::numeric_limits<Real>::infinity();
    const Real* lse = row_of<const Real>(p.lse, batch, h, row);
    const Real sink = p.sink ? static_cast<const Real*>(p.sink)[h] : Real(0);
    const bool has_sink = p.has_sink && sink_counts(sink);
    row_delta = workspace.delta + h * workspace.rows + workspace.first_row(p, batch, queries) + row0;
    for (int64_t i = 0; i < lane_count; ++i) {
      // A row that sees nothing has lse = -inf: its scores are all masked, and +inf keeps the difference a number.
      const bool used = i < rows && lse[i] != -infinity;
      scratch.rows.lse[i] = used ? lse[i] * kLog2E<Real> : infinity;
      scratch.rows.delta[i] = i < rows ? row_delta[i] * scales.delta : Real(0);
      scratch.rows.dlse[i] = i < rows ? lse_gradient<Real>(p, batch, h, row + i) * scales.delta : Real(0);
      scratch.rows.key_weight[i] = used && has_sink ? 1 - std::exp(sink_log_weight(sink, lse[i])) : Real(1);
    }
  }

  // S^T and dP^T, then P^T and dS^T, for the queries `lanes` of a tile.
  void score_panel(const HeadMask& head_mask, const PanelMask<Op>& mask, const TilePlace& place, IndexRange lanes) {
    const int64_t row0 = place.row0, rows = place.rows;
    const ScoreTile<Op>& tile = scratch.tile;
    const GradientTile<Op>& gradients = scratch.gradients;
    const IndexRange panel_keys = mask.panel_keys(lanes.begin);
    const Gemm<Op> qk{k.data, k.stride, q_transposed, tile.scores, size.queries};
    const Gemm<Op> dov{v.data, v.stride, dout_transposed, gradients.scores, size.queries};
    const int64_t units = ceil_div(p.head_dim, Op::kPack), units_v = ceil_div(p.head_dim_v, Op::kPack);
    if constexpr (kIsGeneral<Rule>) {
      const PanelOrigin next{row0 + lanes.end < queries.length, row0 + lanes.end, key0};
      tile.biases.load_panel(bias, place, lanes, panel_keys);
      score_product(qk, panel_keys, lanes, units, gradients.biases.adds_panels(),
                    [&](IndexRange part) { gradients.biases.ask_for(place, lanes, part); });
      score_product(dov, panel_keys, lanes, units_v, tile.biases.reads_panel(bias, next),
                    [&](IndexRange part) { tile.biases.ask_for(bias, next, part); });
    } else {
      score_product(qk, panel_keys, lanes, units);
      score_product(dov, panel_keys, lanes, units_v);
    }
    const IndexRange panel_rows{row0 + lanes.begin, row0 + lesser(lanes.end, rows)};
    const bool whole_rows = sizeof(In) == 2 && head_mask.previous_tile(size.keys, panel_rows, key_tile) < 0 &&
                            head_mask.next_tile(size.keys, panel_rows, key_tile) < 0;
    differentiate<Accuracy>(tile, gradients, rule, scales, scratch.rows, mask, whole_rows, lanes, panel_keys);
    if constexpr (kIsGeneral<Rule>) gradients.biases.end_panel(place, lanes, panel_keys, workspace.bias_turns);
    // The gradient of the sink takes the better delta too, as do the gradients of biases for the weight of the sink; no
    // other key tile reads or writes these rows.
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
    const KeysSeen<Op> seen{mask.limits(), key_count};
    scratch.isolated_dout.add(scratch.dv, scratch.columns_v, seen, [&](int64_t key, int64_t row) {
      return PanelForms<Op>::of_query(scratch.tile.scores, size.queries, key, row);
    });
    scratch.isolated_q.add(scratch.dk, scratch.columns, seen, [&](int64_t key, int64_t row) {
      return PanelForms<Op>::of_query(scratch.gradients.scores, size.queries, key, row);
    });
  }

  // dq += dS k for query tile `number` of query head h, when key tile `previous`, the one before this that these
  // queries see, has added its part; -1 where this is the first.
  void query_gradient(const PanelMask<Op>& mask, int64_t h, int64_t number, int64_t rows, int64_t previous,
                      bool is_last) {
    const int64_t first_row = workspace.first_row(p, batch, queries), row = queries.start + number * size.queries;
    Real* sum = workspace.dq_in_place
                    ? row_of<Real>(p.dq, batch, h, row)
                    : workspace.dq + (h * workspace.rows + first_row + number * size.queries) * workspace.dq_columns;
    const int64_t stride = workspace.dq_in_place ? p.dq.row_stride : workspace.dq_columns;
    const Unit* dscores =
        Op::kPack == 2 ? scratch.gradients.pairs : reinterpret_cast<const Unit*>(scratch.gradients.scores);
    const bool isolates_k = isolates && scratch.isolated_k.any();
    if (panels_are_finite != isolates_k) {
      k_panels = row_panels<Op>(isolates_k ? finite_k : k, key_count, scratch.units, scratch.k_panels);
      panels_are_finite = isolates_k;
    }
    const Gemm<Op> dq{dscores, size.queries, k_panels, sum, stride};
    Turn& turn = workspace.dq_turn(h, first_row, batch, number);
    wait_for_turn(turn, previous + 1);
    if (previous < 0) {
      gemm<Order::kKMajor, Init::kZero>(dq, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    } else {
      gemm<Order::kKMajor, Init::kAccumulate>(dq, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    }
    if (isolates_k) {
      scratch.isolated_k.add(sum, stride, RowsThatSee<Op>{mask.limits()}, [&](int64_t r, int64_t key) {
        return PanelForms<Op>::of_key(dscores, size.queries, key, r);
      });
    }
    for (int64_t i = 0; is_last && !workspace.dq_in_place && i < rows; ++i) {
      narrow_row(row_of<In>(p.dq, batch, h, row + i), sum + i * stride, p.head_dim, Real(1));
    }
    end_turn(turn, key_tile + 1);
  }

  const AttnGradParams& p;
  const BackwardWorkspace<In, Op>& workspace;
  const TileSize size;
  const Rule rule;
  const GradientScales<Real, Rule> scales;
  BackwardScratch<In, Op> scratch;
  PhiloxKey philox{0, 0};
  HeadBias<Real> bias;  // of the current query head
  int64_t batch = 0, key_tile = 0, key0 = 0, key_count = 0;
  Real* row_delta = nullptr;  // of the current query tile, in the workspace
  Sequence queries{0, 0}, keys{0, 0};
  StagedRows<Op> k{}, v{};
  Panels<Op> k_panels{}, q_panels{}, dout_panels{}, q_transposed{}, dout_transposed{};
  // isolated_rows.h: whether the current tile needs it, the keys without rows that are not finite, and whether k_panels
  // are made of those.
  bool isolates = false, panels_are_finite = false;
  StagedRows<Op> finite_k{};
};

template <class In, class Op, class Accuracy, class Rule>
void backward(const AttnGradParams& p) {
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(p.stream);
  const BackwardWorkspace<In, Op> workspace(p, p.workspace);
  char* scratch = static_cast<char*>(p.workspace) + workspace.bytes;
  const int64_t scratch_bytes = BackwardScratch<In, Op>(p, nullptr).bytes;

  const BackwardPrepare<In, Op> prepare(p, workspace);
  std::atomic<int64_t> next_prepare{0};
  run_workers(executor, p.batch * p.heads_q, [&](int) {
    int64_t item;
    while ((item = next_prepare.fetch_add(1, std::memory_order_relaxed)) < p.batch * p.heads_q) {
      prepare.run(item / p.heads_q, item % p.heads_q);
    }
  });

  // Key tiles ascend within a batch entry: a worker that waits for earlier parts of dq waits for items drawn earlier.
  auto tiles_of = [&](int64_t b) { return ceil_div(key_sequence(p, b).length, workspace.size.keys); };
  int64_t items = 0;
  for (int64_t b = 0; b < p.batch; ++b) items += tiles_of(b) * p.heads_k;
  // Where heads add to one bias in turns, a group of them walks before the next group: neighbouring items must then not
  // be those of one key tile.
  const bool heads_first = SharedBias(p).heads && p.group_size() > 1;
  workspace.bias_turns.reset();
  std::atomic<int64_t> next{0};
  run_workers(executor, items, [&](int worker) {
    Backward<In, Op, Accuracy, Rule> kernel(p, workspace, scratch + worker * scratch_bytes);
    WorkCursor cursor(p.batch, p.heads_k, heads_first);
    WorkItem item;
    while (cursor.find(next.fetch_add(1, std::memory_order_relaxed), tiles_of, &item)) kernel.run(item);
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
