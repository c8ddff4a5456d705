// AttnCall: the arguments of a call as the ops receive them, and the one place that knows their order.
//
// Sizes and numbers are symbolic types because torch.compile traces the ops with sizes that it does not know; in a call
// that runs they are plain values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "bias.h"

namespace flashattn_ext {

// The arguments that every op of attention begins with. A float is a `Scalar`, which may be symbolic (see Arguments).
constexpr char kCallSchema[] =
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? sink, Tensor? alibi_slopes, "
    "Tensor? relative_bias, Tensor? bias, Tensor? mask_intervals, Tensor? mask_extremes, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool bhsd, Scalar softmax_scale, Scalar softcap, bool causal, SymInt window_left, "
    "SymInt window_right, Scalar dropout_p, bool smooth_softmax, bool deterministic, SymInt[]? origin";
constexpr int kCallTensors = 11, kCallOptions = 12;  // how many of them are tensors, and how many are not
constexpr int kSink = 5, kAlibiSlopes = 6, kRelativeBias = 7,
              kBias = 8;  // places of those with gradients, after q, k, v

// Dense tensors are [B, S, H, D], or [B, H, S, D] with bhsd; varlen calls have cu_seqlens and tensors [total, H, D].
// The fields are in the order of kCallSchema.
struct AttnCall {
  at::Tensor q, k, v;
  std::optional<at::Tensor> cu_seqlens_q, cu_seqlens_k;
  std::optional<at::Tensor> sink;            // [Hq]
  std::optional<at::Tensor> alibi_slopes;    // [Hq] or [B, Hq]
  std::optional<at::Tensor> relative_bias;   // [Hq, 2 L + 1]
  std::optional<at::Tensor> bias;            // [B or 1, Hq or 1, Sq or 1, Sk]
  std::optional<at::Tensor> mask_intervals;  // a Mask: [B or 1, Hm, Sk, 2], or [Hm, total_k, 2]
  std::optional<at::Tensor> mask_extremes;   // what the op mask_extremes makes of them; given together with them
  c10::SymInt max_seqlen_q, max_seqlen_k;
  bool bhsd;
  c10::SymFloat softmax_scale;
  c10::SymFloat softcap;
  bool causal;
  c10::SymInt window_left, window_right;
  c10::SymFloat dropout_p;
  bool smooth_softmax;
  bool deterministic;
  std::optional<std::vector<c10::SymInt>> origin;  // (batch, head) or (batch, head, row, key)

  bool is_varlen() const { return cu_seqlens_q.has_value(); }
  int64_t row_dim() const { return is_varlen() ? 0 : (bhsd ? 2 : 1); }
  int64_t head_axis() const { return is_varlen() || bhsd ? 1 : 2; }
  c10::SymInt batch() const { return is_varlen() ? cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0); }
  at::ScalarType statistics_dtype() const { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

  // Shape of out, and of lse: [B, Hq, Sq], or [Hq, total_q].
  std::vector<c10::SymInt> out_shape() const {
    std::vector<c10::SymInt> shape = q.sym_sizes().vec();
    shape.back() = v.sym_size(-1);
    return shape;
  }
  std::vector<c10::SymInt> lse_shape() const {
    std::vector<c10::SymInt> shape{q.sym_size(head_axis()), q.sym_size(row_dim())};
    if (!is_varlen()) shape.insert(shape.begin(), q.sym_size(0));
    return shape;
  }
  // The shape of the centres of rows (bias.h): [B, Hq, Sq, kCentres], or [Hq, total_q, kCentres].
  std::vector<c10::SymInt> centres_shape() const {
    std::vector<c10::SymInt> shape = lse_shape();
    shape.emplace_back(kCentres);
    return shape;
  }
};

// What the backward receives beyond the call itself.
struct BackwardCall {
  std::optional<at::Tensor> dout, dlse;
  at::Tensor out, lse;
  std::optional<at::Tensor> centres;                            // bias.h: what the forward said they are
  bool needs_dalibi_slopes, needs_drelative_bias, needs_dbias;  // false: no such gradient is computed
};

// Reads the arguments of a boxed op one after the other.
//
// `scalars` are what torch.compile passes instead of floats that change from call to call: a CPU tensor of one float64
// for each Scalar of the schema, in its order; the Scalars themselves are meaningless then. Otherwise it is empty.
// While a graph is traced the tensors have no values, and the numbers read are those meaningless ones.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : stack_(stack), count_(op.schema().arguments().size()), next_(stack->end() - count_) {
    if (stack->back().isTensorList()) scalars_ = stack->back().toTensorVector();
  }

  at::Tensor tensor() { return (next_++)->toTensor(); }
  std::optional<at::Tensor> maybe_tensor() { return (next_++)->toOptional<at::Tensor>(); }
  c10::SymInt integer() { return (next_++)->toSymInt(); }
  std::optional<std::vector<c10::SymInt>> maybe_integers() {
    const c10::IValue& value = *next_++;
    if (value.isNone()) return std::nullopt;
    return value.toSymIntVector();
  }
  bool flag() { return (next_++)->toBool(); }
  c10::SymFloat number() {
    const c10::IValue& value = *next_++;
    if (scalar_ == scalars_.size()) return value.toScalar().toSymFloat();
    const at::Tensor& scalar = scalars_[scalar_++];
    return scalar.is_cpu() ? c10::SymFloat(*scalar.const_data_ptr<double>()) : value.toScalar().toSymFloat();
  }
  AttnCall call() {
    return {
        tensor(),          // q
        tensor(),          // k
        tensor(),          // v
        maybe_tensor(),    // cu_seqlens_q
        maybe_tensor(),    // cu_seqlens_k
        maybe_tensor(),    // sink
        maybe_tensor(),    // alibi_slopes
        maybe_tensor(),    // relative_bias
        maybe_tensor(),    // bias
        maybe_tensor(),    // mask_intervals
        maybe_tensor(),    // mask_extremes
        integer(),         // max_seqlen_q
        integer(),         // max_seqlen_k
        flag(),            // bhsd
        number(),          // softmax_scale
        number(),          // softcap
        flag(),            // causal
        integer(),         // window_left
        integer(),         // window_right
        number(),          // dropout_p
        flag(),            // smooth_softmax
        flag(),            // deterministic
        maybe_integers(),  // origin
    };
  }

  // Replaces the arguments by results.
  template <class... Results>
  void finish(Results&&... results) {
    torch::jit::drop(*stack_, count_);
    torch::jit::push(*stack_, std::forward<Results>(results)...);
  }

 private:
  torch::jit::Stack* stack_;
  size_t count_;
  torch::jit::Stack::iterator next_;
  std::vector<at::Tensor> scalars_;
  size_t scalar_ = 0;  // the next of them
};

// Ends the arguments of an op's overload `call` with what its other overload has last: the floats as tensors, if
// torch.compile has made any of them symbolic.
void push_scalars(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace flashattn_ext
