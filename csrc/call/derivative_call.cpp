#include "call/derivative_call.h"

#include <c10/util/Exception.h>

#include <utility>

#include "call/validate.h"

namespace flashattn_ext {
namespace {

TangentCall read_tangents(Arguments* arguments) {
  TangentCall t;
  t.q = arguments->maybe_tensor();
  t.k = arguments->maybe_tensor();
  t.v = arguments->maybe_tensor();
#define CALL_LEARNED(name, dims, takers, check) t.name = arguments->maybe_tensor();
#define CALL_BIAS CALL_LEARNED
#include "call/options.def"
  return t;
}

// `names`: the names of the tangent and of its input.
void check_tangent(std::pair<const char*, const char*> names, const std::optional<at::Tensor>& tangent,
                   const std::optional<at::Tensor>& input, const AttnCall& c) {
  if (!tangent) return;
  TORCH_CHECK_VALUE(input, names.first, ": expected None, because the call has no ", names.second, ", got shape ",
                    tangent->sym_sizes());
  check_shape_and_dtype(names.first, *tangent, input->sym_sizes(), input->scalar_type(), c);
}

void check_tangents(const TangentCall& t, const AttnCall& c) {
  check_tangent({"tq", "q"}, t.q, c.q, c);
  check_tangent({"tk", "k"}, t.k, c.k, c);
  check_tangent({"tv", "v"}, t.v, c.v, c);
#define CALL_LEARNED(name, dims, takers, check) check_tangent({"t" #name, #name}, t.name, c.name, c);
#define CALL_BIAS CALL_LEARNED
#include "call/options.def"
}

}  // namespace

JvpCall read_jvp_call(Arguments* arguments) {
  return {arguments->call(),         arguments->tensor(),       arguments->tensor(),
          arguments->maybe_tensor(), arguments->maybe_tensor(), read_tangents(arguments)};
}

SecondCall read_second_call(Arguments* arguments) {
  SecondCall second;
  second.call = arguments->call();
  second.backward.out = arguments->tensor();
  second.backward.lse = arguments->tensor();
  second.backward.lse_words = arguments->maybe_tensor();
  second.rng_state = arguments->maybe_tensor();
  second.backward.dout = arguments->maybe_tensor();
  second.backward.dlse = arguments->maybe_tensor();
  second.tout = arguments->tensor();
  second.tlse = arguments->tensor();
  second.tangents = read_tangents(arguments);
#define CALL_BIAS(name, dims, takers, check) second.backward.needs_d##name = arguments->flag();
#include "call/options.def"
  return second;
}

void validate(const JvpCall& jvp) {
  const AttnCall& c = jvp.call;
  validate(c);
  check_has_derivatives(c);
  check_shape_and_dtype("out", jvp.out, c.out_shape(), c.q.scalar_type(), c);
  check_shape_and_dtype("lse", jvp.lse, c.lse_shape(), c.statistics_dtype(), c);
  if (jvp.lse_words)
    check_shape_and_dtype("lse_words", *jvp.lse_words, c.row_numbers_shape(2), c.statistics_dtype(), c);
  check_tangents(jvp.tangents, c);
  validate_rng_state(jvp.rng_state, c.dropout_p, c.q);
}

void validate(const SecondCall& second) {
  const AttnCall& c = second.call;
  validate(c, second.backward);
  check_shape_and_dtype("tout", second.tout, c.out_shape(), c.q.scalar_type(), c);
  check_shape_and_dtype("tlse", second.tlse, c.lse_shape(), c.statistics_dtype(), c);
  check_tangents(second.tangents, c);
  validate_rng_state(second.rng_state, c.dropout_p, c.q);
}

AttnCall call_of_tangents(const AttnCall& call, const TangentCall& tangents) {
  AttnCall c = call;
  if (tangents.q) c.q = *tangents.q;
  if (tangents.k) c.k = *tangents.k;
  if (tangents.v) c.v = *tangents.v;
#define CALL_LEARNED(name, dims, takers, check) c.name = tangents.name;
#define CALL_BIAS CALL_LEARNED
#include "call/options.def"
  c.mask_intervals = c.mask_extremes = c.mask_lists = c.mask_bits = std::nullopt;
  return c;
}

}  // namespace flashattn_ext
