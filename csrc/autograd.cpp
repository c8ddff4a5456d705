// The derivative of the op `forward` is the op `backward`. That has none, and neither have calls with a cache. All of
// them are told to torch's autograd here, so that a call with gradients needs no Python beyond that of a call without.
//
// The kernels below do what those of torch's own operators do: they make a node, run the op below autograd and tie its
// results to the node. torch.func's transforms and torch.compile understand that. They refuse Function::apply of
// custom_function.h, which switches gradients off for the transforms around it too; its CppNode is used here alone,
// because compiled autograd knows how to trace one.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "attn_call.h"

namespace flashattn_ext {

using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::jit::Stack;

// The derivative of a forward: a node of autograd's graph, which names it after this struct.
struct AttentionBackward {
  static constexpr bool is_traceable = true;  // all that is read below is in the context, which can hold symbols
  // Tensors that can have gradients, in the order of the results of the op `backward`.
  static constexpr int kInputs = 7;

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients);
};

// Ops without a derivative have nodes that say what to do instead.
struct AttentionDoubleBackward {
  static constexpr bool is_traceable = false;

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "flashattn_ext has no double backward; use flashattn_ext.attention_reference (plain PyTorch, "
                "differentiable any number of times) for second derivatives");
  }
};
struct DecodeBackward {
  static constexpr bool is_traceable = false;

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "flashattn_ext: calls with a key-value cache have no gradients; use flashattn_ext.forward or "
                "varlen_forward for them, or call under torch.no_grad()");
  }
};

namespace {

at::Tensor tensor_of(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }
c10::IValue value_of(at::Tensor t) { return t.defined() ? c10::IValue(std::move(t)) : c10::IValue(); }

// A boxed call of an op: its arguments are the end of the stack, and its results replace them.
class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack)
      : op_(op), keys_(keys), stack_(stack) {}

  size_t size() const { return op_.schema().arguments().size(); }
  c10::IValue& argument(size_t i) const { return (*stack_)[stack_->size() - size() + i]; }
  at::Tensor tensor(size_t i) const { return tensor_of(argument(i)); }
  at::Tensor result(size_t i) const { return tensor_of((*stack_)[stack_->size() - op_.schema().returns().size() + i]); }

  void run() const { op_.redispatchBoxed(keys_ & c10::after_autograd_keyset, stack_); }
  // Nothing that the op calls makes nodes, and no tensor that it changes counts that.
  void run_untracked() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    op_.redispatchBoxed(keys_ & c10::after_ADInplaceOrView_keyset, stack_);
  }

  // Whether autograd has to know of the call. Tangents of forward-mode differentiation would be lost in silence.
  bool is_differentiated() const {
    bool requires_grad = false;
    for (size_t i = 0; i < size(); ++i) {
      if (!argument(i).isTensor()) continue;
      const at::Tensor& t = argument(i).toTensor();
      requires_grad = requires_grad || t.requires_grad();
      TORCH_CHECK_NOT_IMPLEMENTED(
          !t._fw_grad(0).defined(),
          "flashattn_ext has no forward-mode derivatives (jvp); use flashattn_ext.attention_reference (plain PyTorch)");
    }
    return requires_grad && at::GradMode::is_enabled();
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::DispatchKeySet keys_;
  Stack* const stack_;
};

// Where an argument of `forward` that can have a gradient is among all arguments.
constexpr int kInputPlaces[AttentionBackward::kInputs] = {0, 1, 2, kSink, kAlibiSlopes, kRelativeBias, kBias};
// Arguments of `forward` after those of every op of attention.
enum ForwardArgument { kRngState = kCallTensors + kCallOptions, kKeepsCentres, kScalars };

// torch counts the references to a node itself; older versions have a std::shared_ptr and a function that deletes.
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

// Whether the backward wants the centres of rows (bias.h), without which 16-bit gradients of slopes and of a relative
// bias are coarse.
bool wants_centres(const BoxedCall& call) {
  const at::Tensor slopes = call.tensor(kAlibiSlopes), relative_bias = call.tensor(kRelativeBias);
  return call.tensor(0).element_size() == 2 &&
         ((slopes.defined() && slopes.requires_grad()) || (relative_bias.defined() && relative_bias.requires_grad()));
}

