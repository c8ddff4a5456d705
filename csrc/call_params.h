// From the tensors of a validated call to the params structs of the kernels.
#pragma once

#include "attn_call.h"
#include "backend.h"

namespace flashattn_ext {

// A tensor that kernels can read by its strides: its last dimension is contiguous and, except on backends that say
// otherwise, rows do not overlap. What is expanded (stride 0) stays so in the other dimensions: on the CPU the gradient
// of a sum costs the memory of one row. row_dim: -1 for a statistic, whose last dimension is that of its rows.
at::Tensor with_readable_rows(const at::Tensor& t, int64_t row_dim, const Backend& backend);

// Replaces tensors by ones that kernels can read: rows contiguous, small tensors contiguous as a whole, what takes part
// in the statistics in their dtype. A bias has the dtype of q, or fp32 where q has 16 bits.
AttnCall readable(AttnCall call, const Backend& backend);

TensorView view_of(const AttnCall& call, const at::Tensor& t);
RowView row_view_of(const AttnCall& call, const at::Tensor& t);
TensorView centres_view_of(const AttnCall& call, const at::Tensor& t);

// None is the call itself.
Origin origin_of(const std::optional<std::vector<c10::SymInt>>& given);

// Sizes and options: all that decides who runs the call. What is in memory is only told to be there.
void set_options(const AttnCall& call, AttnParams* params);
// Where the tensors of a readable call are in memory. rng_state is undefined without dropout.
void set_memory(const AttnCall& call, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state,
                AttnParams* params);

// Rows of packed tensors that belong to no sequence hold what a row that sees nothing has. Backends leave them alone.
// On the CPU they are those after the last sequence. Elsewhere only the device knows cu_seqlens, which may hold
// anything there: all rows are set before the kernels write those of sequences.
void set_rows_of_no_sequence(const std::optional<at::Tensor>& cu_seqlens, const at::Tensor& t, int64_t row_dim,
                             double value);
// The same for the results of a forward.
void set_rows_of_no_sequence(const AttnCall& call, const at::Tensor& out, const at::Tensor& lse);

// The gradients of alibi_slopes, relative_bias and bias; undefined where the backward is not asked for them.
struct BiasGradients {
  at::Tensor alibi_slopes, relative_bias, bias;
};

// What the kernels of a readable call add to: zeros in the dtype of the statistics. Where every element of the bias has
// one score, its gradient has its dtype. In a deterministic call of an accelerator every score has an element of its
// own, whatever the shape of the bias, so that the order of sums is not the kernel's.
BiasGradients zeroed_bias_gradients(const AttnCall& call, const BackwardCall& backward, const Backend& backend);
void set_memory(const BiasGradients& gradients, AttnGradParams* params);
// The results, in shapes and dtypes of the inputs as they were given, and empty tensors for what is undefined.
BiasGradients finished(const BiasGradients& sums, const AttnCall& given);
// The same without values.
BiasGradients finished_meta(const AttnCall& given, const BackwardCall& backward);

}  // namespace flashattn_ext
