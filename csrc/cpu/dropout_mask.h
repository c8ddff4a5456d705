// The dropout mask as a tensor, and the state of the generator that it comes from: the entries `dropout_mask` and
// `write_rng_state` of the CPU's Backend table.
#pragma once

#include "../params.h"

namespace flashattn_ext {

void cpu_dropout_mask(const AttnParams& params, bool* mask);
void cpu_write_rng_state(const AttnParams& params, const RngSource& source, int64_t* state);

}  // namespace flashattn_ext
