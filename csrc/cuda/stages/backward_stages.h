// The stages of a backward beside its main one that no source of a main stage compiles again: before it
// backward_prepare.cu and few_keys_delta.cu, after it backward_finish.cu.
#pragma once

#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext {

// First stage: delta = <dout, out> - dlse of every row (Dao 2023, "FlashAttention-2", Algorithm 2, line 4), and lse in
// units of log2, as one word or a mark and as two words. With dropout, delta is divided by the scale of the kept
// weights: the main stage then scales no weight, and multiplies its sums by the scale once, at the end. The same launch
// zeroes the buffers that the main stage adds to. T: the element type of q, __half, __nv_bfloat16 or float.
template <class T>
void launch_prepare(const AttnGradParams& p, const BackwardWorkspace& workspace);

// Replaces delta in the workspace, after the first stage, where a call has gradients of slopes or of a relative bias
// and few keys, by the row sum of P * dP - dlse. delta from a 16-bit `out` has the rounding error of `out`: where a row
// sees one or two keys, its dS nearly cancels, and sums over rows would consist of that error. A row keeps its delta if
// its weights do not add up to 1 (without the sink's): then its lse is that of a call with more keys.
void find_delta_of_few_keys(const AttnGradParams& p, const GeneralWorkspace& workspace);
// Calls without options of a score and biases have no such sums.
inline void find_delta_of_few_keys(const AttnGradParams&, const BackwardWorkspace&) {}

// Last stage of calls with biases: gradients of slopes and of both ends of the relative bias, from the sums that warps
// have written (bias_gradient.cuh) and the centres of rows (rules/bias.h), in a fixed order. In deterministic calls it
// also forms the gradients of all entries of the relative bias.
void finish_biases(const AttnGradParams& p, const GeneralWorkspace& workspace);
inline void finish_biases(const AttnGradParams&, const BackwardWorkspace&) {}  // the call has no biases
inline void finish_biases(const AttnGradParams&, const GroupedWorkspace&) {}

}  // namespace flashattn_ext
