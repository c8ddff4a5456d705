// Second derivatives: the gradients of <dout, tout> + <dlse, tlse>, where tout and tlse are the tangents that jvp.h
// computes and dout, dlse and the tangents of the inputs are constants (docs/derivatives.md). With F, T, A and P of
// second_scores.h:
//
//   dq = F k + T tk      dk = F^T q + T^T tq      dv = (P m (A - tlse))^T dout
//
// It has the structure of backward.h, with `r` = <dout, tout> as a second statistic of each row beside delta. Absent
// tangents cost nothing: their products are not computed.
#pragma once

#include "cpu/backward/key_tile_walk.h"
#include "cpu/derivatives/second_scores.h"
#include "rules/lse_words.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The workspace of one call: that of the backward, and r.
template <class In, class Op>
struct SecondWorkspace : BackwardWorkspace<In, Op> {
  using Real = typename Op::Real;

  SecondWorkspace(const SecondParams& p, void* base)
      : BackwardWorkspace<In, Op>(p, base),
        r(base ? reinterpret_cast<Real*>(static_cast<char*>(base) + this->bytes) : nullptr) {
    this->bytes += round_up(p.heads_q * this->rows * static_cast<int64_t>(sizeof(Real)), 64);
  }

  // The statistics of the rows of batch entry b and head h.
  Real* delta_of(const AttnParams& p, int64_t b, int64_t h) const { return this->delta + first(p, b, h); }
  Real* r_of(const AttnParams& p, int64_t b, int64_t h) const { return r + first(p, b, h); }

 private:
  int64_t first(const AttnParams& p, int64_t b, int64_t h) const {
    return h * this->rows + this->first_row(p, b, query_sequence(p, b));
  }

  Real* r;  // [Hq][rows]
};

// One input of a query tile, of `columns` elements: as a B operand along its columns (transposed) and along its rows.
template <class In, class Op>
class QueryRowsOperand {
  using Unit = typename Op::Unit;

 public:
  QueryRowsOperand(const AttnParams& p, const TileSize& size, int64_t columns, bool wanted, ScratchCarver* carve)
      : columns_(columns),
        units_(padded_units<Op>(columns)),
        staged_(carve->take<Unit>(wanted ? size.queries * units_ : 0)),
        panels_memory_(carve->take<Unit>(wanted ? row_panel_units<Op>(size.queries, units_) : 0)),
        transposed_memory_(carve->take<Unit>(wanted ? size.queries * units_ : 0)),
        isolated_(wanted && p.has_mask(), size.queries, units_, carve) {}

  // isolates: leave non-finite rows out of `panels` (isolated_rows.h).
  void load(const In* from, int64_t stride, int64_t rows, int64_t lane_count, bool isolates) {
    StagedRows<Op> staged = stage_rows<Op>(from, stride, rows, columns_, staged_);
    transposed = transposed_panels<Op>(transposed_memory_, staged, rows, lane_count, units_);
    if (isolates) staged = isolated_.find(from, stride, rows, columns_, staged);
    panels = row_panels<Op>(staged, rows, units_, panels_memory_);
  }
  // to += weights * rows, [keys][row of the operand]; `weights` are [keys][queries] in the form PanelForms::queries.
  void add_product(const typename Op::Real* weights, typename Op::Real* to, int64_t queries, int64_t keys,
                   const PanelMask<Op>& mask, bool isolates) const {
    const int64_t stride = units_ * Op::kPack;
    const Gemm<Op> product{reinterpret_cast<const Unit*>(weights), queries, panels, to, stride};
    gemm<Order::kRowMajor, Init::kAccumulate>(product, {0, keys}, {0, stride}, RowsOfKeys<Op>{mask});
    if (!isolates) return;
    isolated_.add(to, stride, KeysSeen{mask.limits(), keys},
                  [&](int64_t key, int64_t row) { return PanelForms<Op>::of_query(weights, queries, key, row); });
  }

  Panels<Op> transposed{}, panels{};

 private:
  int64_t columns_, units_;
  Unit *staged_, *panels_memory_, *transposed_memory_;
  IsolatedRows<In, Op> isolated_;
};

