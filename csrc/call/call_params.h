// From the tensors of a validated call to the params structs of the kernels.
#pragma once

#include "backend/backend.h"
#include "call/attn_call.h"

namespace flashattn_ext {

// A tensor that kernels can read by its strides: its last dimension is contiguous and, except on backends that say
// otherwise, rows do not overlap. Other dimensions stay expanded (stride 0): on the CPU the gradient of a sum takes the
// memory of one row. row_dim: -1 for a per-row statistic, whose last dimension is the row dimension.
at::Tensor with_readable_rows(const at::Tensor& t, int64_t row_dim, const Backend& backend);

// Replaces tensors by ones that kernels can read: rows contiguous, small tensors fully contiguous, and the sink, slopes
// and relative bias in the dtype of the statistics. A bias has the dtype of q, or fp32 where q has 16 bits.
AttnCall readable(AttnCall call, const Backend& backend);

DType dtype_of(at::ScalarType dtype);

TensorView view_of(const AttnCall& call, const at::Tensor& t);
RowView row_view_of(const AttnCall& call, const at::Tensor& t);
TensorView row_numbers_view_of(const AttnCall& call, const at::Tensor& t);

// None: the call is not a part of a larger one.
Origin origin_of(const std::optional<std::vector<c10::SymInt>>& given);

// Sets sizes and options: everything that selects the backend. Of the tensors it records only which are present.
void set_options(const AttnCall& call, AttnParams* params);
// Sets the data pointers and strides of a readable call. rng_state is undefined without dropout.
void set_memory(const AttnCall& call, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state,
                AttnParams* params);

// Rows of packed tensors that belong to no sequence get the values of a fully masked row. Backends do not write them
// unless they set sets_unowned_rows. On the CPU only the rows after the last sequence are set. On other devices the
// host cannot read cu_seqlens, so all rows are set before the kernels write the rows of the sequences.
void set_rows_of_no_sequence(const std::optional<at::Tensor>& cu_seqlens, const at::Tensor& t, int64_t row_dim,
                             double value);
// Sets those rows of the results of a forward.
void set_rows_of_no_sequence(const AttnCall& call, const at::Tensor& out, const at::Tensor& lse);

// Allocates the buffer for the largest visible logit of each row and sets AttnParams::row_maxima to it; undefined, and
// nothing set, if `wanted` is false.
at::Tensor new_row_maxima(const AttnCall& call, bool wanted, AttnParams* params);
// The maxima of each head, fp32, of AttnCall::max_logits_shape(); empty if row_maxima is undefined. `params` are
// those of the forward, which `backend` has run.
at::Tensor largest_of_rows(const AttnCall& call, const at::Tensor& row_maxima, const AttnParams& params,
                           const Backend& backend);
// What largest_of_rows() returns, as a meta tensor.
at::Tensor largest_of_rows_meta(const AttnCall& call, bool wanted);

// The gradients of the biases of options.def; undefined where the backward does not need them.
struct BiasGradients {
#define CALL_BIAS(name, dims, takers, check) at::Tensor name;
#include "call/options.def"
};

// The buffers that the kernels of a readable call accumulate into: zeros in the dtype of the statistics. The
// gradient of a bias that is not broadcast has the dtype of the bias. In a deterministic call on an accelerator the
// gradient of the bias has one element per score even for a broadcast bias, so that no sum depends on the order in
// which thread blocks run; finished() reduces it. params: of the op `backward`, but for these buffers: a gradient that
// the backend writes as a whole is not zeroed. nullptr: of another op.
BiasGradients bias_gradient_buffers(const AttnCall& call, const BackwardCall& backward, const Backend& backend,
                                    const AttnGradParams* params);
void set_memory(const BiasGradients& gradients, AttnGradParams* params);
// The results in the shapes and dtypes of the given inputs; empty tensors for undefined gradients.
BiasGradients finished(const BiasGradients& sums, const AttnCall& given);
// What finished() returns, as meta tensors.
BiasGradients finished_meta(const AttnCall& given, const BackwardCall& backward);

}  // namespace flashattn_ext
