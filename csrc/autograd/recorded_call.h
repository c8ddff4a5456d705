// RecordedCall: what the derivatives of a call need from it, and the ops that compute them.
#pragma once

#include <array>

#include "autograd/autograd_node.h"
#include "call/attn_call.h"

namespace flashattn_ext {

// Number of differentiable inputs of a call (kDifferentiable). Every list of inputs, gradients or tangents below is in
// their order.
constexpr int kInputs = static_cast<int>(kDifferentiable.size());

using InputFlags = std::array<bool, kInputs>;

class RecordedCall {
 public:
  // From the arguments of an op; `rng_state` is an index, the results are added by set_results().
  RecordedCall(const BoxedCall& call, size_t rng_state);
  // From a node that has called save(). `others` receives the tensors that were saved beside the call.
  RecordedCall(AutogradContext* ctx, variable_list* others, size_t count_of_others);

  // lse_words may be undefined.
  void set_results(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& lse_words);
  // Moves the call into the node.
  template <class SavingNode>
  void save(const SavingNode& node, variable_list others) && {
    tensors_.insert(tensors_.end(), others.begin(), others.end());
    node->ctx_.saved_data["options"] = std::move(options_);
    node->ctx_.save_for_backward(std::move(tensors_));
    node->save_variables_to_ctx();
  }

  const at::Tensor& input(int i) const { return tensors_[kDifferentiable[i].place]; }
  variable_list inputs() const;
  const at::Tensor& out() const { return tensors_[kOut]; }
  const at::Tensor& lse() const { return tensors_[kLse]; }
  // The call without the tangents of forward mode.
  RecordedCall primal() const;

  // The ops, with undefined tensors for None; their autograd kernels record them where gradients are enabled. Results
  // that the call does not have, or that `needs` excludes, are undefined.
  variable_list backward(const at::Tensor& dout, const at::Tensor& dlse, const at::Tensor& centres,
                         InputFlags needs) const;
  std::pair<at::Tensor, at::Tensor> jvp(const variable_list& tangents) const;
  // Sets what jvp() returns for the call without tangents as the tangents of two results, out and lse or tangents of
  // them. Does nothing if no tangent is defined.
  void set_jvp(const variable_list& tangents, const at::Tensor& out, const at::Tensor& lse) const;
  variable_list second(const at::Tensor& dout, const at::Tensor& dlse, const at::Tensor& tout, const at::Tensor& tlse,
                       const variable_list& tangents, InputFlags needs) const;

 private:
  enum { kOut = kCallTensors, kLse, kLseWords, kRngState, kScalars };

  const at::Tensor& lse_words() const { return tensors_[kLseWords]; }
  const at::Tensor& rng_state() const { return tensors_[kRngState]; }
  Stack leading_arguments() const;
  variable_list scalars() const { return {tensors_.begin() + kScalars, tensors_.end()}; }
  variable_list gradients(const Stack& results, InputFlags needs) const;

  variable_list
      tensors_;  // kCallTensors tensors, out, lse, lse_words, rng_state, and the argument `scalars` of the pure ops
  c10::impl::GenericList options_;  // the other arguments that every attention op begins with
};

// Which of the inputs `first` to `first + kInputs` of a node need a gradient.
InputFlags needed_inputs(AutogradContext* ctx, int first);
bool any_of(const InputFlags& flags);

// The tangent of forward mode of a tensor; undefined if it has none, or one that torch knows to be zero.
at::Tensor tangent_of(const at::Tensor& t);
variable_list tangents_of(const variable_list& tensors);
bool any_defined(const variable_list& tensors);

}  // namespace flashattn_ext
