#include "autograd/recorded_call.h"

#include <algorithm>

namespace flashattn_ext {
namespace {

// The overloads of an op: `call` also takes the symbolic numbers that compiled autograd makes of saved options; the
// pure one takes numbers as tensors, `scalars`.
struct Overloads {
  explicit Overloads(const char* name)
      : call(c10::Dispatcher::singleton().findSchemaOrThrow(name, "call")),
        pure(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")) {}

  void run(variable_list scalars, Stack* stack) const {
    if (scalars.empty()) return call.callBoxed(stack);
    stack->emplace_back(std::move(scalars));
    pure.callBoxed(stack);
  }

  const c10::OperatorHandle call, pure;
};

// The arguments `needs_d...` of an op.
void push_flags(const InputFlags& needs, Stack* stack) {
  for (int i = 0; i < kInputs; ++i) {
    if (kDifferentiable[i].if_needed) stack->emplace_back(needs[i]);
  }
}

}  // namespace

at::Tensor tangent_of(const at::Tensor& t) {
  if (!t.defined()) return {};
  const at::Tensor& tangent = t._fw_grad(0);
  return tangent.defined() && !tangent._is_zerotensor() ? tangent : at::Tensor();
}
variable_list tangents_of(const variable_list& tensors) {
  variable_list tangents;
  for (const at::Tensor& t : tensors) tangents.push_back(tangent_of(t));
  return tangents;
}
bool any_defined(const variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) { return t.defined(); });
}

InputFlags needed_inputs(AutogradContext* ctx, int first) {
  InputFlags needs;
  for (int i = 0; i < kInputs; ++i) needs[i] = ctx->needs_input_grad(first + i);
  return needs;
}
bool any_of(const InputFlags& flags) {
  return std::any_of(flags.begin(), flags.end(), [](bool flag) { return flag; });
}

RecordedCall::RecordedCall(const BoxedCall& call, size_t rng_state) : options_(c10::AnyType::get()) {
  tensors_.reserve(kScalars + 4);  // room for what nodes save beside it
  for (int i = 0; i < kCallTensors; ++i) tensors_.push_back(call.tensor(i));
  tensors_.resize(kRngState);
  tensors_.push_back(call.tensor(rng_state));
  for (const at::Tensor& scalar : call.argument(call.size() - 1).toTensorVector()) tensors_.push_back(scalar);
  options_.reserve(kCallOptions);
  for (int i = 0; i < kCallOptions; ++i) options_.push_back(call.argument(kCallTensors + i));
}

RecordedCall::RecordedCall(AutogradContext* ctx, variable_list* others, size_t count_of_others)
    : tensors_(ctx->get_saved_variables()), options_(ctx->saved_data["options"].toList()) {
  const auto first = tensors_.end() - static_cast<std::ptrdiff_t>(count_of_others);
  others->assign(first, tensors_.end());
  tensors_.erase(first, tensors_.end());
}

void RecordedCall::set_results(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& lse_words) {
  tensors_[kOut] = out;
  tensors_[kLse] = lse;
  tensors_[kLseWords] = lse_words;
}

variable_list RecordedCall::inputs() const {
  variable_list given;
  for (int i = 0; i < kInputs; ++i) given.push_back(input(i));
  return given;
}

RecordedCall RecordedCall::primal() const {
  RecordedCall copy = *this;
  for (at::Tensor& t : copy.tensors_) {
    if (t.defined() && t._fw_grad(0).defined()) t = t._fw_primal(0);
  }
  return copy;
}

Stack RecordedCall::leading_arguments() const {
  Stack stack;
  stack.reserve(kCallTensors + kCallOptions + 24);
  for (int i = 0; i < kCallTensors; ++i) stack.push_back(value_of(tensors_[i]));
  for (int i = 0; i < kCallOptions; ++i) stack.push_back(options_.get(i));
  return stack;
}

variable_list RecordedCall::gradients(const Stack& results, InputFlags needs) const {
  variable_list found(kInputs);
  for (int i = 0; i < kInputs; ++i) {
    if (input(i).defined() && needs[i]) found[i] = results[i].toTensor();
  }
  return found;
}

variable_list RecordedCall::backward(const at::Tensor& dout, const at::Tensor& dlse, const at::Tensor& centres,
                                     InputFlags needs) const {
  static const Overloads op("flashattn_ext::backward");
  Stack stack = leading_arguments();
  torch::jit::push(stack, value_of(dout), value_of(dlse), out(), lse(), value_of(lse_words()), value_of(centres));
  push_flags(needs, &stack);
  stack.push_back(value_of(rng_state()));
  op.run(scalars(), &stack);
  return gradients(stack, needs);
}

std::pair<at::Tensor, at::Tensor> RecordedCall::jvp(const variable_list& tangents) const {
  static const Overloads op("flashattn_ext::jvp");
  Stack stack = leading_arguments();
  torch::jit::push(stack, out(), lse(), value_of(lse_words()), value_of(rng_state()));
  for (const at::Tensor& tangent : tangents) stack.push_back(value_of(tangent));
  op.run(scalars(), &stack);
  return {stack[0].toTensor(), stack[1].toTensor()};
}

void RecordedCall::set_jvp(const variable_list& tangents, const at::Tensor& out, const at::Tensor& lse) const {
  if (!any_defined(tangents)) return;
  const auto [tout, tlse] = primal().jvp(tangents);
  out._set_fw_grad(tout, /*level=*/0, /*is_inplace_op=*/false);
  lse._set_fw_grad(tlse, /*level=*/0, /*is_inplace_op=*/false);
}

variable_list RecordedCall::second(const at::Tensor& dout, const at::Tensor& dlse, const at::Tensor& tout,
                                   const at::Tensor& tlse, const variable_list& tangents, InputFlags needs) const {
  static const Overloads op("flashattn_ext::second");
  Stack stack = leading_arguments();
  torch::jit::push(stack, out(), lse(), value_of(lse_words()), value_of(rng_state()), value_of(dout), value_of(dlse),
                   tout, tlse);
  for (const at::Tensor& tangent : tangents) stack.push_back(value_of(tangent));
  push_flags(needs, &stack);
  op.run(scalars(), &stack);
  return gradients(stack, needs);
}

}  // namespace flashattn_ext
