// The extremes of a Mask's intervals: the entry `mask_extremes` of the Backend table of every architecture.
#pragma once

#include "params.h"

namespace flashattn_ext {

void cuda_mask_extremes(const AttnParams& p, int32_t* extremes);

}  // namespace flashattn_ext
