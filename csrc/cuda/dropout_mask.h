// The dropout mask as a tensor, on every CUDA backend.
#pragma once

#include "../params.h"

namespace flashattn_ext {

// As Backend::dropout_mask.
void cuda_dropout_mask(const AttnParams& p, bool* mask);

}  // namespace flashattn_ext