void forward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  if (!call.is_differentiated()) return call.run();

  if (wants_centres(call)) call.argument(kKeepsCentres) = true;
  const bool keeps_centres = call.argument(kKeepsCentres).toBool();
  variable_list inputs;
  for (const int place : kInputPlaces) inputs.push_back(call.tensor(place));
  const auto node = new_node<AttentionBackward>(inputs);
  c10::impl::GenericList options(c10::AnyType::get());
  for (int i = 0; i < kCallOptions; ++i) options.push_back(call.argument(kCallTensors + i));
  node->ctx_.saved_data["options"] = std::move(options);
  variable_list saved, state{call.tensor(kRngState)};
  saved.reserve(kCallTensors + 4);
  for (int i = 0; i < kCallTensors; ++i) saved.push_back(call.tensor(i));
  for (const at::Tensor& scalar : call.argument(kScalars).toTensorVector()) state.push_back(scalar);

  call.run_untracked();
  const at::Tensor out = call.result(0), lse = call.result(1);
  set_history(out, node);
  set_history(lse, node);
  saved.insert(saved.end(), {out, lse, keeps_centres ? call.result(2) : at::Tensor()});
  saved.insert(saved.end(), state.begin(), state.end());
  node->ctx_.save_for_backward(std::move(saved));
  node->save_variables_to_ctx();
}

template <class Refusal>
void without_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  if (!call.is_differentiated()) return call.run();

  variable_list inputs;
  for (size_t i = 0; i < call.size(); ++i) inputs.push_back(call.tensor(i));
  const auto node = new_node<Refusal>(inputs);
  {
    const at::AutoDispatchBelowAutograd below;
    call.run();
  }
  for (size_t i = 0; i < op.schema().returns().size(); ++i) set_history(call.result(i), node);
}

// Places of the caches among the arguments of a call with a cache.
constexpr std::pair<size_t, const char*> kCaches[] = {{1, "k_cache"}, {2, "v_cache"}};

void decode_append(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  for (const auto& [place, name] : kCaches)
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !call.tensor(place).requires_grad(), name,
                      ": expected a tensor that requires no grad, because new keys and values are written to it; call "
                      "under torch.no_grad(), or give ",
                      name, ".detach()");
  without_derivative<DecodeBackward>(op, keys, stack);
}

// Autograd then refuses a backward that has saved a cache as it was before.
void count_versions_of_caches(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  const variable_list caches{call.tensor(kCaches[0].first), call.tensor(kCaches[1].first)};
  call.run_untracked();
  for (const at::Tensor& cache : caches) {
    if (!cache.is_inference()) torch::autograd::increment_version(cache);  // inference tensors have no version
  }
}

c10::OperatorHandle backward_op(const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow("flashattn_ext::backward", overload);
}

}  // namespace

variable_list AttentionBackward::backward(AutogradContext* ctx, const variable_list& gradients) {
  variable_list results(kInputs);
  if (!gradients[0].defined() && !gradients[1].defined()) return results;
  const variable_list saved = ctx->get_saved_variables();
  const auto kept = saved.begin() + kCallTensors;  // out, lse, centres, rng_state, scalars
  const auto options = ctx->saved_data["options"].toList();
  Stack stack;
  for (int i = 0; i < kCallTensors; ++i) stack.push_back(value_of(saved[i]));
  for (int i = 0; i < kCallOptions; ++i) stack.push_back(options.get(i));
  torch::jit::push(stack, value_of(gradients[0]), value_of(gradients[1]), kept[0], kept[1], value_of(kept[2]),
                   ctx->needs_input_grad(4), ctx->needs_input_grad(5), ctx->needs_input_grad(6), value_of(kept[3]));
  if (kept + 4 == saved.end()) {
    static const auto call = backward_op("call");
    call.callBoxed(&stack);
  } else {
    static const auto pure = backward_op("");
    stack.emplace_back(variable_list(kept + 4, saved.end()));
    pure.callBoxed(&stack);
  }
  for (int i = 0; i < kInputs; ++i) {
    if (saved[kInputPlaces[i]].defined() && ctx->needs_input_grad(i)) results[i] = stack[i].toTensor();
  }
  return results;
}

TORCH_LIBRARY_IMPL(flashattn_ext, Autograd, m) {
  m.impl("forward", torch::CppFunction::makeFromBoxedFunction<&forward>());
  m.impl("backward", torch::CppFunction::makeFromBoxedFunction<&without_derivative<AttentionDoubleBackward>>());
  m.impl("decode", torch::CppFunction::makeFromBoxedFunction<&without_derivative<DecodeBackward>>());
  m.impl("decode_append", torch::CppFunction::makeFromBoxedFunction<&decode_append>());
}
TORCH_LIBRARY_IMPL(flashattn_ext, ADInplaceOrView, m) {
  m.impl("decode_append", torch::CppFunction::makeFromBoxedFunction<&count_versions_of_caches>());
}

}  // namespace flashattn_ext
