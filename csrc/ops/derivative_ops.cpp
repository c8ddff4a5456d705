// The ops of forward mode and of second derivatives, torch.ops.flashattn_ext.jvp and .second (derivative_call.h).
// Python calls their overloads `call`, as in ops.cpp.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string>

#include "call/call_params.h"
#include "call/derivative_call.h"
#include "derivative_params.h"
#include "tensors/op_device.h"

namespace flashattn_ext {
namespace {

at::Tensor empty_like_input(const AttnCall& c, const at::Tensor& t) {
  return at::empty_symint(t.sym_sizes(), c.q.options());
}

// Chooses the backend and sets the options of the call; nullptr for meta tensors, as in ops.cpp.
const Backend* backend_of(const AttnCall& c, const Device& device, AttnParams* p) {
  if (c.q.is_meta()) return nullptr;
  set_options(c, p);
  const auto refusal = [p](const Backend& backend) { return refuses_derivatives(backend, *p); };
  return &backend_supporting(device, c.q, p, refusal);
}

// Points `tangents` to the given tangents. `c` is call_of_tangents() made readable; tout and tlse are the tangents of
// out and lse.
void set_tangents(const AttnCall& c, const TangentCall& given, const at::Tensor& tout, const at::Tensor& tlse,
                  AttnParams* tangents) {
  set_memory(c, tout, tlse, /*rng_state=*/{}, tangents);
  if (!given.q) tangents->q = {};
  if (!given.k) tangents->k = {};
  if (!given.v) tangents->v = {};
}

void jvp(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const JvpCall given = read_jvp_call(&arguments);
  validate(given);
  const Device device(given.call.q);
  JvpParams p;
  const Backend* const backend = backend_of(given.call, device, &p);
  const at::Tensor tout = at::empty_symint(given.call.out_shape(), given.call.q.options());
  const at::Tensor tlse =
      at::empty_symint(given.call.lse_shape(), given.call.q.options().dtype(given.call.statistics_dtype()));
  if (!backend) return arguments.finish(tout, tlse);

  const AttnCall c = readable(given.call, *backend);
  const AttnCall tangents = readable(call_of_tangents(given.call, given.tangents), *backend);
  const at::Tensor out = with_readable_rows(given.out, c.row_dim(), *backend);
  const at::Tensor lse = with_readable_rows(given.lse, -1, *backend);
  const at::Tensor lse_words = given.lse_words ? given.lse_words->contiguous() : at::Tensor();
  const at::Tensor rng_state = given.rng_state ? given.rng_state->contiguous() : at::Tensor();
  set_memory(c, out, lse, rng_state, &p);
  if (given.lse_words) p.lse_words = row_numbers_view_of(c, lse_words);
  set_tangents(tangents, given.tangents, tout, tlse, &p.tangents);
  const at::Tensor workspace = workspace_for(c.q, backend->jvp_workspace_bytes(p), &p);
  set_rows_of_no_sequence(c.cu_seqlens_q, tout, c.row_dim(), 0);
  set_rows_of_no_sequence(c.cu_seqlens_q, tlse, 1, 0);
  backend->jvp(p);
  arguments.finish(tout, tlse);
}

void second(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const SecondCall s = read_second_call(&arguments);
  const AttnCall& given = s.call;
  validate(s);
  const Device device(given.q);
  SecondParams p;
  const Backend* const backend = backend_of(given, device, &p);
  const at::Tensor dq = empty_like_input(given, given.q), dk = empty_like_input(given, given.k),
                   dv = empty_like_input(given, given.v);
  const c10::SymInt sinks = given.sink ? given.sink->sym_size(0) : 0;
  const at::Tensor dsink = at::empty_symint({sinks}, given.q.options().dtype(given.statistics_dtype()));
  const auto finish = [&](const BiasGradients& biases) {
    arguments.finish(dq, dk, dv
#define CALL_LEARNED(name, dims, takers, check) \
  , d##name.to(given.name ? given.name->scalar_type() : d##name.scalar_type())
#define CALL_BIAS(name, dims, takers, check) , biases.name
#include "call/options.def"
    );
  };
  if (!backend) return finish(finished_meta(given, s.backward));

  const AttnCall c = readable(given, *backend);
  const AttnCall tangents = readable(call_of_tangents(given, s.tangents), *backend);
  const auto rows_of = [&](const at::Tensor& t) { return with_readable_rows(t, c.row_dim(), *backend); };
  const at::Tensor out = rows_of(s.backward.out), tout = rows_of(s.tout);
  const at::Tensor dout =
      rows_of(s.backward.dout ? *s.backward.dout : at::zeros({1}, c.q.options()).expand(out.sizes()));
  const at::Tensor lse = with_readable_rows(s.backward.lse, -1, *backend);
  const at::Tensor lse_words = s.backward.lse_words ? s.backward.lse_words->contiguous() : at::Tensor();
  const at::Tensor tlse = with_readable_rows(s.tlse, -1, *backend);
  const at::Tensor dlse = s.backward.dlse ? with_readable_rows(*s.backward.dlse, -1, *backend) : at::Tensor();
  const at::Tensor rng_state = s.rng_state ? s.rng_state->contiguous() : at::Tensor();
  set_memory(c, out, lse, rng_state, &p);
  if (s.backward.lse_words) p.lse_words = row_numbers_view_of(c, lse_words);
  set_tangents(tangents, s.tangents, tout, tlse, &p.tangents);
  p.dout = view_of(c, dout);
  if (dlse.defined()) p.dlse = row_view_of(c, dlse);
  p.dq = view_of(c, dq);
  p.dk = view_of(c, dk);
  p.dv = view_of(c, dv);
  p.dsink = c.sink ? dsink.data_ptr() : nullptr;
  const BiasGradients sums = bias_gradient_buffers(c, s.backward, *backend, nullptr);
  set_memory(sums, &p);
  const at::Tensor workspace = workspace_for(c.q, backend->second_workspace_bytes(p), &p);
  set_rows_of_no_sequence(c.cu_seqlens_q, dq, c.row_dim(), 0);
  set_rows_of_no_sequence(c.cu_seqlens_k, dk, c.row_dim(), 0);
  set_rows_of_no_sequence(c.cu_seqlens_k, dv, c.row_dim(), 0);
  backend->second(p);
  finish(finished(sums, given));
}

constexpr char kJvp[] = "flashattn_ext::jvp", kSecond[] = "flashattn_ext::second";

}  // namespace

TORCH_LIBRARY_FRAGMENT(flashattn_ext, m) {
  const auto def = [&m](const std::string& name, const std::string& arguments, const std::string& results) {
    std::string schema = "(";
    schema += call_schema() + arguments;
    m.def((name + schema + ", Tensor[] scalars) -> " + results).c_str(), {at::Tag::pt2_compliant_tag});
    m.def((name + ".call" + schema + ") -> " + results).c_str(), {at::Tag::pt2_compliant_tag});
  };
  def("jvp", jvp_schema(), "(Tensor tout, Tensor tlse)");
  def("second", second_schema(), schema_of_gradients());
  implement<&jvp>(m, "jvp");
  implement<&second>(m, "second");
  implement_call<&call_of<kJvp>>(m, "jvp.call");
  implement_call<&call_of<kSecond>>(m, "second.call");
}

}  // namespace flashattn_ext
