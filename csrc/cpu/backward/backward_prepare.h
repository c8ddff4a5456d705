// First stage of the backward: delta_i = <dout_i, out_i> - dlse_i for every row (Dao 2023, Algorithm 2, line 4), and
// zeros for the rows of dq that no key tile will touch. The gradient of lse enters only here, because
// ds_ij = p_ij * (dp_ij - delta_i) also when delta contains it.
#pragma once

#include "cpu/backward/backward_workspace.h"
#include "cpu/score/head_mask.h"
#include "cpu/vectors/convert.h"
#include "cpu/vectors/views.h"
#include "rules/lse_words.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class Real>
inline Real lse_gradient(const AttnGradParams& p, int64_t b, int64_t h, int64_t row) {
  if (!p.dlse.data) return 0;
  return *row_of<const Real>(p.dlse, b, h, row);
}

// The weight of a sink in a row.
template <class Real>
inline double weight_of_sink(const AttnParams& p, int64_t b, int64_t h, int64_t row, Real sink) {
  return std::exp2(static_cast<double>(LseWords<Real>::of(p, b, h, row).sink_log2_weight(sink)));
}

// The dot product of two rows.
template <class Op, class In>
inline typename Op::Real dot_rows(const In* x, const In* y, int64_t n) {
  using Real = typename Op::Real;
  using S = typename Op::S;
  constexpr int kLanes = 16, W = S::kWidth;  // independent sums, the same number in every instruction set
  typename S::V sums[kLanes / W];
  for (int i = 0; i < kLanes / W; ++i) sums[i] = S::zero();
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) {
    FLASHATTN_UNROLL(8)
    for (int i = 0; i < kLanes / W; ++i) {
      const int64_t at = d + i * W;
      sums[i] = S::fma(WideVector<Real, In>::load(x + at), WideVector<Real, In>::load(y + at), sums[i]);
    }
  }
  alignas(64) Real lanes[kLanes];
  for (int i = 0; i < kLanes / W; ++i) S::store(lanes + i * W, sums[i]);
  for (; d < n; ++d) lanes[0] += widen(x[d]) * widen(y[d]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// The dot product of two rows, summed in the order of score_product() (gemm.h), in which dP is computed. n: at most
// kLargestHeadDim.
template <class Op, class In>
FLASHATTN_SHARED typename Op::Real dot_as_products(const In* x, const In* y, int64_t n) {
  using S = typename Op::S;
  using Unit = typename Op::Unit;
  alignas(64) Unit padded[2][kLargestHeadDim];
  const Unit* const a = stage_rows<Op>(x, n, 1, n, padded[0]).data;
  const Unit* const b = stage_rows<Op>(y, n, 1, n, padded[1]).data;
  const int64_t units = ceil_div(n, Op::kPack);
  typename Op::V total = S::zero();
  for (int64_t begin = 0; begin < units; begin += kSumUnits) {
    typename Op::V sum = S::zero();
    for (int64_t u = begin; u < lesser(begin + kSumUnits, units); ++u) {
      sum = Op::multiply_add(sum, Op::broadcast(a + u), Op::broadcast(b + u));
    }
    total = begin == 0 ? sum : total + sum;
  }
  alignas(64) typename Op::Real lanes[S::kWidth];
  S::store(lanes, total);
  return lanes[0];
}

// <dout, other> of a row, where other is out, or a tangent of it. In a row with one weight of 1 this is one of the
// products dP, from which dS subtracts it. Logits of this size are usually such rows, and their keys are so large that
// dq would show a rounding error in dS: there both are computed in the same order, so that dS is exactly 0.
template <class Op, class In>
inline typename Op::Real dot_of_row(const AttnGradParams& p, int64_t b, int64_t h, int64_t row,
                                    const TensorView& other) {
  constexpr typename Op::Real kLargeTop = 256;
  const In *const dout = row_of<const In>(p.dout, b, h, row), *const out = row_of<const In>(other, b, h, row);
  const auto words = LseWords<typename Op::Real>::of(p, b, h, row);
  const bool is_large = !(std::abs(words.top) < kLargeTop) && !words.is_of_no_key();
  return is_large ? dot_as_products<Op>(dout, out, p.head_dim_v) : dot_rows<Op>(dout, out, p.head_dim_v);
}

template <class In, class Op>
class BackwardPrepare {
  using Real = typename Op::Real;

 public:
  BackwardPrepare(const AttnGradParams& params, const BackwardWorkspace<In, Op>& call_workspace)
      : p(params), workspace(call_workspace) {}

  void run(int64_t b, int64_t h) const {
    const Sequence queries = query_sequence(p, b);
    const int64_t first = workspace.first_row(p, b, queries);
    Real* delta = workspace.delta + h * workspace.rows + first;
    for (int64_t i = 0; i < queries.length; ++i) {
      const int64_t row = queries.start + i;
      delta[i] = dot_of_row<Op, In>(p, b, h, row, p.out) - lse_gradient<Real>(p, b, h, row);
    }
    const HeadMask mask(p, b, h, queries, KeyLocator(p, b));
    const TileSize& size = workspace.size;
    for (int64_t row0 = 0; row0 < queries.length; row0 += size.queries) {
      const int64_t count = lesser(size.queries, queries.length - row0);
      const bool sees_nothing = mask.next_tile(size.keys, {row0, row0 + count}, -1) < 0;
      if (sees_nothing) clear_dq(b, h, queries.start + row0, count);
      workspace.dq_turn(h, first, b, row0 / size.queries).store(0, std::memory_order_relaxed);
    }
  }

 private:
  void clear_dq(int64_t b, int64_t h, int64_t row, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      std::memset(static_cast<void*>(row_of<In>(p.dq, b, h, row + i)), 0, p.head_dim * sizeof(In));
    }
  }

  const AttnGradParams& p;
  const BackwardWorkspace<In, Op>& workspace;
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
