// First stage of the backward: delta_i = <dout_i, out_i> - dlse_i for every row, the gradient of the sink, and zeros
// for the dq rows that no key tile will touch (Dao 2023, Algorithm 2, line 4; the gradient of lse enters only here,
// because ds_ij = p_ij * (dp_ij - delta_i) also when delta contains it).
#pragma once

#include "schedule.h"
#include "tiles.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// What the workers of one backward call share. Per-row arrays are [Hq][all rows of the call].
template <class In, class Op>
struct BackwardShared {
  using Real = typename Op::Real;

  BackwardShared(const AttnGradParams& p, void* base) {
    ScratchCarver carve(base);
    rows = p.is_varlen() ? p.total_q : p.batch * p.seqlen_q;
    dq_lanes = padded_units<Op>(p.head_dim) * Op::kPack;
    dq_in_place = std::is_same<In, Real>::value && p.head_dim == dq_lanes;
    delta = carve.take<Real>(p.heads_q * rows);
    // Tiles end at sequence ends: at most one partial tile for each batch entry.
    const int64_t tiles = rows / Tile<Real>::kQueries + p.batch;
    turns = carve.take<std::atomic<int32_t>>(p.heads_q * tiles);
    turn_tiles = tiles;
    dq = carve.take<Real>(dq_in_place ? 0 : p.heads_q * rows * dq_lanes);
    bytes = carve.used();
  }

  // First row of batch entry b in the per-row arrays.
  static int64_t first_row(const AttnParams& p, int64_t b, const Sequence& queries) {
    return p.is_varlen() ? queries.start : b * p.seqlen_q;
  }
  // Whose turn it is to add to the dq of query tile m: the number of key tiles that have done so.
  std::atomic<int32_t>& turn(int64_t h, int64_t first_row, int64_t b, int64_t m) const {
    return turns[h * turn_tiles + first_row / Tile<Real>::kQueries + b + m];
  }

  int64_t rows, dq_lanes, turn_tiles, bytes;
  bool dq_in_place;  // the fp32 (fp64) output is its own accumulator
  Real* delta;       // [Hq][rows]
  std::atomic<int32_t>* turns;
  Real* dq;  // [Hq][rows][dq_lanes]
};

template <class Real>
inline Real lse_gradient(const AttnGradParams& p, int64_t b, int64_t h, int64_t row) {
  if (!p.dlse.data) return 0;
  return static_cast<const Real*>(p.dlse.data)[b * p.dlse.batch_stride + h * p.dlse.head_stride + row];
}

template <class In, class Op>
class BackwardPrepare {
  using Real = typename Op::Real;
  static constexpr int64_t BM = Tile<Real>::kQueries;

 public:
  BackwardPrepare(const AttnGradParams& params, const BackwardShared<In, Op>& shared_data)
      : p(params), shared(shared_data) {}

  void run(int64_t b, int64_t h) const {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const int64_t first = shared.first_row(p, b, queries);
    Real* delta = shared.delta + h * shared.rows + first;
    for (int64_t i = 0; i < queries.length; ++i) {
      delta[i] = dot_rows(b, h, queries.start + i) - lse_gradient<Real>(p, b, h, queries.start + i);
    }
    const Mask mask(p, queries.length, keys.length);
    for (int64_t row0 = 0; row0 < queries.length; row0 += BM) {
      const int64_t count = lesser(BM, queries.length - row0);
      const IndexRange visible = mask.keys_of(row0, row0 + count);
      if (visible.begin == visible.end) clear_dq(b, h, queries.start + row0, count);
      shared.turn(h, first, b, row0 / BM).store(0, std::memory_order_relaxed);
    }
  }

 private:
  static const In* row_of(const TensorView& t, int64_t b, int64_t h, int64_t row) {
    return static_cast<const In*>(t.data) + b * t.batch_stride + h * t.head_stride + row * t.row_stride;
  }

  Real dot_rows(int64_t b, int64_t h, int64_t row) const {
    const In* dout = row_of(p.dout, b, h, row);
    const In* out = row_of(p.out, b, h, row);
    constexpr int kLanes = 16;
    Real lanes[kLanes] = {};  // independent sums that the compiler may vectorise
    int64_t d = 0;
    for (; d + kLanes <= p.head_dim_v; d += kLanes) {
      Real a[kLanes], c[kLanes];
      widen_row(a, dout + d, kLanes);
      widen_row(c, out + d, kLanes);
      for (int l = 0; l < kLanes; ++l) lanes[l] += a[l] * c[l];
    }
    for (; d < p.head_dim_v; ++d) lanes[0] += widen(dout[d]) * widen(out[d]);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    return lanes[0];
  }

  void clear_dq(int64_t b, int64_t h, int64_t row, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      In* to = static_cast<In*>(p.dq.data) + b * p.dq.batch_stride + h * p.dq.head_stride + (row + i) * p.dq.row_stride;
      std::memset(static_cast<void*>(to), 0, p.head_dim * sizeof(In));
    }
  }

  const AttnGradParams& p;
  const BackwardShared<In, Op>& shared;
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
