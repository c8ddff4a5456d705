// The ops of torch.ops.flashattn_ext: validate, allocate, fill AttnParams, call the Backend. The decoding ops are in
// decode_op.cpp.
//
// `forward`, `backward` and `dropout_mask` are pure: the dropout mask is a function of their argument rng_state. Python
// calls their overloads `call`, which draw rng_state with a torch operator, so that compilers, checkpointing and CUDA
// graphs see the randomness, and which turn floats that torch.compile keeps symbolic into tensors.
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "call/call_params.h"
#include "call/layout_warning.h"
#include "call/validate.h"
#include "rules/dropout.h"
#include "rules/score.h"
#include "tensors/mask_extremes.h"
#include "tensors/op_device.h"

namespace flashattn_ext {
namespace {

// Chooses the backend of a call and fills the params that decide it; nullptr for meta tensors, which includes the fake
// tensors of a traced graph: their ops only allocate results.
const Backend* backend_of(const AttnCall& c, const Device& device, bool backward, AttnParams* p) {
  if (c.q.is_meta()) return nullptr;
  set_options(c, p);
  const auto refusal = [&](const Backend& backend) { return backend.supports(*p, backward); };
  const Backend& backend = backend_supporting(device, c.q, p, refusal);
  check_formats(backend, {{"q", &c.q}, {"k", &c.k}, {"v", &c.v}});
  return &backend;
}

// --- the pure ops ---

at::Tensor new_tensor(const AttnCall& c, c10::SymIntArrayRef shape, at::ScalarType dtype) {
  return at::empty_symint(shape, c.q.options().dtype(dtype));
}
// The words of rows whose forward wrote lse alone.
void set_words_of_lse(const at::Tensor& lse, const at::Tensor& lse_words) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  lse_words.select(-1, 0).copy_(lse.mul(kLog2E<double>).masked_fill_(lse.eq(-kInfinity), kInfinity));
  lse_words.select(-1, 1).zero_();
}
at::Tensor new_like(const AttnCall& c, const at::Tensor& t) { return new_tensor(c, t.sym_sizes(), c.q.scalar_type()); }

void forward(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  AttnCall c = arguments.call();
  const std::optional<at::Tensor> given_state = arguments.maybe_tensor();
  const bool keeps_lse_words = arguments.flag(), keeps_centres = arguments.flag(),
             returns_max_logits = arguments.flag();
  validate(c);
  validate_rng_state(given_state, c.dropout_p, c.q);
  const Device device(c.q);
  AttnParams p;
  const at::Tensor row_maxima = new_row_maxima(c, returns_max_logits && !c.q.is_meta(), &p);
  const Backend* const backend = backend_of(c, device, false, &p);
  const at::Tensor out = new_tensor(c, c.out_shape(), c.dtype_of_out());
  const at::Tensor lse = new_tensor(c, c.lse_shape(), c.statistics_dtype());
  const auto kept = [&c](bool keeps, const std::vector<c10::SymInt>& shape) {
    return keeps ? new_tensor(c, shape, c.statistics_dtype()) : new_tensor(c, {0}, c.statistics_dtype());
  };
  const at::Tensor lse_words = kept(keeps_lse_words, c.row_numbers_shape(2));
  const at::Tensor centres = kept(keeps_centres, c.row_numbers_shape(kCentres));
  if (!backend) return arguments.finish(out, lse, lse_words, centres, largest_of_rows_meta(c, returns_max_logits));

  c = readable(std::move(c), *backend);
  const at::Tensor rng_state = given_state ? given_state->contiguous() : at::Tensor();
  set_memory(c, out, lse, rng_state, &p);
  if (keeps_lse_words && backend->writes_lse_words) p.lse_words = row_numbers_view_of(c, lse_words);
  if (keeps_centres && backend->writes_centres) {
    p.centres = row_numbers_view_of(c, centres);
  } else if (keeps_centres) {
    centres.zero_();
  }
  const at::Tensor workspace = workspace_for(c.q, backend->forward_workspace_bytes(p), &p);
  if (!backend->sets_unowned_rows) {
    set_rows_of_no_sequence(c, out, lse);
    if (p.centres.data) set_rows_of_no_sequence(c.cu_seqlens_q, centres, 1, 0);
    if (p.lse_words.data)
      set_rows_of_no_sequence(c.cu_seqlens_q, lse_words, 1, std::numeric_limits<double>::infinity());
  }
  backend->forward(p);
  if (keeps_lse_words && !backend->writes_lse_words) set_words_of_lse(lse, lse_words);
  arguments.finish(out, lse, lse_words, centres, largest_of_rows(c, row_maxima, p, *backend));
}

void backward(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const AttnCall given = arguments.call();
  const BackwardCall b = arguments.backward_call();
  const std::optional<at::Tensor> given_state = arguments.maybe_tensor();
  validate(given, b);
  validate_rng_state(given_state, given.dropout_p, given.q);
  const Device device(given.q);
  AttnGradParams p;
  const Backend* const backend = backend_of(given, device, true, &p);
  if (backend) check_formats(*backend, {{"dout", b.dout ? &*b.dout : &b.out}, {"out", &b.out}});
  const at::Tensor dq = new_like(given, given.q), dk = new_like(given, given.k), dv = new_like(given, given.v);
  const c10::SymInt sinks = given.sink ? given.sink->sym_size(0) : 0;
  const at::Tensor dsink = new_tensor(given, {sinks}, given.statistics_dtype());
  const auto finish = [&](const BiasGradients& biases) {
    arguments.finish(dq, dk, dv
#define CALL_LEARNED(name, dims, takers, check) \
  , d##name.to(given.name ? given.name->scalar_type() : d##name.scalar_type())
#define CALL_BIAS(name, dims, takers, check) , biases.name
#include "call/options.def"
    );
  };
  if (!backend) return finish(finished_meta(given, b));

  const AttnCall c = readable(given, *backend);
  const at::Tensor out = with_readable_rows(b.out, c.row_dim(), *backend);
  const at::Tensor lse = with_readable_rows(b.lse, -1, *backend);
  const at::Tensor given_dout = b.dout ? *b.dout : at::zeros({1}, c.q.options()).expand(out.sizes());
  const at::Tensor dout = with_readable_rows(given_dout, c.row_dim(), *backend);
  const at::Tensor rng_state = given_state ? given_state->contiguous() : at::Tensor();
  set_memory(c, out, lse, rng_state, &p);
  at::Tensor dlse;
  if (b.dlse) {
    dlse = with_readable_rows(*b.dlse, -1, *backend);
    p.dlse = row_view_of(c, dlse);
  }
  const at::Tensor lse_words = b.lse_words ? b.lse_words->contiguous() : at::Tensor();
  if (b.lse_words) p.lse_words = row_numbers_view_of(c, lse_words);
  const at::Tensor centres = b.centres ? b.centres->contiguous() : at::Tensor();
  if (b.centres) p.centres = row_numbers_view_of(c, centres);
  p.dout = view_of(c, dout);
  p.dq = view_of(c, dq);
  p.dk = view_of(c, dk);
  p.dv = view_of(c, dv);
  p.dsink = c.sink ? dsink.data_ptr() : nullptr;
  const BiasGradients sums = bias_gradient_buffers(c, b, *backend, &p);
  set_memory(sums, &p);
  const at::Tensor workspace = workspace_for(c.q, backend->backward_workspace_bytes(p), &p);
  if (!backend->sets_unowned_rows) {
    set_rows_of_no_sequence(c.cu_seqlens_q, dq, c.row_dim(), 0);
    set_rows_of_no_sequence(c.cu_seqlens_k, dk, c.row_dim(), 0);
    set_rows_of_no_sequence(c.cu_seqlens_k, dv, c.row_dim(), 0);
  }
  backend->backward(p);
  finish(finished(sums, given));
}

void dropout_mask(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor given_state = arguments.tensor();
  const std::vector<c10::SymInt> shape{arguments.integer(), arguments.integer(), arguments.integer(),
                                       arguments.integer()};
  const c10::SymFloat dropout_p = arguments.number();
  const auto origin = arguments.maybe_integers();
  const char* const names[] = {"B", "H", "Sq", "Sk"};
  for (size_t i = 0; i < shape.size(); ++i)
    TORCH_CHECK_VALUE(shape[i].sym_ge(0).expect_true(__FILE__, __LINE__), names[i], ": expected at least 0, got ",
                      shape[i]);
  check_dropout_p(dropout_p);
  check_origin(origin);
  validate_rng_state(given_state, 1.0, given_state);
  const Device device(given_state);
  const auto new_mask = [&] { return at::empty_symint(shape, given_state.options().dtype(at::kBool)); };
  if (given_state.is_meta()) return arguments.finish(new_mask());

  AttnParams p;
  p.dtype = DType::kFloat16;  // there is no q; every backend supports this type
  p.batch = shape[0].expect_int();
  p.heads_q = shape[1].expect_int();
  p.seqlen_q = shape[2].expect_int();
  p.seqlen_k = shape[3].expect_int();
  p.dropout_threshold = dropout_threshold(dropout_p.expect_float());
  p.origin = origin_of(origin);
  const auto refusal = [&](const Backend& backend) { return backend.supports(p, false); };
  const Backend& backend = backend_supporting(device, given_state, &p, refusal);
  const at::Tensor mask = new_mask();
  const at::Tensor rng_state = given_state.contiguous();
  p.rng_state = rng_state.const_data_ptr<int64_t>();
  backend.dropout_mask(p, mask.data_ptr<bool>());
  arguments.finish(mask);
}

// --- the overloads that Python calls ---

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// {seed, offset} of a dropout mask. The offset is 0 for an explicit seed and never 0 for a drawn state.
at::Tensor new_rng_state(const at::Tensor& device_of, const std::optional<c10::SymInt>& rng_seed) {
  if (rng_seed) {
    static const auto seeded =
        operator_named("flashattn_ext::rng_state").typed<at::Tensor(const at::Tensor&, c10::SymInt)>();
    return seeded.call(device_of, *rng_seed);
  }
  return at::randint(1, std::numeric_limits<int64_t>::max(), {2}, device_of.options().dtype(at::kLong));
}

// Whether the argument dropout_p may be above 0 at run time. Always true for a symbolic dropout_p: a comparison would
// specialise the traced graph on its current value, and torch's caches of compiled graphs do not record guards on
// floats. If dropout_p turns out to be 0, the kernels do not read the state.
bool may_drop_weights(const c10::OperatorHandle& op, const Stack& stack) {
  static const int index = *op.schema().argumentIndexWithName("dropout_p");
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const c10::SymFloat dropout_p = first[index].toScalar().toSymFloat();
  return dropout_p.is_symbolic() || dropout_p.expect_float() > 0;
}

// Throws for a call that would not run, before anything of it does. Tensors that torch traces or transforms are checked
// as far as their shapes tell.
void check_runs(const AttnCall& c, bool returns_max_logits) {
  validate(c);
  if (at::isTensorSubclassLike(c.q)) return;
  AttnParams p;
  if (returns_max_logits)
    p.row_maxima.data = const_cast<void*>(c.q.const_data_ptr());  // only whether there are any counts
  backend_of(c, Device(c.q), /*backward=*/false, &p);
}

// Whether a call looks like one of tensors [B, H, S, D] whose layout was not given: read as [B, S, H, D], fewer KV
// heads than query heads are fewer keys than queries, and causal masking leaves the first rows without keys. An option
// that has the sizes of rows, keys or heads in it, or that places the rows otherwise, confirms the layout.
bool looks_like_heads_first(const c10::IValue* arguments) {
  constexpr int kCausal = place_of("causal"), kBhsd = place_of("bhsd");
  constexpr int kConfirming[] = {place_of("cu_seqlens_q"),  place_of("sink"),  place_of("alibi_slopes"),
                                 place_of("relative_bias"), place_of("bias"),  place_of("mask_intervals"),
                                 place_of("mask_lists"),    place_of("origin")};
  constexpr int kWindow[] = {place_of("window_left"), place_of("window_right")};
  if (!arguments[kCausal].toBool() || arguments[kBhsd].toBool()) return false;
  for (const int place : kConfirming)
    if (!arguments[place].isNone()) return false;
  for (const int place : kWindow)
    if (!arguments[place].isInt() || arguments[place].toInt() >= 0) return false;
  const at::Tensor &q = arguments[0].toTensor(), &k = arguments[1].toTensor();
  for (const at::Tensor* t : {&q, &k})
    if (t->unsafeGetTensorImpl()->has_symbolic_sizes_strides() || t->dim() != 4) return false;
  const int64_t rows = q.size(1), keys = k.size(1);
  return rows > keys && keys > 0 && rows % keys == 0 && q.size(2) == k.size(2);
}

// The arguments are call_schema(), the seed and returns_max_logits. Only autograd keeps lse_words and the centres of
// rows (autograd.cpp).
void forward_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static const c10::OperatorHandle pure = operator_named("flashattn_ext::forward");
  const at::Tensor q = Arguments(op, stack).tensor();
  check_device_is_known(q);
  const bool drops = may_drop_weights(op, *stack);
  c10::IValue& seed = *(stack->end() - 2);
  const c10::IValue* const arguments = &*(stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()));
  if (warn_of_layout && looks_like_heads_first(arguments)) warn_of_layout(q.size(1), arguments[1].toTensor().size(1));
  // A call that does not run must not advance the generator.
  if (drops && seed.isNone()) check_runs(Arguments(op, stack).call(), stack->back().toBool());
  const at::Tensor rng_state = drops ? new_rng_state(q, seed.toOptional<c10::SymInt>()) : at::Tensor();
  seed = drops ? c10::IValue(rng_state) : c10::IValue();
  push_scalars(op, stack);
  stack->insert(stack->end() - 2, 2, c10::IValue(false));  // keeps_lse_words, keeps_centres
  // Under torch.vmap with randomness="different" the state may be batched although no tensor of the call is.
  if (rng_state.key_set().has(c10::DispatchKey::FuncTorchBatched)) {
    pure.callBoxed(stack);
  } else {
    // As in call_of(); the removed key is none of the pure op.
    pure.redispatchBoxed(keys.remove(c10::DispatchKey::FuncTorchVmapMode), stack);
  }
  stack->erase(stack->end() - 3, stack->end() - 1);  // lse_words, centres
}

