// Rows of packed tensors that belong to no sequence: those before the first one and after the last. The kernels of
// attention leave them alone.
#pragma once

#include "../../params.h"

namespace flashattn_ext {

// Gives them the results of a row that sees nothing: out and centres 0, lse -inf. In one launch, before those of the
// call: only the device knows where sequences are, and what it finds there may be anything.
void set_unowned_rows(const AttnParams& p);
// The gradients of the inputs there are 0.
void set_unowned_rows(const AttnGradParams& p);

}  // namespace flashattn_ext
