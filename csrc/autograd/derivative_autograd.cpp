// The autograd kernels of the ops `backward`, `jvp` and `second`: derivatives of order two (docs/derivatives.md).
//
// Let J be the op jvp (tangents of out and lse), B the op backward (its transpose) and H the op second (the Hessian of
// <dout, out> + <dlse, lse> times tangents of the inputs, a symmetric matrix).
//
// - reverse mode of B: J is the gradient of dout and dlse, H that of the inputs.
// - forward mode of B: B of the tangents of dout and dlse, plus H.
// - reverse mode of J: B is the gradient of the tangents, H that of the inputs.
// - reverse mode of H: H is the gradient of the tangents.
// - forward mode of H: H of the tangents of the tangents, plus H of the tangents of dout and dlse.
//
// Where out, lse, tout and tlse are arguments, they count as functions of the other inputs: these are total
// derivatives, and the four have no derivatives of their own.
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "autograd/recorded_call.h"

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

struct AttentionSecondBackward {
  static constexpr bool is_traceable = true;

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients);
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
  kRowCentres,
  kNeeds,
  kBackwardRngState = kNeeds + kBiases
};
enum JvpArgument { kJvpOut = kOptionsEnd, kJvpLse, kJvpLseWords, kJvpRngState, kTangents };
enum SecondArgument {
  kSecondOut = kOptionsEnd,
  kSecondLse,
  kSecondLseWords,
  kSecondRngState,
  kSecondDout,
  kSecondDlse,
  kTout,
  kTlse,
  kSecondTangents,
  kSecondNeeds = kSecondTangents + kInputs
};

constexpr char kNoThirdDerivative[] =
    "flashattn_ext has no third derivatives; use flashattn_ext.attention_reference (plain PyTorch, differentiable any "
    "number of times) for them. A product of second derivatives and a vector has a gradient with respect to the vector "
    "only, as torch.autograd.functional.hvp takes it, not with respect to the inputs of the attention";
constexpr char kNoSecondTangents[] =
    "flashattn_ext has no forward-mode derivatives of forward-mode derivatives (a jvp of a jvp), and the gradient of a "
    "product of second derivatives and a vector with respect to the gradient of out or lse would be one; use "
    "flashattn_ext.attention_reference (plain PyTorch, differentiable any number of times)";

// The arguments of `second` beside the call.
struct SecondTensors {
  at::Tensor dout, dlse, tout, tlse;
  variable_list tangents;
};

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a.add(b); }

at::Tensor primal_of(const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined() ? t._fw_primal(0) : t; }

// Which gradients a call of `backward` or `second` computes, by its arguments from `flag` on.
InputFlags flags_of(const BoxedCall& call, size_t flag) {
  InputFlags needs;
  for (int i = 0; i < kInputs; ++i) needs[i] = !kDifferentiable[i].if_needed || call.argument(flag++).toBool();
  return needs;
}

// Sets the sums of two lists, whose tensors may be undefined, as the tangents of the results of an op.
void set_sums(const BoxedCall& results, const variable_list& a, const variable_list& b) {
  for (int i = 0; i < kInputs; ++i) {
    const at::Tensor tangent = sum_of(a[i], b[i]);
    if (tangent.defined()) results.result(i)._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  }
}

// The cotangents of the results of `backward` or `second`. A gradient that was not requested is an empty result, whose
// cotangent says nothing about the input.
variable_list cotangents(const RecordedCall& call, AutogradContext* ctx, const variable_list& gradients) {
  variable_list given(kInputs);
  const auto needed = ctx->saved_data["needs"].toBoolList();
  for (int i = 0; i < kInputs; ++i) {
    if (call.input(i).defined() && needed.get(i)) given[i] = gradients[i];
  }
  return given;
}

// H of `tangents`. out and lse: results of the forward, or of jvp, that has computed the two other tangents that H
// takes if it ran with the same tangents.
variable_list second_of(const RecordedCall& primal, const at::Tensor& dout, const at::Tensor& dlse,
                        const at::Tensor& out, const at::Tensor& lse, const variable_list& tangents, InputFlags needs) {
  at::Tensor tout = tangent_of(out), tlse = tangent_of(lse);
  if (!tout.defined() || !tlse.defined()) std::tie(tout, tlse) = primal.jvp(tangents);
  return primal.second(primal_of(dout), primal_of(dlse), tout, tlse, tangents, needs);
}

// Sets the tangents of the results of `backward`.
void set_tangents_of_gradients(const BoxedCall& results, const RecordedCall& call, const at::Tensor& dout,
                               const at::Tensor& dlse, const at::Tensor& centres, InputFlags needs) {
  const variable_list tangents = tangents_of(call.inputs());
  const at::Tensor tdout = tangent_of(dout), tdlse = tangent_of(dlse);
  const RecordedCall primal = call.primal();
  variable_list of_inputs(kInputs), of_gradients(kInputs);
  if (any_defined(tangents)) of_inputs = second_of(primal, dout, dlse, call.out(), call.lse(), tangents, needs);
  if (tdout.defined() || tdlse.defined()) of_gradients = primal.backward(tdout, tdlse, primal_of(centres), needs);
  set_sums(results, of_inputs, of_gradients);
}

