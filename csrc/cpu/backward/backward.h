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
struct BackwardScratch : KeyTileScratch<In, Op> {
  FLASHATTN_SHARED BackwardScratch(const AttnGradParams& p, ScratchCarver carve)
      : KeyTileScratch<In, Op>(p, &carve), rows(this->size, &carve), bytes(carve.used()) {}

  KnownRows<typename Op::Real> rows;
  int64_t bytes;
};

template <class In, class Op, class Accuracy, class Rule>
class Backward : public KeyTileWalk<Backward<In, Op, Accuracy, Rule>, AttnGradParams, BackwardScratch<In, Op>,
                                    BackwardWorkspace<In, Op>, In, Op, Rule> {
  using Walk = KeyTileWalk<Backward, AttnGradParams, BackwardScratch<In, Op>, BackwardWorkspace<In, Op>, In, Op, Rule>;
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  friend Walk;
  using Walk::batch, Walk::bias, Walk::key0, Walk::key_count, Walk::keys, Walk::p, Walk::queries, Walk::rule;
  using Walk::scratch, Walk::size, Walk::v, Walk::workspace;

 public:
  Backward(const AttnGradParams& params, const BackwardWorkspace<In, Op>& call_workspace, void* base)
      : Walk(params, call_workspace, base), scales(params) {}

 private:
  void load_keys(int64_t hk) {
    const int64_t row = keys.start + key0;
    scratch.k.load(row_of<const In>(p.k, batch, hk, row), p.k.row_stride, key_count, p.head_dim);
    v = stage_product_rows<Op>(row_of<const In>(p.v, batch, hk, row), p.v.row_stride, key_count, p.head_dim_v,
                               scratch.v);
  }

  void load_rows(int64_t h, const TilePlace& place, int64_t lane_count) {
    const int64_t row = queries.start + place.row0;
    this->load_rows_of(scratch.q, p.q, h, place, lane_count);
    this->load_rows_of(scratch.dout, p.dout, h, place, lane_count);
    row_delta = workspace.delta_of(p, batch, h) + place.row0;
    load_known_rows(scratch.rows, p, !kIsGeneral<Rule>, batch, h, row, place.rows, lane_count, row_delta, scales.delta);
  }

  // S^T and dP^T, then P^T and dS^T, for the queries `lanes` of a tile.
  void score_panel(const HeadMask& head_mask, const PanelMask<Op>& mask, const TilePlace& place, int64_t,
                   IndexRange lanes) {
    const int64_t row0 = place.row0, rows = place.rows;
    const ScoreTile<Op>& tile = scratch.tile;
    const GradientTile<Op>& gradients = scratch.gradients;
    const IndexRange panel_keys = mask.panel_keys(lanes.begin);
    const Gemm<Op> qk{scratch.k.rows().data, scratch.k.rows().stride, scratch.q.transposed, tile.scores, size.queries};
    const Gemm<Op> dov{v.data, v.stride, scratch.dout.transposed, gradients.scores, size.queries};
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

  // dq += dS k for the rows of a query tile, whose sums are `stride` apart.
  void query_gradient(const PanelMask<Op>& mask, int64_t rows, Real* sum, int64_t stride, bool is_first) {
    const Unit* dscores =
        Op::kPack == 2 ? scratch.gradients.pairs : reinterpret_cast<const Unit*>(scratch.gradients.scores);
    this->add_keys(scratch.k, dscores, mask, rows, sum, stride, is_first);
  }

  const GradientScales<Real, Rule> scales;
  Real* row_delta = nullptr;  // row of the current query tile in the workspace
};

template <class In, class Op, class Accuracy, class Rule>
void backward(const AttnGradParams& p) {
  const BackwardWorkspace<In, Op> workspace(p, p.workspace);
  char* scratch = static_cast<char*>(p.workspace) + workspace.bytes;
  const int64_t scratch_bytes = BackwardScratch<In, Op>(p, nullptr).bytes;

  const BackwardPrepare<In, Op> prepare(p, workspace);
  for_heads(p, [&](int64_t b, int64_t h) { prepare.run(b, h); });
  run_key_tiles(p, workspace, [&](int worker) {
    return Backward<In, Op, Accuracy, Rule>(p, workspace, scratch + worker * scratch_bytes);
  });

  const bool adds_centres = p.centres.data && (p.has_sink || p.dlse.data) && (p.dalibi_slopes || p.drelative_bias);
  for_each_item(p, p.dsink || adds_centres ? p.heads_q : 0, [&](int64_t h) {
    if (p.dsink) {
      finish_sink<typename Op::Real>(
          p, h, [&](int64_t b, int64_t row) { return static_cast<double>(workspace.delta_of(p, b, h)[row]); });
    }
    if (adds_centres) finish_biases(p, workspace, h);
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
