// delta of the rows of calls with few keys, as the row sum of P * dP - dlse instead of <dout, out> - dlse.
#pragma once

#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext {

// Replaces delta in the workspace, after the first stage of the backward, where a call has gradients of slopes or of a
// relative bias and few keys. delta from a 16-bit `out` has the rounding error of `out`: where a row sees one or two
// keys, its dS nearly cancels, and sums over rows would consist of that error. A row keeps its delta if its weights do
// not add up to 1 (without the sink's): then its lse is that of a call with more keys.
void find_delta_of_few_keys(const AttnGradParams& p, const GeneralWorkspace& workspace);
// Calls without options of a score and biases have no such sums.
inline void find_delta_of_few_keys(const AttnGradParams&, const BackwardWorkspace&) {}

}  // namespace flashattn_ext
