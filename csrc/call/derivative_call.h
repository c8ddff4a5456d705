// The arguments of the ops `jvp` and `second` as the ops receive them, their order, and their checks.
//
// jvp is forward mode: the tangents of out and lse for given tangents of the inputs. second is the gradient of
// <dout, tout> + <dlse, tlse> in the inputs, where dout, dlse and the tangents of the inputs are constants. Both take
// out, lse and lse_words from the op `forward`; second also takes tout and tlse from jvp.
#pragma once

#include <optional>
#include <string>

#include "call/attn_call.h"

namespace flashattn_ext {

// The arguments after call_schema(). The tangents have the shapes and dtypes of their inputs. None stands for zero, and
// none of its products is computed. An input that is None has no tangent.
//
// The results of jvp: tout has the shape and dtype of out, tlse those of lse. A fully masked row has tangents of 0.
inline std::string jvp_schema() {
  return ", Tensor out, Tensor lse, Tensor? lse_words, Tensor? rng_state" + schema_of_tangents();
}
// dout or dlse is None where it is zero. The results of second are those of the op `backward`, in the same order, and
// empty in the same cases: dsink without a sink, and the gradients of biases that are not needed.
inline std::string second_schema() {
  return ", Tensor out, Tensor lse, Tensor? lse_words, Tensor? rng_state, Tensor? dout, Tensor? dlse, Tensor tout, "
         "Tensor tlse" +
         schema_of_tangents() + schema_of_needs();
}

// Tangents of the inputs, in the order of both schemas.
struct TangentCall {
  std::optional<at::Tensor> q, k, v;
#define CALL_LEARNED(name, dims, takers, check) std::optional<at::Tensor> name;
#define CALL_BIAS CALL_LEARNED
#include "call/options.def"
};

struct JvpCall {
  AttnCall call;
  at::Tensor out, lse;
  std::optional<at::Tensor> lse_words, rng_state;
  TangentCall tangents;
};

struct SecondCall {
  AttnCall call;
  std::optional<at::Tensor> rng_state;
  BackwardCall backward;  // without centres
  at::Tensor tout, tlse;
  TangentCall tangents;
};

JvpCall read_jvp_call(Arguments* arguments);
SecondCall read_second_call(Arguments* arguments);

void validate(const JvpCall& jvp);
void validate(const SecondCall& second);

// The call with the tangent of each input in its place, for `readable` and `set_memory` of call_params.h. q, k and v
// without a tangent stay the inputs themselves: see set_tangents() in derivative_ops.cpp.
AttnCall call_of_tangents(const AttnCall& call, const TangentCall& tangents);

}  // namespace flashattn_ext
