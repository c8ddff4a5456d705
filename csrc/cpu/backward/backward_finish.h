// Last stage of the backward: the gradient of the sink, dsink_h = -sum over all rows of p_i * delta_i, where p_i is the
// weight of the sink in row i.
// It also adds the terms of the centres of rows to the gradients of slopes and relative bias. Both come last because
// the main stage replaces delta by a more exact value where it can.
#pragma once

#include "cpu/backward/backward_prepare.h"
#include "cpu/vectors/views.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The gradient of one head's sink: a sum over its rows in a fixed order. gradient_of(b, row): minus the gradient of the
// sink's logit in a row of the sequence, divided by its weight.
template <class Real, class GradientOf>
inline void finish_sink(const AttnGradParams& p, int64_t h, GradientOf gradient_of) {
  const Real sink = static_cast<const Real*>(p.sink)[h];
  double sum = 0;
  for (int64_t b = 0; sink_counts(sink) && b < p.batch; ++b) {
    const Sequence queries = query_sequence(p, b);
    for (int64_t i = 0; i < queries.length; ++i) {
      sum -= weight_of_sink(p, b, h, queries.start + i, sink) * gradient_of(b, i);
    }
  }
  static_cast<Real*>(p.dsink)[h] = static_cast<Real>(sum);
}

// Adds, in a fixed order over the rows, the centres of each row times the sum of its logit gradients to the
// gradients of one head's slope and relative bias (bias.h).
template <class In, class Op>
inline void finish_biases(const AttnGradParams& p, const BackwardWorkspace<In, Op>& workspace, int64_t h) {
  using Real = typename Op::Real;
  const Real sink = p.sink ? static_cast<const Real*>(p.sink)[h] : Real(0);
  const bool has_weight = p.has_sink && sink_counts(sink);
  Real* const ends = p.drelative_bias ? static_cast<Real*>(p.drelative_bias) + h * (2 * p.relative_reach + 1) : nullptr;
  double below = 0, above = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence queries = query_sequence(p, b);
    const Real* delta = workspace.delta_of(p, b, h);
    double slope = 0;
    for (int64_t i = 0; i < queries.length; ++i) {
      const int64_t row = queries.start + i;
      if (LseWords<Real>::of(p, b, h, row).is_of_no_key()) continue;
      double gradient = static_cast<double>(lse_gradient<Real>(p, b, h, row));
      if (has_weight) {
        gradient += weight_of_sink(p, b, h, row, sink) * static_cast<double>(delta[i]);
      }
      const Real* const centres = row_of<const Real>(p.centres, b, h, row);
      slope -= gradient * static_cast<double>(centres[kDistance]);
      below += gradient * static_cast<double>(centres[kBelow]);
      above += gradient * static_cast<double>(centres[kAbove]);
    }
    if (p.dalibi_slopes) {
      static_cast<Real*>(p.dalibi_slopes)[b * p.alibi_batch_stride + h] += static_cast<Real>(slope);
    }
  }
  if (!ends) return;
  ends[0] += static_cast<Real>(below);
  ends[2 * p.relative_reach] += static_cast<Real>(above);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
