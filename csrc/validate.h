// The checks that every call passes before anything runs or is allocated (spec: bad input).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace flashattn_ext {

// The arguments of a call as the ops receive them. Dense tensors are [B, S, H, D], or [B, H, S, D] with bhsd; varlen
// calls have cu_seqlens and tensors [total, H, D].
struct AttnCall {
  at::Tensor q, k, v;
  std::optional<at::Tensor> cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  bool bhsd;
  double softmax_scale;
  bool causal;
  int64_t window_left, window_right;
  double dropout_p;
  bool smooth_softmax;
  std::optional<at::Tensor> sink;  // [Hq]

  bool is_varlen() const { return cu_seqlens_q.has_value(); }
  int64_t row_dim() const { return is_varlen() ? 0 : (bhsd ? 2 : 1); }
  int64_t head_axis() const { return is_varlen() || bhsd ? 1 : 2; }
  int64_t batch() const { return is_varlen() ? cu_seqlens_q->numel() - 1 : q.size(0); }
  std::vector<int64_t> rng_state_shape() const { return {dropout_p > 0 ? 2 : 0}; }
  at::ScalarType statistics_dtype() const { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
};

// What the raw backward receives beyond the call itself.
struct BackwardCall {
  std::optional<at::Tensor> dout, dlse;
  at::Tensor out, lse, rng_state;
};

void validate(const AttnCall& call);
void validate(const AttnCall& call, const BackwardCall& backward);
void validate_dropout_p(double dropout_p);

}  // namespace flashattn_ext
