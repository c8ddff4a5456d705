// Small kernels before or after the one of a call; each has a source of its name. dropout_mask, mask_extremes and
// max_logits are entries of the Backend table of every architecture.
#pragma once

#include "derivative_params.h"

namespace flashattn_ext {

// The dropout mask as a tensor.
void cuda_dropout_mask(const AttnParams& p, bool* mask);
// The extremes of a Mask's intervals.
void cuda_mask_extremes(const AttnParams& p, int32_t* extremes);
// Reduces the row maxima of a call to one maximum per head.
void cuda_max_logits(const AttnParams& p, float* results);

// Inputs whose rows the kernels cannot read in whole 16-byte vectors (aligned_rows.cu): head dims that are not a
// multiple of 8 (in fp8 of 16), and views with an unaligned start or stride.
//
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

// Inputs in fp8 as bfloat16 copies, in which every element is exact, for the forward kernels of 16-bit types
// (widened_inputs.cu).
//
// Bytes of workspace for the copies of q, k and v.
int64_t widened_bytes(const AttnParams& p);
// Writes the copies to the start of the workspace. Returns the call with views of them, whose rows are aligned as
// those of align_inputs are and whose workspace begins after them. It stays a call in fp8: its descales apply to the
// copies.
AttnParams widen_inputs(const AttnParams& p);

// Rows of packed tensors that belong to no sequence, those before the first one and after the last (unowned_rows.cu).
// The kernels of attention leave them alone.
//
// Gives them the results of a fully masked row: out and centres 0, lse -inf. One launch, before the kernels of the
// call: only the device knows the offsets of the sequences, and they may be invalid.
void set_unowned_rows(const AttnParams& p);
// Sets the gradients of these rows of the inputs to 0.
void set_unowned_rows(const AttnGradParams& p);

}  // namespace flashattn_ext