void backward_with_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  const BoxedCall::Derivatives wanted = call.derivatives();
  if (wanted.none()) return call.run();

  RecordedCall recorded(call, kBackwardRngState);
  recorded.set_results(call.tensor(kOut), call.tensor(kLse), call.tensor(kLseWords));
  const at::Tensor dout = call.tensor(kDout), dlse = call.tensor(kDlse), centres = call.tensor(kRowCentres);
  const InputFlags needs = flags_of(call, kNeeds);
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
  call.set_jvp(tangents_of(given), results.result(0), results.result(1));
}

void jvp_with_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
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

// Sets the tangents of the results of `second`, which is linear in the tangents that it takes, and in dout and dlse.
void set_tangents_of_second(const BoxedCall& results, const RecordedCall& call, const SecondTensors& s,
                            InputFlags needs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!any_defined(tangents_of(call.inputs())), kNoThirdDerivative);
  const variable_list tangents = tangents_of(s.tangents);
  const at::Tensor tdout = tangent_of(s.dout), tdlse = tangent_of(s.dlse);
  const RecordedCall primal = call.primal();
  variable_list of_tangents(kInputs), of_gradients(kInputs);
  if (any_defined(tangents)) of_tangents = second_of(primal, s.dout, s.dlse, s.tout, s.tlse, tangents, needs);
  if (tdout.defined() || tdlse.defined()) {
    variable_list given;
    for (const at::Tensor& tangent : s.tangents) given.push_back(primal_of(tangent));
    of_gradients = primal.second(tdout, tdlse, primal_of(s.tout), primal_of(s.tlse), given, needs);
  }
  set_sums(results, of_tangents, of_gradients);
}

void second_with_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  const BoxedCall::Derivatives wanted = call.derivatives();
  if (wanted.none()) return call.run();

  RecordedCall recorded(call, kSecondRngState);
  recorded.set_results(call.tensor(kSecondOut), call.tensor(kSecondLse), call.tensor(kSecondLseWords));
  SecondTensors s{call.tensor(kSecondDout), call.tensor(kSecondDlse), call.tensor(kTout), call.tensor(kTlse), {}};
  for (int i = 0; i < kInputs; ++i) s.tangents.push_back(call.tensor(kSecondTangents + i));
  const InputFlags needs = flags_of(call, kSecondNeeds);
  call.run_untracked();
  if (wanted.tangents) set_tangents_of_second(call, recorded, s, needs);
  if (!wanted.gradients) return;
  variable_list inputs = recorded.inputs();
  inputs.insert(inputs.end(), {s.dout, s.dlse});
  inputs.insert(inputs.end(), s.tangents.begin(), s.tangents.end());
  const auto node = new_node<AttentionSecondBackward>(inputs);
  for (int i = 0; i < kInputs; ++i) set_history(call.result(i), node);
  node->ctx_.saved_data["needs"] = c10::List<bool>(c10::ArrayRef<bool>(needs));
  std::move(recorded).save(node, {s.dout, s.dlse});
}

}  // namespace

variable_list AttentionDoubleBackward::backward(AutogradContext* ctx, const variable_list& gradients) {
  variable_list results(kInputs + 2), others;
  const RecordedCall call(ctx, &others, 2);
  const at::Tensor &dout = others[0], &dlse = others[1];
  const variable_list tangents = cotangents(call, ctx, gradients);
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

variable_list AttentionSecondBackward::backward(AutogradContext* ctx, const variable_list& gradients) {
  constexpr int kDoutInput = kInputs, kTangentInput = kInputs + 2;  // in the order of the node's inputs
  variable_list results(kTangentInput + kInputs), others;
  const RecordedCall call(ctx, &others, 2);
  const at::Tensor &dout = others[0], &dlse = others[1];
  const variable_list tangents = cotangents(call, ctx, gradients);
  if (!any_defined(tangents)) return results;
  TORCH_CHECK_NOT_IMPLEMENTED(!any_of(needed_inputs(ctx, 0)), kNoThirdDerivative);
  TORCH_CHECK_NOT_IMPLEMENTED(!ctx->needs_input_grad(kDoutInput) && !ctx->needs_input_grad(kDoutInput + 1),
                              kNoSecondTangents);
  const InputFlags needs = needed_inputs(ctx, kTangentInput);
  if (!any_of(needs)) return results;
  // H is a symmetric matrix: the cotangents of its results are the tangents of another call.
  const auto [tout, tlse] = call.jvp(tangents);
  variable_list found = call.second(dout, dlse, tout, tlse, tangents, needs);
  std::move(found.begin(), found.end(), results.begin() + kTangentInput);
  return results;
}

TORCH_LIBRARY_IMPL(flashattn_ext, Autograd, m) {
  m.impl("backward", torch::CppFunction::makeFromBoxedFunction<&backward_with_gradients>());
  m.impl("jvp", torch::CppFunction::makeFromBoxedFunction<&jvp_with_gradients>());
  m.impl("second", torch::CppFunction::makeFromBoxedFunction<&second_with_gradients>());
}

}  // namespace flashattn_ext
