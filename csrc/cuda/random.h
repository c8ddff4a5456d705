// The random state of a call and its dropout mask, on every CUDA backend.
#pragma once

#include "../params.h"

namespace flashattn_ext {

// As in Backend.
void cuda_dropout_mask(const AttnParams& p, bool* mask);
void cuda_write_rng_state(const AttnParams& p, const RngSource& source, int64_t* state);

}  // namespace flashattn_ext
