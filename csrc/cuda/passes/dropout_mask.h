// The dropout mask as a tensor: the entry `dropout_mask` of the Backend table of every architecture.
#pragma once

#include "params.h"

namespace flashattn_ext {

void cuda_dropout_mask(const AttnParams& p, bool* mask);

}  // namespace flashattn_ext
