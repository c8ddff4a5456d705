// Second derivatives: the gradients of <dout, tout> + <dlse, tlse>, where tout and tlse are the tangents that jvp.h
// computes and dout, dlse and the tangents of the inputs are constants (docs/derivatives.md). With F, T, A and P of
// second_scores.h:
//
//   dq = F k + T tk      dk = F^T q + T^T tq      dv = (P m (A - tlse))^T dout
//
// It has the structure of backward.h, with `r` = <dout, tout> as a second statistic of each row beside delta. Absent
// tangents cost nothing: their products are not computed.
#pragma once

#include "cpu/backward/backward_finish.h"
#include "cpu/backward/key_tile_walk.h"
#include "cpu/derivatives/second_scores.h"
#include "rules/lse_words.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The workspace of one call: that of the backward, and r.
template <class In, class Op>
struct SecondWorkspace : BackwardWorkspace<In, Op> {
  using Real = typename Op::Real;

  SecondWorkspace(const SecondParams& p, ScratchCarver carve) : BackwardWorkspace<In, Op>(p, carve) {
    carve.take<char>(this->bytes);  // of the backward
    r = carve.take<Real>(p.heads_q * this->rows);
    this->bytes = carve.used();
  }

  Real* r_of(const AttnParams& p, int64_t b, int64_t h) const { return r + this->first_row_of_head(p, b, h); }

 private:
  Real* r;  // [Hq][rows]
};

template <class In, class Op>
struct SecondScratch : KeyTileScratch<In, Op> {
  using Unit = typename Op::Unit;

  SecondScratch(const SecondParams& p, ScratchCarver carve)
      : KeyTileScratch<In, Op>(p, &carve),
        tk(p, this->size, this->units, p.tangents.k.data, &carve),
        tv(carve.take<Unit>(p.tangents.v.data ? product_row_units<Op>(this->size.keys, this->units_v) : 0)),
        tq(p, this->size, p.head_dim, p.tangents.q.data, &carve),
        tangents(p, p.tangents, this->size, &carve),
        second(p, this->size, this->gradients, &carve),
        rows(this->size, &carve),
        bytes(carve.used()) {}

  KeyRowsOperand<In, Op> tk;
  Unit* tv;  // staged rows
  QueryRowsOperand<In, Op> tq;
  TangentTile<Op> tangents;
  SecondTile<Op> second;
  SecondRows<typename Op::Real> rows;
  int64_t bytes;
};

template <class In, class Op, class Accuracy, class Rule>
class Second : public KeyTileWalk<Second<In, Op, Accuracy, Rule>, SecondParams, SecondScratch<In, Op>,
                                  SecondWorkspace<In, Op>, In, Op, Rule> {
  using Walk = KeyTileWalk<Second, SecondParams, SecondScratch<In, Op>, SecondWorkspace<In, Op>, In, Op, Rule>;
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  friend Walk;
  using Walk::batch, Walk::bias, Walk::isolates, Walk::key0, Walk::key_count, Walk::keys, Walk::p, Walk::queries;
  using Walk::rule, Walk::scratch, Walk::size, Walk::v, Walk::workspace;

 public:
  // Not inherited: GCC compiles inherited constructors without the instruction set of the source.
  Second(const SecondParams& params, const SecondWorkspace<In, Op>& call_workspace, void* base)
      : Walk(params, call_workspace, base) {}

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

  void load_rows(int64_t h, const TilePlace& place, int64_t lane_count) {
    const int64_t row = queries.start + place.row0, rows = place.rows;
    this->load_rows_of(scratch.q, p.q, h, place, lane_count);
    if (p.tangents.q.data) this->load_rows_of(scratch.tq, p.tangents.q, h, place, lane_count);
    this->load_rows_of(scratch.dout, p.dout, h, place, lane_count);
    const Real* const r = workspace.r_of(p, batch, h) + place.row0;
    const Real* const tlse = row_of<const Real>(p.tangents.lse, batch, h, row);
    load_known_rows(scratch.rows.known, p, !kIsGeneral<Rule>, batch, h, row, rows, lane_count,
                    workspace.delta_of(p, batch, h) + place.row0, Real(1));
    for (int64_t i = 0; i < lane_count; ++i) {
      scratch.rows.r[i] = i < rows ? r[i] : Real(0);
      scratch.rows.tlse[i] = i < rows ? tlse[i] : Real(0);
    }
    if constexpr (kIsGeneral<Rule>) {
      tangent_bias = HeadBias<Real>::of(p.tangents, batch, h);
      scratch.tangents.biases.load(tangent_bias, place);
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

  void key_gradients(const PanelMask<Op>& mask) const {
    Walk::key_gradients(mask);
    if (!p.tangents.q.data) return;
    scratch.tq.add_product(scratch.tangents.scores, scratch.dk, size.queries, key_count, mask, isolates);
  }
  // dq += F k + T tk for the rows of a query tile, whose sums are `stride` apart.
  void query_gradient(const PanelMask<Op>& mask, int64_t rows, Real* sum, int64_t stride, bool is_first) {
    constexpr bool kPairs = Op::kPack == 2;
    const SecondTile<Op>& second = scratch.second;
    const auto* const f = kPairs ? second.gradients.pairs : reinterpret_cast<const Unit*>(second.gradients.scores);
    this->add_keys(scratch.k, f, mask, rows, sum, stride, is_first);
    if (!p.tangents.k.data) return;
    const auto* const t = kPairs ? second.tangent_pairs : reinterpret_cast<const Unit*>(scratch.tangents.scores);
    this->add_keys(scratch.tk, t, mask, rows, sum, stride, false);
  }

  HeadBias<Real> tangent_bias;
  StagedRows<Op> values_tangent{};
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

// The gradient of one head's sink, the sum of -p_sink * (delta (tsink - tlse) + r) over its rows.
template <class In, class Op>
inline void finish_second_sink(const SecondParams& p, const SecondWorkspace<In, Op>& workspace, int64_t h) {
  using Real = typename Op::Real;
  const double tangent = p.tangents.sink ? static_cast<double>(static_cast<const Real*>(p.tangents.sink)[h]) : 0;
  finish_sink<Real>(p, h, [&](int64_t b, int64_t row) {
    const Real tlse = *row_of<const Real>(p.tangents.lse, b, h, query_sequence(p, b).start + row);
    const double centred = tangent - static_cast<double>(tlse), delta = workspace.delta_of(p, b, h)[row];
    return delta * centred + static_cast<double>(workspace.r_of(p, b, h)[row]);
  });
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
  for_each_item(p, p.dsink ? p.heads_q : 0, [&](int64_t h) { finish_second_sink(p, workspace, h); });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
