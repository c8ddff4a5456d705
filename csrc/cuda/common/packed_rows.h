// Rows of packed tensors that belong to no sequence: after the last one, and anywhere when cu_seqlens is not what it
// should be. Only the device knows them, so all rows are set before the kernels write those of sequences.
#pragma once

#include "../../params.h"

namespace flashattn_ext {

// out and lse as of a row that sees nothing: 0 and -inf. Nothing happens in a dense call.
void clear_packed_outputs(const AttnParams& p);

// dq, dk and dv: 0.
void clear_packed_gradients(const AttnGradParams& p);

}  // namespace flashattn_ext
