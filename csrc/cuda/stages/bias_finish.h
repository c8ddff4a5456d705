// Last stage of the backward of calls with biases: gradients of slopes and of both ends of the relative bias, from the
// sums that warps have written (bias_gradient.cuh) and the centres of rows (rules/bias.h), in a fixed order. In
// deterministic calls it also forms the gradients of all entries of the relative bias.
#pragma once

#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext {

inline void finish_biases(const AttnGradParams&, const BackwardWorkspace&) {}  // the call has no biases
inline void finish_biases(const AttnGradParams&, const GroupedWorkspace&) {}
void finish_biases(const AttnGradParams& p, const GeneralWorkspace& workspace);

}  // namespace flashattn_ext