constexpr char kBackward[] = "flashattn_ext::backward", kDropoutMask[] = "flashattn_ext::dropout_mask";

// The state of an explicit seed in device memory, made without synchronisation. An op of its own, because compilers may
// generate 32-bit code for dynamic integers.
at::Tensor rng_state(const at::Tensor& device_of, c10::SymInt rng_seed) {
  const at::Tensor state = at::zeros({2}, device_of.options().dtype(at::kLong));
  if (!state.is_meta()) state.select(0, 0).fill_(rng_seed.expect_int());
  return state;
}

}  // namespace

void push_scalars(const c10::OperatorHandle& op, Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  c10::List<at::Tensor> scalars;
  if (std::any_of(first, stack->end(), [](const c10::IValue& value) { return value.isSymFloat(); })) {
    static const auto as_tensor = operator_named("flashattn_ext::as_tensor").typed<at::Tensor(const at::Scalar&)>();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].type()->kind() != c10::TypeKind::NumberType) continue;
      c10::IValue& value = first[static_cast<std::ptrdiff_t>(i)];
      scalars.push_back(as_tensor.call(value.toScalar()));
      value = 0.0;
    }
  }
  stack->emplace_back(std::move(scalars));
}

TORCH_LIBRARY(flashattn_ext, m) {
  const std::string call = call_schema();
  const std::string gradients =
      ", Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor? lse_words, Tensor? "
      "centres" +
      schema_of_needs() + ", Tensor? rng_state";
  const std::string results = " -> " + schema_of_gradients();
  const std::string mask =
      "Tensor rng_state, SymInt batch, SymInt heads, SymInt seqlen_q, SymInt seqlen_k, Scalar dropout_p, SymInt[]? "
      "origin";
  const std::string scalars = ", Tensor[] scalars";
  const auto def = [&m](const std::string& schema, const std::vector<at::Tag>& tags = {at::Tag::pt2_compliant_tag}) {
    m.def(schema.c_str(), tags);
  };
  // rng_state: {seed, offset} of the dropout mask, None without dropout. keeps_lse_words: lse_words (lse_words.h) are
  // [B, Hq, Sq, 2] or [Hq, total_q, 2]; keeps_centres: centres (bias.h) are [B, Hq, Sq, 3] or [Hq, total_q, 3];
  // otherwise they are empty. returns_max_logits: max_logits are fp32 [B, Hq] or
  // [sequences, Hq]; otherwise they are empty.
  def("forward(" + call + ", Tensor? rng_state, bool keeps_lse_words, bool keeps_centres, bool returns_max_logits" +
      scalars + ") -> (Tensor out, Tensor lse, Tensor lse_words, Tensor centres, Tensor max_logits)");
  def("backward(" + call + gradients + scalars + ")" + results);
  def("dropout_mask(" + mask + scalars + ") -> Tensor");
  // rng_seed=None draws from torch's generator, so that equal calls give different results.
  def("forward.call(" + call +
          ", SymInt? rng_seed, bool returns_max_logits) -> (Tensor out, Tensor lse, Tensor max_logits)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  def("backward.call(" + call + gradients + ")" + results);
  def("dropout_mask.call(" + mask + ") -> Tensor");
  def("mask_extremes(Tensor intervals) -> Tensor");
  def("rng_state(Tensor device_of, SymInt rng_seed) -> Tensor");
  def("as_tensor(Scalar value) -> Tensor");  // in Python: ops.py

  implement<&forward>(m, "forward");
  implement<&backward>(m, "backward");
  implement<&dropout_mask>(m, "dropout_mask");
  implement_call<&forward_call>(m, "forward.call");
  implement_call<&call_of<kBackward>>(m, "backward.call");
  implement_call<&call_of<kDropoutMask>>(m, "dropout_mask.call");
}
// Also for calls without batched tensors: `randomness` decides how the state is drawn.
TORCH_LIBRARY_IMPL(flashattn_ext, FuncTorchVmapMode, m) {
  m.impl("forward.call", torch::CppFunction::makeFromBoxedFunction<&forward_call>());
}
TORCH_LIBRARY_IMPL(flashattn_ext, CompositeExplicitAutograd, m) {
  m.impl("rng_state", &rng_state);
  m.impl("mask_extremes", &mask_extremes);
}
TORCH_LIBRARY_IMPL(flashattn_ext, Meta, m) { m.impl("mask_extremes", &mask_extremes_meta); }

}  // namespace flashattn_ext
