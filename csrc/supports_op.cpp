// The op `supports`: which backend would run a call, and whether slowly. It runs no kernel.
#include <torch/library.h>

#include "call_params.h"
#include "op_device.h"
#include "slow_call.h"
#include "validate.h"

namespace flashattn_ext {
namespace {

// Throws what the call would throw.
void supports(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments arguments(op, stack);
  AttnCall c = arguments.call();
  const bool needs_gradients = arguments.flag(), keeps_centres = arguments.flag(),
             returns_max_logits = arguments.flag();
  validate(c);
  if (needs_gradients) check_has_derivatives(c);
  if (c.q.is_meta()) return arguments.finish(std::string(), std::string());

  const Device device(c.q);
  if (c.is_varlen()) {  // as readable() does; other tensors are not read
    c.cu_seqlens_q = c.cu_seqlens_q->contiguous();
    c.cu_seqlens_k = c.cu_seqlens_k->contiguous();
  }
  AttnParams p;
  const at::Tensor row_maxima = new_row_maxima(c, returns_max_logits, &p);
  set_options(c, &p);
  const auto refusal_of = [&p](bool backward) {
    return [&p, backward](const Backend& backend) { return backend.supports(p, backward); };
  };
  if (needs_gradients) backend_supporting(device, c.q, &p, refusal_of(true));
  const Backend& backend = backend_supporting(device, c.q, &p, refusal_of(false));
  check_formats(backend, {{"q", &c.q}, {"k", &c.k}, {"v", &c.v}});
  if (keeps_centres && writes_centres(c, backend))
    p.centres.data = c.q.data_ptr();  // only whether there are any counts
  arguments.finish(std::string(backend.name), why_slow(backend, p));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(flashattn_ext, m) {
  // needs_gradients: whether the backward of the call must run too. slow: slow_call.h; both are empty for meta tensors.
  m.def(("supports(" + call_schema() +
         ", bool needs_gradients, bool keeps_centres, bool returns_max_logits) -> (str backend, str slow)")
            .c_str());
}

void implement_supports(torch::Library& m) {
  m.impl("supports", torch::CppFunction::makeFromBoxedFunction<&supports>());
}
TORCH_LIBRARY_IMPL(flashattn_ext, CPU, m) { implement_supports(m); }
TORCH_LIBRARY_IMPL(flashattn_ext, Meta, m) { implement_supports(m); }
TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, m) { implement_supports(m); }
TORCH_LIBRARY_IMPL(flashattn_ext, PrivateUse1, m) { implement_supports(m); }

}  // namespace flashattn_ext
