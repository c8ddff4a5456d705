// Last stage of the backward: the gradient of the sink, dsink_h = -sum over all rows of exp(sink_h - lse_i) * delta_i.
// It comes last because the main stage replaces delta by a more exact value where it can.
#pragma once

#include "../sink.h"
#include "backward_workspace.h"
#include "views.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The gradient of one head's sink: a sum over its rows in a fixed order.
template <class In, class Op>
inline void finish_sink(const AttnGradParams& p, const BackwardWorkspace<In, Op>& workspace, int64_t h) {
  using Real = typename Op::Real;
  const double sink = static_cast<double>(static_cast<const Real*>(p.sink)[h]);
  const bool has_weight = sink_counts(sink);
  double sum = 0;
  for (int64_t b = 0; has_weight && b < p.batch; ++b) {
    const Sequence queries = query_sequence(p, b);
    const Real* lse = row_of<const Real>(p.lse, b, h, queries.start);
    const Real* delta = workspace.delta + h * workspace.rows + workspace.first_row(p, b, queries);
    for (int64_t i = 0; i < queries.length; ++i) {
      sum -= std::exp(sink_log_weight(sink, static_cast<double>(lse[i]))) * static_cast<double>(delta[i]);
    }
  }
  static_cast<Real*>(p.dsink)[h] = static_cast<Real>(sum);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
