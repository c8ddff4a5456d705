// The dropout mask as a tensor: the entry `dropout_mask` of the CPU's Backend table.
#pragma once

#include "params.h"

namespace flashattn_ext {

void cpu_dropout_mask(const AttnParams& params, bool* mask);

}  // namespace flashattn_ext
