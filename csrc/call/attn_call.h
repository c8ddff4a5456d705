// AttnCall: the arguments of a call as the ops receive them, in the order of options.def.
//
// Sizes and numbers have symbolic types because torch.compile traces the ops with unknown sizes; in a call that runs
// they hold plain values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "call/options.h"
#include "rules/bias.h"

namespace flashattn_ext {

using torch::jit::Stack;

// The leading arguments of the ops `forward` and `backward`.
inline std::string call_schema() {
  return "Tensor q, Tensor k, Tensor v" + schema_of_options(Takers::kForwardBackward);
}

// Dense tensors are [B, S, H, D], or [B, H, S, D] with bhsd; varlen calls have cu_seqlens and tensors [total, H, D].
// options.def describes the other fields.
struct AttnCall {
  at::Tensor q, k, v;
#define CALL_TENSOR(name, dims, takers, check) std::optional<at::Tensor> name;
#define CALL_LEARNED CALL_TENSOR
#define CALL_BIAS CALL_TENSOR
#define CALL_INTEGER(name, default_value, takers, accepts, expected) c10::SymInt name = default_value;
#define CALL_NUMBER(name, default_value, takers, accepts, expected) c10::SymFloat name = default_value;
#define CALL_FLAG(name, default_value, takers) bool name = default_value;
#define CALL_INTEGERS(name, takers, check) std::optional<std::vector<c10::SymInt>> name;
#define CALL_DTYPE(name, takers, check) std::optional<at::ScalarType> name;
#include "call/options.def"

  bool is_varlen() const { return cu_seqlens_q.has_value(); }
  int64_t row_dim() const { return is_varlen() ? 0 : (bhsd ? 2 : 1); }
  int64_t head_axis() const { return is_varlen() || bhsd ? 1 : 2; }
  c10::SymInt batch() const { return is_varlen() ? cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0); }
  // Whether keys and values are fp8; q then is fp8 as well or, in a decoding call, bfloat16.
  bool is_fp8() const { return k.scalar_type() == at::kFloat8_e4m3fn; }
  at::ScalarType dtype_of_out() const {
    if (out_dtype) return *out_dtype;
    return q.scalar_type() == at::kFloat8_e4m3fn ? at::kBFloat16 : q.scalar_type();
  }
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
  // The largest logit of each head: [B, Hq], or [sequences, Hq].
  std::vector<c10::SymInt> max_logits_shape() const { return {batch(), q.sym_size(head_axis())}; }
  // The shape of `count` numbers of each row: [B, Hq, Sq, count], or [Hq, total_q, count]. The words of its log-sum-exp
  // (lse_words.h) are 2, its centres (bias.h) kCentres.
  std::vector<c10::SymInt> row_numbers_shape(int64_t count) const {
    std::vector<c10::SymInt> shape = lse_shape();
    shape.emplace_back(count);
    return shape;
  }
};

// The further arguments of the backward.
struct BackwardCall {
  std::optional<at::Tensor> dout, dlse;
  at::Tensor out, lse;
  // lse_words.h and bias.h: as the forward returned them. None where the caller has no more than lse.
  std::optional<at::Tensor> lse_words, centres;
  // needs_dNAME: false if that gradient is not computed.
#define CALL_BIAS(name, dims, takers, check) bool needs_d##name;
#include "call/options.def"
};

// Reads the arguments of a boxed op in order.
//
// `scalars` is empty unless torch.compile made a float symbolic. Then it holds one float64 CPU tensor for each
// Scalar of the schema, in schema order, and the Scalars themselves are meaningless. While a graph is traced the
// tensors have no values, and number() returns the meaningless Scalar.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, Stack* stack)
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
  std::optional<at::ScalarType> maybe_dtype() { return (next_++)->toOptional<at::ScalarType>(); }
  c10::SymFloat number() {
    const c10::IValue& value = *next_++;
    if (scalar_ == scalars_.size()) return value.toScalar().toSymFloat();
    const at::Tensor& scalar = scalars_[scalar_++];
    return scalar.is_cpu() ? c10::SymFloat(*scalar.const_data_ptr<double>()) : value.toScalar().toSymFloat();
  }
  // Reads the options that an op takes; the others keep their defaults.
  template <Takers op>
  void options(AttnCall* c) {
    const auto takes = [](Takers takers) { return op == Takers::kForwardBackward || takers == Takers::kEveryOp; };
#define CALL_TENSOR(name, dims, takers, check) \
  if (takes(Takers::takers)) c->name = maybe_tensor();
#define CALL_LEARNED CALL_TENSOR
#define CALL_BIAS CALL_TENSOR
#define CALL_INTEGER(name, default_value, takers, accepts, expected) \
  if (takes(Takers::takers)) c->name = integer();
#define CALL_NUMBER(name, default_value, takers, accepts, expected) \
  if (takes(Takers::takers)) c->name = number();
#define CALL_FLAG(name, default_value, takers) \
  if (takes(Takers::takers)) c->name = flag();
#define CALL_INTEGERS(name, takers, check) \
  if (takes(Takers::takers)) c->name = maybe_integers();
#define CALL_DTYPE(name, takers, check) \
  if (takes(Takers::takers)) c->name = maybe_dtype();
#include "call/options.def"
  }
  AttnCall call() {
    AttnCall c;
    c.q = tensor();
    c.k = tensor();
    c.v = tensor();
    options<Takers::kForwardBackward>(&c);
    return c;
  }
  BackwardCall backward_call() {
    BackwardCall b;
    b.dout = maybe_tensor();
    b.dlse = maybe_tensor();
    b.out = tensor();
    b.lse = tensor();
    b.lse_words = maybe_tensor();
    b.centres = maybe_tensor();
#define CALL_BIAS(name, dims, takers, check) b.needs_d##name = flag();
#include "call/options.def"
    return b;
  }

  // Replaces the arguments by results.
  template <class... Results>
  void finish(Results&&... results) {
    torch::jit::drop(*stack_, count_);
    torch::jit::push(*stack_, std::forward<Results>(results)...);
  }

 private:
  Stack* stack_;
  size_t count_;
  Stack::iterator next_;
  std::vector<at::Tensor> scalars_;
  size_t scalar_ = 0;  // index of the next one
};

// Appends the last argument of the pure overload, `scalars`, to the arguments of the overload `call`: the floats as
// tensors if torch.compile has made any of them symbolic, else an empty list.
void push_scalars(const c10::OperatorHandle& op, Stack* stack);

// The overload `call` of the op kPure, where it takes the arguments of that op but for `scalars`. It redispatches with
// its own dispatch keys, so that both share one range in a profile.
template <const char* kPure>
void call_of(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static const c10::OperatorHandle pure = c10::Dispatcher::singleton().findSchemaOrThrow(kPure, "");
  push_scalars(op, stack);
  pure.redispatchBoxed(keys, stack);
}

// Registers an op that is no overload `call` for every device, also for those that this build has no backend for: its
// error says so. torch_npu uses PrivateUse1.
template <c10::BoxedKernel::BoxedKernelFunction* kKernel>
void implement(torch::Library& m, const char* op) {
  using Key = c10::DispatchKey;
  for (const Key key : {Key::CPU, Key::Meta, Key::CUDA, Key::PrivateUse1})
    m.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<kKernel>()));
}
// Registers an overload `call`, also under torch.vmap: the batching rules of the pure ops are in vmap.py.
template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* kKernel>
void implement_call(torch::Library& m, const char* overload) {
  for (const auto key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::FuncTorchBatched})
    m.impl(overload, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<kKernel>()));
}

}  // namespace flashattn_ext
