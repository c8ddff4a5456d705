// Why a forward with few queries for many keys does not run the kernels for such calls. supports_op.cpp asks.
#pragma once

#include <string>

#include "backend/backend.h"

namespace flashattn_ext {

// The reason in words, with what to do instead; empty if the call runs those kernels, or has many queries or few keys.
// The backend supports the call; of its tensors only those on the host that the backend's dispatch reads are read.
std::string why_slow(const Backend& backend, const AttnParams& params);

}  // namespace flashattn_ext