template <class In, class Op>
struct SecondScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  SecondScratch(const SecondParams& p, void* base) : SecondScratch(p, tile_size<Op>(p), ScratchCarver(base)) {}

  int64_t units, units_v;      // units of a padded row of q and k, and of v and dout
  int64_t columns, columns_v;  // their elements
  KeyRowsOperand<In, Op> k, tk;
  Unit *v, *tv;  // staged rows
  QueryRowsOperand<In, Op> q, tq, dout;
  ScoreTile<Op> tile;
  TangentTile<Op> tangents;
  SecondTile<Op> second;
  Real *dk, *dv;  // [keys][columns], [keys][columns_v]
  SecondRows<Real> rows;
  int64_t bytes;

 private:
  SecondScratch(const SecondParams& p, const TileSize& size, ScratchCarver carve)
      : units(padded_units<Op>(p.head_dim)),
        units_v(padded_units<Op>(p.head_dim_v)),
        columns(units * Op::kPack),
        columns_v(units_v * Op::kPack),
        k(p, size, units, true, &carve),
        tk(p, size, units, p.tangents.k.data, &carve),
        v(carve.take<Unit>(product_row_units<Op>(size.keys, units_v))),
        tv(carve.take<Unit>(p.tangents.v.data ? product_row_units<Op>(size.keys, units_v) : 0)),
        q(p, size, p.head_dim, true, &carve),
        tq(p, size, p.head_dim, p.tangents.q.data, &carve),
        dout(p, size, p.head_dim_v, true, &carve),
        tile(p, size, &carve),
        tangents(p, p.tangents, size, &carve),
        second(p, size, &carve),
        dk(carve.take<Real>(size.keys * columns)),
        dv(carve.take<Real>(size.keys * columns_v)),
        rows(size, &carve),
        bytes(carve.used()) {}
};

template <class In, class Op, class Accuracy, class Rule>
class Second : KeyTileWalk<Second<In, Op, Accuracy, Rule>, SecondParams, In, Op, Rule> {
  using Walk = KeyTileWalk<Second, SecondParams, In, Op, Rule>;
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

 public:
  Second(const SecondParams& params, const SecondWorkspace<In, Op>& call_workspace, void* base)
      : Walk(params, call_workspace), workspace(call_workspace), scratch(params, base) {}

