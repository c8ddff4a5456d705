// Inputs in fp8 as bfloat16 copies, in which every element is exact, for the forward kernels of 16-bit types.
#pragma once

#include "params.h"

namespace flashattn_ext {

// Bytes of workspace for the copies of q, k and v.
int64_t widened_bytes(const AttnParams& p);

// Writes the copies to the start of the workspace. Returns the call with views of them, whose rows are aligned as
// those of align_inputs are and whose workspace begins after them. It stays a call in fp8: its descales apply to the
// copies.
AttnParams widen_inputs(const AttnParams& p);

}  // namespace flashattn_ext
