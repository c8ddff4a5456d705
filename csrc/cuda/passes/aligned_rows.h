// Inputs whose rows the kernels cannot read in whole 16-byte vectors: head dims that are not a multiple of 8 (in
// fp8 of 16), and views with an unaligned start or stride.
#pragma once

#include "derivative_params.h"

namespace flashattn_ext {

// Bytes of workspace for copies of the inputs that are not aligned: q, k and v, in the backward dout (`out` is read
// once, in place), and the tangents of q, k and v that a call has.
int64_t aligned_copy_bytes(const AttnParams& p);
int64_t aligned_copy_bytes(const AttnGradParams& p);
int64_t aligned_copy_bytes(const JvpParams& p);
int64_t aligned_copy_bytes(const SecondParams& p);

// Copies the inputs that are not aligned to the start of the workspace. Returns the call with views of these copies,
// whose workspace begins after them.
AttnParams align_inputs(const AttnParams& p);
AttnGradParams align_inputs(const AttnGradParams& p);
JvpParams align_inputs(const JvpParams& p);
SecondParams align_inputs(const SecondParams& p);

}  // namespace flashattn_ext
