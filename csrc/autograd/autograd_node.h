// What the autograd kernels of the ops are made of: a boxed call, and a node of autograd's graph.
//
// The kernels work like the autograd kernels of torch's own operators: they create a node, run the op below autograd
// and connect its results to the node, which torch.func's transforms and torch.compile support. They do not support
// Function::apply of custom_function.h, because it also disables gradients for the surrounding transforms; only its
// CppNode is used, which compiled autograd can trace.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace flashattn_ext {

using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::jit::Stack;

inline at::Tensor tensor_of(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }
inline c10::IValue value_of(at::Tensor t) { return t.defined() ? c10::IValue(std::move(t)) : c10::IValue(); }

// A boxed call of an op: its arguments are on top of the stack, and its results replace them.
class BoxedCall {
 public:
  // Which derivatives of the results the call must provide: a node, and tangents of forward mode.
  struct Derivatives {
    bool gradients = false, tangents = false;
    bool none() const { return !gradients && !tangents; }
  };

  BoxedCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack)
      : op_(op), keys_(keys), stack_(stack) {}

  size_t size() const { return op_.schema().arguments().size(); }
  c10::IValue& argument(size_t i) const { return (*stack_)[stack_->size() - size() + i]; }
  at::Tensor tensor(size_t i) const { return tensor_of(argument(i)); }
  at::Tensor result(size_t i) const { return tensor_of((*stack_)[stack_->size() - op_.schema().returns().size() + i]); }

  void run() const { op_.redispatchBoxed(keys_ & c10::after_autograd_keyset, stack_); }
  // Runs the op below autograd and below the version counters.
  void run_untracked() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    op_.redispatchBoxed(keys_ & c10::after_ADInplaceOrView_keyset, stack_);
  }

  Derivatives derivatives() const {
    Derivatives found;
    for (size_t i = 0; i < size(); ++i) {
      if (!argument(i).isTensor()) continue;
      const at::Tensor& t = argument(i).toTensor();
      found.gradients = found.gradients || t.requires_grad();
      found.tangents = found.tangents || t._fw_grad(0).defined();
    }
    found.gradients = found.gradients && at::GradMode::is_enabled();
    return found;
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::DispatchKeySet keys_;
  Stack* const stack_;
};

// Newer versions of torch count the references in the node; older versions use std::shared_ptr with a deleter.
template <class Derivative, class Pointer = decltype(torch::autograd::Edge::function)>
auto new_node(const variable_list& inputs) {
  using Made = CppNode<Derivative>;
  const auto node = [] {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
      return std::shared_ptr<Made>(new Made(), [](auto* made) { deleteNode(made); });
    } else {
      return c10::make_intrusive<Made>();
    }
  }();
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  node->clear_input_metadata();
  node->is_variable_input_.assign(inputs.size(), true);
  node->ctx_.set_materialize_grads(false);
  return node;
}

// Runs an op without a reverse derivative: its node `Refusal` raises in a backward. `no_tangents` is the error for
// tangents of forward mode, which would otherwise be lost silently.
template <class Refusal>
void run_without_derivative(const BoxedCall& call, const char* no_tangents) {
  const BoxedCall::Derivatives wanted = call.derivatives();
  TORCH_CHECK_NOT_IMPLEMENTED(!wanted.tangents, no_tangents);
  if (!wanted.gradients) return call.run();

  variable_list inputs;
  for (size_t i = 0; i < call.size(); ++i) inputs.push_back(call.tensor(i));
  const auto node = new_node<Refusal>(inputs);
  {
    const at::AutoDispatchBelowAutograd below;
    call.run();
  }
  for (size_t i = 0; i < Refusal::kResults; ++i) set_history(call.result(i), node);
}

}  // namespace flashattn_ext
