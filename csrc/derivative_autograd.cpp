// The autograd kernels of the ops `backward`, `jvp` and `second`: derivatives of order two (docs/derivatives.md).
//
// Let J be the op jvp (tangents of out and lse), B the op backward (its transpose) and H the op second (the Hessian of
// <dout, out> + <dlse, lse> times tangents of the inputs, a symmetric matrix).
//
// - reverse mode of B: J is the gradient of dout and dlse, H that of the inputs.
// - forward mode of B: B of the tangents of dout and dlse, plus H.
// - reverse mode of J: B is the gradient of the tangents, H that of the inputs.
//
// Where out and lse are arguments, they count as functions of the other inputs: these are total derivatives, and out
// and lse have no derivatives of their own. No op computes a derivative of H, which would be of order three, or the
// tangent of J for tangents of the inputs.
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "recorded_call.h"

namespace flashattn_ext {

// The nodes in autograd's graph are named after these structs.
struct AttentionDoubleBackward {
  static constexpr bool is_traceable = true;  // apply() reads only the context, which can hold symbolic values

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients);
};
struct AttentionJvpBackward {
  static constexpr bool is_traceable = true;

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients);
};

constexpr char kNoThirdDerivative[] =
    "flashattn_ext has no third derivatives; use flashattn_ext.attention_reference (plain PyTorch, differentiable any "
    "number of times) for them";

struct AttentionThirdDerivative {
  static constexpr bool is_traceable = false;
  static constexpr size_t kResults = kInputs;

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, kNoThirdDerivative);
  }
};

namespace {

constexpr size_t kOptionsEnd = kCallTensors + kCallOptions;
// Indices of the arguments of the ops after the leading arguments of every attention op.
enum BackwardArgument {
  kDout = kOptionsEnd,
  kDlse,
  kOut,
  kLse,
  kLseWords,
  kCentres,
  kNeeds,
  kBackwardRngState = kNeeds + kBiases
};
enum JvpArgument { kJvpOut = kOptionsEnd, kJvpLse, kJvpLseWords, kJvpRngState, kTangents };

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a.add(b); }

at::Tensor primal_of(const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined() ? t._fw_primal(0) : t; }

// Which gradients a call of `backward` computes.
InputFlags flags_of(const BoxedCall& call) {
  InputFlags needs;
  size_t flag = kNeeds;
  for (int i = 0; i < kInputs; ++i) needs[i] = !kDifferentiable[i].if_needed || call.argument(flag++).toBool();
  return needs;
}

// Sets the tangents of the results of `backward`.
void set_tangents_of_gradients(const BoxedCall& results, const RecordedCall& call, const at::Tensor& dout,
                               const at::Tensor& dlse, const at::Tensor& centres, InputFlags needs) {
  const variable_list tangents = tangents_of(call.inputs());
  const at::Tensor tdout = tangent_of(dout), tdlse = tangent_of(dlse);
  const RecordedCall primal = call.primal();
  variable_list of_inputs(kInputs), of_gradients(kInputs);
  if (any_defined(tangents)) {
    // The forward has computed these two if it ran with the same tangents.
    at::Tensor tout = tangent_of(call.out()), tlse = tangent_of(call.lse());
    if (!tout.defined() || !tlse.defined()) std::tie(tout, tlse) = primal.jvp(tangents);
    of_inputs = primal.second(primal_of(dout), primal_of(dlse), tout, tlse, tangents, needs);
  }
  if (tdout.defined() || tdlse.defined()) of_gradients = primal.backward(tdout, tdlse, primal_of(centres), needs);
  for (int i = 0; i < kInputs; ++i) {
    const at::Tensor tangent = sum_of(of_inputs[i], of_gradients[i]);
    if (tangent.defined()) results.result(i)._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  }
}

void backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  const BoxedCall::Derivatives wanted = call.derivatives();
  if (wanted.none()) return call.run();

  RecordedCall recorded(call, kBackwardRngState);
  recorded.set_results(call.tensor(kOut), call.tensor(kLse), call.tensor(kLseWords));
  const at::Tensor dout = call.tensor(kDout), dlse = call.tensor(kDlse), centres = call.tensor(kCentres);
  const InputFlags needs = flags_of(call);
  call.run_untracked();
  if (wanted.tangents) set_tangents_of_gradients(call, recorded, dout, dlse, centres, needs);
  if (!wanted.gradients) return;
  variable_list inputs = recorded.inputs();
  inputs.insert(inputs.end(), {dout, dlse});
  const auto node = new_node<AttentionDoubleBackward>(inputs);
  for (int i = 0; i < kInputs; ++i) set_history(call.result(i), node);
  node->ctx_.saved_data["needs"] = c10::List<bool>(c10::ArrayRef<bool>(needs));
  std::move(recorded).save(node, {dout, dlse});
}

