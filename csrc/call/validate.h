// The checks that every call passes before anything runs or is allocated, on tensors of every device, meta included.
#pragma once

#include "call/attn_call.h"

namespace flashattn_ext {

void validate(const AttnCall& call);
void validate(const AttnCall& call, const BackwardCall& backward);
// Checks the state of the dropout generator: int64 {seed, offset} with dropout; without dropout any tensor, or none,
// passes.
void validate_rng_state(const std::optional<at::Tensor>& given, const c10::SymFloat& dropout_p,
                        const at::Tensor& device_of);

// --- checks shared by all ops; `name` is the argument's name in the message ---
// Whether a condition on sizes holds. While a graph is traced it becomes a guard, or a check at run time where a size
// has no value yet.
bool holds(const c10::SymBool& condition);
bool has_shape(const at::Tensor& t, c10::SymIntArrayRef shape);
void check_device(const char* name, const at::Tensor& t, const at::Tensor& q);
void check_shape_and_dtype(const char* name, const at::Tensor& t, c10::SymIntArrayRef shape, at::ScalarType dtype,
                           const AttnCall& call);
void check_dtype_of_q(const AttnCall& call);
// The arguments that only fp8 calls have, and those that they do not take. heads_k: the number of KV heads.
void check_fp8(const AttnCall& call, const c10::SymInt& heads_k);
// Refuses a backward, or another derivative, of an fp8 call.
void check_has_derivatives(const AttnCall& call);
// Refuses an fp8 call that requires a gradient or has a tangent, after the checks that every call passes.
void refuse_derivatives_of_fp8(const AttnCall& call);
// The intervals of a Mask: of `keys` keys; of any number where it is empty, in a decoding call, which is never packed.
void check_intervals(const AttnCall& call, const std::optional<c10::SymInt>& keys);
// The tensors of a BlockMask, and what does not go together with one. On the CPU their values are checked too.
void check_block_mask(const AttnCall& call);
void check_head_dim(const char* name, const at::Tensor& t);
// Every KV head has the same number of query heads.
void check_groups(const at::Tensor& q, const c10::SymInt& heads_q, const c10::SymInt& heads_k);
// The conditions of options.def: a function check_NAME for each number; all numbers and integers of a call; and all of
// its tensors that are checked one by one.
#define CALL_NUMBER(name, default_value, takers, accepts, expected) void check_##name(const c10::SymFloat& value);
#include "call/options.def"
void check_origin(const std::optional<std::vector<c10::SymInt>>& origin);
void check_numbers(const AttnCall& call);
void check_tensors(const AttnCall& call);
// On the CPU the values are checked too, unless it is a fake tensor of a traced graph, which has no values. On
// accelerators that would need a synchronisation, and the kernels clamp instead. tensor: "q" or "k"; packed: the packed
// tensor, nullptr if the keys are in a KV cache; longest: the max_seqlen argument.
void check_cu_seqlens(const char* name, const at::Tensor& cu, const AttnCall& call, const char* tensor,
                      const at::Tensor* packed, const c10::SymInt& longest);

}  // namespace flashattn_ext
