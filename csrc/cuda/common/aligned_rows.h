// Inputs whose rows the kernels cannot read in whole 16-byte vectors: head dims that are no multiple of 8, views that
// start anywhere.
#pragma once

#include "../../params.h"

namespace flashattn_ext {

// Whether rows of `columns` elements can be read in place.
bool rows_are_aligned(const TensorView& t, int64_t columns, int64_t element_bytes);

// The end of what a tensor of [batch][heads][rows][columns] occupies.
const void* end_of(const TensorView& t, int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                   int64_t element_bytes);

// Bytes of workspace for copies of the inputs that are not aligned: q, k and v, and in the backward dout (`out` is read
// once, in place).
int64_t aligned_copy_bytes(const AttnParams& p);
int64_t aligned_copy_bytes(const AttnGradParams& p);

// Makes the copies, at the start of the workspace, and returns the call that reads them; its own workspace comes after
// them.
AttnParams align_inputs(const AttnParams& p);
AttnGradParams align_inputs(const AttnGradParams& p);

}  // namespace flashattn_ext