// Sets the tangents of the results of `jvp`, which is linear in the tangents that it takes.
void set_tangents_of_tangents(const BoxedCall& results, const RecordedCall& call, const variable_list& given) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !any_defined(tangents_of(call.inputs())),
      "flashattn_ext has no third derivatives and no forward-mode derivatives of forward-mode derivatives (a jvp of a "
      "jvp); take one of the two in reverse mode, as torch.func.hessian does (jacfwd of jacrev), or use "
      "flashattn_ext.attention_reference (plain PyTorch, differentiable any number of times)");
  const variable_list tangents = tangents_of(given);
  if (!any_defined(tangents)) return;
  const auto [tout, tlse] = call.primal().jvp(tangents);
  results.result(0)._set_fw_grad(tout, /*level=*/0, /*is_inplace_op=*/false);
  results.result(1)._set_fw_grad(tlse, /*level=*/0, /*is_inplace_op=*/false);
}

void jvp(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  const BoxedCall::Derivatives wanted = call.derivatives();
  if (wanted.none()) return call.run();

  RecordedCall recorded(call, kJvpRngState);
  recorded.set_results(call.tensor(kJvpOut), call.tensor(kJvpLse), call.tensor(kJvpLseWords));
  variable_list tangents;
  for (int i = 0; i < kInputs; ++i) tangents.push_back(call.tensor(kTangents + i));
  call.run_untracked();
  if (wanted.tangents) set_tangents_of_tangents(call, recorded, tangents);
  if (!wanted.gradients) return;
  variable_list inputs = recorded.inputs();
  inputs.insert(inputs.end(), tangents.begin(), tangents.end());
  const auto node = new_node<AttentionJvpBackward>(inputs);
  const at::Tensor tout = call.result(0), tlse = call.result(1);
  set_history(tout, node);
  set_history(tlse, node);
  tangents.insert(tangents.end(), {tout, tlse});
  std::move(recorded).save(node, std::move(tangents));
}

void second(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  run_without_derivative<AttentionThirdDerivative>(BoxedCall(op, keys, stack), kNoThirdDerivative);
}

}  // namespace

variable_list AttentionDoubleBackward::backward(AutogradContext* ctx, const variable_list& gradients) {
  variable_list results(kInputs + 2), others, tangents(kInputs);
  const RecordedCall call(ctx, &others, 2);
  const at::Tensor &dout = others[0], &dlse = others[1];
  const auto needed = ctx->saved_data["needs"].toBoolList();
  for (int i = 0; i < kInputs; ++i) {
    // A gradient that was not requested is an empty result, whose cotangent says nothing about the input.
    if (call.input(i).defined() && needed.get(i)) tangents[i] = gradients[i];
  }
  if (!any_defined(tangents)) return results;
  const auto [tout, tlse] = call.jvp(tangents);
  const InputFlags needs = needed_inputs(ctx, 0);
  if (any_of(needs)) {
    variable_list of_inputs = call.second(dout, dlse, tout, tlse, tangents, needs);
    std::move(of_inputs.begin(), of_inputs.end(), results.begin());
  }
  if (ctx->needs_input_grad(kInputs)) results[kInputs] = tout;
  if (ctx->needs_input_grad(kInputs + 1)) results[kInputs + 1] = tlse;
  return results;
}

variable_list AttentionJvpBackward::backward(AutogradContext* ctx, const variable_list& gradients) {
  variable_list results(2 * kInputs);
  const at::Tensor &dout = gradients[0], &dlse = gradients[1];
  if (!dout.defined() && !dlse.defined()) return results;
  variable_list others;
  const RecordedCall call(ctx, &others, kInputs + 2);
  const variable_list tangents(others.begin(), others.begin() + kInputs);
  const InputFlags of_inputs = needed_inputs(ctx, 0), of_tangents = needed_inputs(ctx, kInputs);
  if (any_of(of_inputs)) {
    variable_list found = call.second(dout, dlse, others[kInputs], others[kInputs + 1], tangents, of_inputs);
    std::move(found.begin(), found.end(), results.begin());
  }
  if (any_of(of_tangents)) {
    variable_list found = call.backward(dout, dlse, {}, of_tangents);
    std::move(found.begin(), found.end(), results.begin() + kInputs);
  }
  return results;
}

TORCH_LIBRARY_IMPL(flashattn_ext, Autograd, m) {
  m.impl("backward", torch::CppFunction::makeFromBoxedFunction<&backward>());
  m.impl("jvp", torch::CppFunction::makeFromBoxedFunction<&jvp>());
  m.impl("second", torch::CppFunction::makeFromBoxedFunction<&second>());
}

}  // namespace flashattn_ext
