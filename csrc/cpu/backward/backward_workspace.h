// The workspace of one backward call, shared by its workers and stages: the dq accumulators and per-row statistics.
// Per-row arrays are [Hq][all rows of the call].
#pragma once

#include "cpu/score/bias_gradient.h"
#include "cpu/vectors/pack.h"
#include "cpu/vectors/tiles.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op>
struct BackwardWorkspace {
  using Real = typename Op::Real;

  BackwardWorkspace(const AttnGradParams& p, ScratchCarver carve)
      : size(tile_size<Op>(p)), bias_turns(p, size, &carve) {
    rows = p.is_varlen() ? p.total_q : p.batch * p.seqlen_q;
    dq_columns = padded_units<Op>(p.head_dim) * Op::kPack;
    dq_in_place = std::is_same<In, Real>::value && p.head_dim == dq_columns;
    delta = carve.take<Real>(p.heads_q * rows);
    // Tiles do not cross sequences: at most one shorter tile per batch entry.
    tiles = rows / size.queries + p.batch;
    dq_turns_ = carve.take<Turn>(p.heads_q * tiles);
    dq = carve.take<Real>(dq_in_place ? 0 : p.heads_q * rows * dq_columns);
    bytes = carve.used();
  }

  // First row of batch entry b in the per-row arrays.
  static int64_t first_row(const AttnParams& p, int64_t b, const Sequence& queries) {
    return p.is_varlen() ? queries.start : b * p.seqlen_q;
  }
  // delta of the rows of batch entry b and head h.
  Real* delta_of(const AttnParams& p, int64_t b, int64_t h) const { return delta + first_row_of_head(p, b, h); }
  // The counter that orders additions to the dq of a query tile (turns.h): tile `number` of query head h of batch entry
  // b, whose first row is `first_row`. It is 1 + the number of the last key tile that was added, and 0 initially.
  Turn& dq_turn(int64_t h, int64_t first_row, int64_t b, int64_t number) const {
    return dq_turns_[h * tiles + first_row / size.queries + b + number];
  }

  // The index, in [Hq][rows], of the first row of batch entry b and head h.
  int64_t first_row_of_head(const AttnParams& p, int64_t b, int64_t h) const {
    return h * rows + first_row(p, b, query_sequence(p, b));
  }

  TileSize size;
  int64_t rows, tiles;  // per head
  int64_t dq_columns;   // head_dim, padded to whole vectors
  int64_t bytes;
  bool dq_in_place;  // the fp32 (fp64) output is its own accumulator
  Real* delta;       // [Hq][rows]
  Real* dq;          // [Hq][rows][dq_columns]
  BiasTurns bias_turns;

 private:
  Turn* dq_turns_;  // [Hq][tiles]
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