  // Processes one key tile of one KV head.
  void run(const WorkItem& item) {
    const int64_t hk = item.head;
    this->begin(item);
    load_keys(hk);
    std::memset(scratch.dk, 0, key_count * scratch.columns * sizeof(Real));
    std::memset(scratch.dv, 0, key_count * scratch.columns_v * sizeof(Real));
    for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
      if constexpr (kIsGeneral<Rule>) tangent_bias = HeadBias<Real>::of(p.tangents, batch, h);
      this->walk(scratch.second.gradients.biases, h, item.tile_of_call);
    }
    this->write_key_rows(p.dk, hk, scratch.dk, scratch.columns, p.head_dim, Real(1));
    this->write_key_rows(p.dv, hk, scratch.dv, scratch.columns_v, p.head_dim_v, scratch.second.inverse_keep);
  }

 private:
  void load_keys(int64_t hk) {
    const int64_t row = keys.start + key0;
    const auto at = [&](const TensorView& t) { return row_of<const In>(t, batch, hk, row); };
    const TensorView &tk = p.tangents.k, &tv = p.tangents.v;
    scratch.k.load(at(p.k), p.k.row_stride, key_count, p.head_dim);
    if (tk.data) scratch.tk.load(at(tk), tk.row_stride, key_count, p.head_dim);
    v = stage_product_rows<Op>(at(p.v), p.v.row_stride, key_count, p.head_dim_v, scratch.v);
    if (tv.data) values_tangent = stage_product_rows<Op>(at(tv), tv.row_stride, key_count, p.head_dim_v, scratch.tv);
  }

  // Query tile `number` of query head h.
  void query_tile(const HeadMask& head_mask, int64_t h, int64_t number) {
    const int64_t row0 = number * size.queries, rows = lesser(size.queries, queries.length - row0);
    const bool pads = kIsGeneral<Rule> && scratch.second.gradients.biases.any();
    const PanelMask<Op> mask(head_mask, row0, rows, key0, key_count, pads, scratch.tile.limits);
    const int64_t lane_count = round_up(rows, Op::S::kWidth);
    isolates = p.has_mask() && !mask.is_whole();
    load_rows(h, row0, rows, lane_count);
    if (p.has_dropout()) {
      fill_keep_bits(scratch.tile.keep_bits, size.queries / kWordLanes, this->philox, p, batch, h, row0, rows, key0,
                     key_count);
    }
    const TilePlace place{row0, rows, key0, key_count, head_mask.basic.first_position()};
    if constexpr (kIsGeneral<Rule>) {
      scratch.tile.biases.load(bias, place);
      scratch.tangents.biases.load(tangent_bias, place);
    }
    for (int64_t lane = 0; lane < lane_count; lane += kPanel<Op>) {
      score_panel(head_mask, mask, place, h, {lane, lesser(lane + kPanel<Op>, lane_count)});
    }
    if constexpr (kIsGeneral<Rule>) {
      scratch.second.gradients.biases.end_tile(place, queries.start + row0, workspace.bias_turns);
    }
    scratch.dout.add_product(scratch.tile.scores, scratch.dv, size.queries, key_count, mask, isolates);
    scratch.q.add_product(scratch.second.gradients.scores, scratch.dk, size.queries, key_count, mask, isolates);
    if (p.tangents.q.data) {
      scratch.tq.add_product(scratch.tangents.scores, scratch.dk, size.queries, key_count, mask, isolates);
    }
    this->add_to_dq(head_mask, h, number, rows, [&](Real* sum, int64_t stride, bool is_first) {
      query_gradient(mask, rows, sum, stride, is_first);
    });
  }

  void load_rows(int64_t h, int64_t row0, int64_t rows, int64_t lane_count) {
    const int64_t row = queries.start + row0;
    const auto load = [&](QueryRowsOperand<In, Op>& operand, const TensorView& t) {
      operand.load(row_of<const In>(t, batch, h, row), t.row_stride, rows, lane_count, isolates);
    };
    load(scratch.q, p.q);
    if (p.tangents.q.data) load(scratch.tq, p.tangents.q);
    load(scratch.dout, p.dout);
    const Real* const r = workspace.r_of(p, batch, h) + row0;
    const Real* const tlse = row_of<const Real>(p.tangents.lse, batch, h, row);
    this->load_statistics(scratch.rows.known, h, row, rows, lane_count, workspace.delta_of(p, batch, h) + row0,
                          Real(1));
    for (int64_t i = 0; i < lane_count; ++i) {
      scratch.rows.r[i] = i < rows ? r[i] : Real(0);
      scratch.rows.tlse[i] = i < rows ? tlse[i] : Real(0);
    }
  }

  // The products of the queries `lanes` of a tile, and what second_scores.h makes of them.
  void score_panel(const HeadMask& head_mask, const PanelMask<Op>& mask, const TilePlace& place, int64_t h,
                   IndexRange lanes) {
    const ScoreTile<Op>& tile = scratch.tile;
    const TangentTile<Op>& tangents = scratch.tangents;
    const SecondTile<Op>& second = scratch.second;
    const StagedRows<Op> k = scratch.k.rows();
    const IndexRange panel_keys = mask.panel_keys(lanes.begin);
    const int64_t units = ceil_div(p.head_dim, Op::kPack), units_v = ceil_div(p.head_dim_v, Op::kPack);
    if constexpr (kIsGeneral<Rule>) {
      tile.biases.load_panel(bias, place, lanes, panel_keys, scratch.rows.known.lse.narrows);
      tangents.biases.load_panel(tangent_bias, place, lanes, panel_keys);
    }
    const Panels<Op>& dout = scratch.dout.transposed;
    score_product(Gemm<Op>{k.data, k.stride, scratch.q.transposed, tile.scores, size.queries}, panel_keys, lanes,
                  units);
    tangents.multiply(k, scratch.tk.rows(), scratch.q.transposed, scratch.tq.transposed, panel_keys, lanes, units);
    score_product(Gemm<Op>{v.data, v.stride, dout, second.gradients.scores, size.queries}, panel_keys, lanes, units_v);
    if (p.tangents.v.data) {
      Real* const panel = second.value_products - lanes.begin;
      score_product(Gemm<Op>{values_tangent.data, values_tangent.stride, dout, panel, kPanel<Op>}, panel_keys, lanes,
                    units_v);
    }
    const IndexRange panel_rows{place.row0 + lanes.begin, place.row0 + lesser(lanes.end, place.rows)};
    const bool whole_rows = sizeof(In) == 2 && this->see_no_other_tile(head_mask, panel_rows);
    differentiate_twice<Accuracy>(tile, tangents, second, rule, scratch.rows, mask, whole_rows, lanes, panel_keys);
    if constexpr (kIsGeneral<Rule>) {
      second.gradients.biases.end_panel(place, lanes, panel_keys, workspace.bias_turns);
    }
    // The gradient of the sink also uses the recomputed sums. No other key tile reads or writes these rows.
    for (int64_t i = panel_rows.begin; whole_rows && p.dsink && i < panel_rows.end; ++i) {
      workspace.delta_of(p, batch, h)[i] = scratch.rows.known.delta[i - place.row0];
      workspace.r_of(p, batch, h)[i] = scratch.rows.r[i - place.row0];
    }
  }

  // dq += F k + T tk for the rows of a query tile, whose sums are `stride` apart.
  void query_gradient(const PanelMask<Op>& mask, int64_t rows, Real* sum, int64_t stride, bool is_first) {
    constexpr bool kPairs = Op::kPack == 2;
    const SecondTile<Op>& second = scratch.second;
    const auto* const f = kPairs ? second.gradients.pairs : reinterpret_cast<const Unit*>(second.gradients.scores);
    add_keys(scratch.k, f, mask, rows, sum, stride, is_first);
    if (!p.tangents.k.data) return;
    const auto* const t = kPairs ? second.tangent_pairs : reinterpret_cast<const Unit*>(scratch.tangents.scores);
    add_keys(scratch.tk, t, mask, rows, sum, stride, false);
  }
  void add_keys(KeyRowsOperand<In, Op>& operand, const Unit* weights, const PanelMask<Op>& mask, int64_t rows,
                Real* sum, int64_t stride, bool is_first) {
    const Gemm<Op> product{weights, size.queries, operand.panels(isolates), sum, stride};
    if (is_first) {
      gemm<Order::kKMajor, Init::kZero>(product, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    } else {
      gemm<Order::kKMajor, Init::kAccumulate>(product, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    }
    operand.add_isolated(sum, stride, mask, [&](int64_t row, int64_t key) {
      return PanelForms<Op>::of_key(weights, size.queries, key, row);
    });
  }

  const SecondWorkspace<In, Op>& workspace;
  SecondScratch<In, Op> scratch;
  HeadBias<Real> tangent_bias;
  StagedRows<Op> v{}, values_tangent{};
  bool isolates = false;  // isolated_rows.h: whether the current tile needs it
};

// r = <dout, tout> of the rows of one head.
template <class In, class Op>
inline void prepare_r(const SecondParams& p, const SecondWorkspace<In, Op>& workspace, int64_t b, int64_t h) {
  const Sequence queries = query_sequence(p, b);
  for (int64_t i = 0; i < queries.length; ++i) {
    const int64_t row = queries.start + i;
    workspace.r_of(p, b, h)[i] = dot_of_row<Op, In>(p, b, h, row, p.tangents.out);
  }
}

// The gradient of one head's sink, the sum of -p_sink * (delta (tsink - tlse) + r) over its rows in a fixed order.
template <class In, class Op>
inline void finish_second_sink(const SecondParams& p, const SecondWorkspace<In, Op>& workspace, int64_t h) {
  using Real = typename Op::Real;
  const Real sink = static_cast<const Real*>(p.sink)[h];
  const double tangent = p.tangents.sink ? static_cast<double>(static_cast<const Real*>(p.tangents.sink)[h]) : 0;
  double sum = 0;
  for (int64_t b = 0; sink_counts(sink) && b < p.batch; ++b) {
    const Sequence queries = query_sequence(p, b);
    const Real* const tlse = row_of<const Real>(p.tangents.lse, b, h, queries.start);
    const Real *const delta = workspace.delta_of(p, b, h), *const r = workspace.r_of(p, b, h);
    for (int64_t i = 0; i < queries.length; ++i) {
      const double centred = tangent - static_cast<double>(tlse[i]);
      const double gradient = static_cast<double>(delta[i]) * centred + static_cast<double>(r[i]);
      sum -= weight_of_sink(p, b, h, queries.start + i, sink) * gradient;
    }
  }
  static_cast<Real*>(p.dsink)[h] = static_cast<Real>(sum);
}

template <class In, class Op, class Accuracy, class Rule>
void second(const SecondParams& p) {
  const SecondWorkspace<In, Op> workspace(p, p.workspace);
  char* scratch = static_cast<char*>(p.workspace) + workspace.bytes;
  const int64_t scratch_bytes = SecondScratch<In, Op>(p, nullptr).bytes;
  const BackwardPrepare<In, Op> prepare(p, workspace);
  for_heads(p, [&](int64_t b, int64_t h) {
    prepare.run(b, h);
    prepare_r(p, workspace, b, h);
  });
  run_key_tiles<In, Op>(p, workspace, [&](int worker) {
    return Second<In, Op, Accuracy, Rule>(p, workspace, scratch + worker * scratch_bytes);
  });
  std::atomic<int64_t> next_head{0};
  run_workers(*static_cast<const CpuExecutor*>(p.stream), p.dsink ? p.heads_q : 0, [&](int) {
    int64_t h;
    while ((h = next_head.fetch_add(1, std::memory_order_relaxed)) < p.heads_q) finish_second_sink(p, workspace, h);
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
