// The autograd kernels of the ops `forward`, `decode` and `decode_append`. The op `backward` differentiates `forward`,
// in reverse mode, and `jvp` in forward mode; the derivatives of those two are in derivative_autograd.cpp. The decoding
// ops have no derivative. They are registered in C++, so that a call with gradients runs no more Python than a call
// without.
#include <torch/library.h>

#include <utility>

#include "autograd/recorded_call.h"
#include "call/validate.h"

namespace flashattn_ext {

// The derivative of a forward. The node in autograd's graph is named after this struct.
struct AttentionBackward {
  static constexpr bool is_traceable = true;  // apply() reads only the context, which can hold symbolic values

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients);
};

// The node of ops without a derivative, whose error says what to do instead.
struct DecodeBackward {
  static constexpr bool is_traceable = false;
  static constexpr size_t kResults = 2;  // out and lse; the largest logits have no gradient

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "flashattn_ext: calls with a key-value cache have no gradients; use flashattn_ext.forward or "
                "varlen_forward for them, or call under torch.no_grad()");
  }
};

namespace {

// Indices of the arguments of `forward` after the leading arguments of every attention op.
enum ForwardArgument {
  kForwardRngState = kCallTensors + kCallOptions,
  kKeepsLseWords,
  kKeepsCentres,
  kReturnsMaxLogits,
  kScalars
};

// Whether the backward needs the centres of rows (bias.h). Without them, gradients of slopes and of a relative bias are
// inaccurate where keys are far from their rows.
bool keeps_centres(const BoxedCall& call) {
  for (int i = kQkv; i < kCallTensors; ++i) {
    if (!kOptions[i - kQkv].is_of_distance) continue;
    const at::Tensor bias = call.tensor(i);
    if (bias.defined() && bias.requires_grad()) return true;
  }
  return false;
}

void forward_with_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  const BoxedCall::Derivatives wanted = call.derivatives();
  if (wanted.none()) return call.run();
  if (call.tensor(0).scalar_type() == at::kFloat8_e4m3fn) refuse_derivatives_of_fp8(Arguments(op, stack).call());

  // The Ascend kernels read no words.
  const bool keeps_words = !call.tensor(0).is_privateuseone();
  call.argument(kKeepsLseWords) = keeps_words;
  if (wanted.gradients && keeps_centres(call)) call.argument(kKeepsCentres) = true;
  const bool keeps = call.argument(kKeepsCentres).toBool();
  RecordedCall recorded(call, kForwardRngState);
  decltype(new_node<AttentionBackward>({})) node;
  if (wanted.gradients) node = new_node<AttentionBackward>(recorded.inputs());
  call.run_untracked();
  const at::Tensor out = call.result(0), lse = call.result(1);
  recorded.set_results(out, lse, keeps_words ? call.result(2) : at::Tensor());
  if (node) {
    set_history(out, node);
    set_history(lse, node);
  }
  // A node saves its results with their tangents, which are therefore set before.
  if (wanted.tangents) recorded.set_jvp(tangents_of(recorded.inputs()), out, lse);
  if (node) std::move(recorded).save(node, {keeps ? call.result(3) : at::Tensor()});
}

constexpr char kNoTangents[] =
    "flashattn_ext: calls with a key-value cache have no forward-mode derivatives (jvp); use flashattn_ext.forward or "
    "varlen_forward for them";

void decode_without_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  run_without_derivative<DecodeBackward>(BoxedCall(op, keys, stack), kNoTangents);
}

// Indices of the caches among the arguments of a decoding op.
constexpr std::pair<size_t, const char*> kCaches[] = {{1, "k_cache"}, {2, "v_cache"}};

void decode_append_without_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  for (const auto& [place, name] : kCaches)
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled() || !call.tensor(place).requires_grad(), name,
                      ": expected a tensor that requires no grad, because new keys and values are written to it; call "
                      "under torch.no_grad(), or give ",
                      name, ".detach()");
  decode_without_gradients(op, keys, stack);
}

// Bumps the version counters, so that autograd refuses a backward that has saved the old contents of a cache.
void count_versions_of_caches(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const BoxedCall call(op, keys, stack);
  const variable_list caches{call.tensor(kCaches[0].first), call.tensor(kCaches[1].first)};
  call.run_untracked();
  for (const at::Tensor& cache : caches) {
    if (!cache.is_inference()) torch::autograd::increment_version(cache);  // inference tensors have no version
  }
}

}  // namespace

variable_list AttentionBackward::backward(AutogradContext* ctx, const variable_list& gradients) {
  if (!gradients[0].defined() && !gradients[1].defined()) return variable_list(kInputs);
  variable_list centres;
  const RecordedCall call(ctx, &centres, 1);
  return call.backward(gradients[0], gradients[1], centres[0], needed_inputs(ctx, 0));
}

TORCH_LIBRARY_IMPL(flashattn_ext, Autograd, m) {
  m.impl("forward", torch::CppFunction::makeFromBoxedFunction<&forward_with_gradients>());
  m.impl("decode", torch::CppFunction::makeFromBoxedFunction<&decode_without_gradients>());
  m.impl("decode_append", torch::CppFunction::makeFromBoxedFunction<&decode_append_without_gradients>());
}
TORCH_LIBRARY_IMPL(flashattn_ext, ADInplaceOrView, m) {
  m.impl("decode_append", torch::CppFunction::makeFromBoxedFunction<&count_versions_of_caches>());
}

}  // namespace flashattn_ext
