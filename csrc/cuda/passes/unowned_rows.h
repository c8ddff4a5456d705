// Rows of packed tensors that belong to no sequence: those before the first one and after the last. The kernels of
// attention leave them alone.
#pragma once

#include "params.h"

namespace flashattn_ext {

// Gives them the results of a fully masked row: out and centres 0, lse -inf. One launch, before the kernels of the
// call: only the device knows the offsets of the sequences, and they may be invalid.
void set_unowned_rows(const AttnParams& p);
// Sets the gradients of these rows of the inputs to 0.
void set_unowned_rows(const AttnGradParams& p);

}  // namespace flashattn_ext
