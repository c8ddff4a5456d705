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
void validate_rng_state(const std::optional<at::Tensor>& given, const c10::SymFloat& dropout_p,
                        const at::Tensor& device_of);

// --- what the checks of all ops share; `name` is that of the argument in the message ---
// A condition on sizes. While a graph is traced it becomes a guard, or a check at run time where a size has no value
// yet.
bool holds(const c10::SymBool& condition);
void check_device(const char* name, const at::Tensor& t, const at::Tensor& q);
void check_dtype_of_q(const AttnCall& call);
void check_head_dim(const char* name, const at::Tensor& t);
// Numbers and flags, and the sink.
void check_options(const AttnCall& call);
void check_alibi_slopes(const AttnCall& call);
// On the CPU the values are checked too, unless the tensor stands for one of a graph that is being traced and has none.
// On accelerators that would need a synchronisation, and the kernels clamp instead. tensor: "q" or "k"; packed: the
// tensor whose rows it counts, nullptr where these are in a cache; longest: the max_seqlen of the call.
void check_cu_seqlens(const char* name, const at::Tensor& cu, const AttnCall& call, const char* tensor,
                      const at::Tensor* packed, const c10::SymInt& longest);

}  // namespace flashattn_ext
