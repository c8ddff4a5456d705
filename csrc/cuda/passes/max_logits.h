// Reduces the row maxima of a call to one maximum per head: the entry `max_logits` of the Backend table of every
// architecture.
#pragma once

#include "params.h"

namespace flashattn_ext {

void cuda_max_logits(const AttnParams& p, float* results);

}  // namespace flashattn_ext
