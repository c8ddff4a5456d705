// The checks that every call passes before anything runs or is allocated, on tensors of every device, meta included
// (spec: bad input).
#pragma once

#include "attn_call.h"

namespace flashattn_ext {

void validate(const AttnCall& call);
void validate(const AttnCall& call, const BackwardCall& backward);
void validate_dropout_p(const c10::SymFloat& dropout_p);
void validate_origin(const std::optional<std::vector<c10::SymInt>>& origin);
// The state of a mask: int64 {seed, offset} where dropout drops anything, otherwise whatever there is.
void validate_rng_state(const at::Tensor& rng_state, const c10::SymFloat& dropout_p, const at::Tensor& device_of);

}  // namespace flashattn_ext
