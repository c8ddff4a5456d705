// The op `supports`: which backend would run a call, and whether slowly. It runs no kernel.
#include <torch/library.h>

#include "backend/slow_call.h"
#include "call/call_params.h"
#include "call/validate.h"
#include "tensors/op_device.h"

namespace flashattn_ext {
namespace {

// Throws what the call would throw, in the order in which it would: the forward, its tangents, the backward.
void supports(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  AttnCall c = arguments.call();
  const bool needs_gradients = arguments.flag(), needs_tangents = arguments.flag(), keeps_centres = arguments.flag(),
             returns_max_logits = arguments.flag();
  validate(c);
  if (c.is_fp8() && (needs_gradients || needs_tangents)) refuse_derivatives_of_fp8(c);
  if (c.q.is_meta()) return arguments.finish(std::string(), std::string());

  const Device device(c.q);
  if (c.is_varlen()) {  // as readable() does; other tensors are not read
    c.cu_seqlens_q = c.cu_seqlens_q->contiguous();
    c.cu_seqlens_k = c.cu_seqlens_k->contiguous();
  }
  AttnParams p;
  const at::Tensor row_maxima = new_row_maxima(c, returns_max_logits, &p);
  set_options(c, &p);
  const Backend& backend =
      backend_supporting(device, c.q, &p, [&p](const Backend& it) { return it.supports(p, /*backward=*/false); });
  check_formats(backend, {{"q", &c.q}, {"k", &c.k}, {"v", &c.v}});
  AttnParams of_derivatives = p;
  of_derivatives.row_maxima = {};
  if (needs_tangents)
    backend_supporting(device, c.q, &of_derivatives,
                       [&](const Backend& it) { return refuses_derivatives(it, of_derivatives); });
  if (needs_gradients)
    backend_supporting(device, c.q, &of_derivatives,
                       [&](const Backend& it) { return it.supports(of_derivatives, /*backward=*/true); });
  if (keeps_centres && backend.writes_centres) p.centres.data = c.q.data_ptr();  // only whether there are any counts
  arguments.finish(std::string(backend.name), why_slow(backend, p));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(flashattn_ext, m) {
  // needs_gradients, needs_tangents: whether the backward of the call, or its forward mode, must run too. slow:
  // slow_call.h; both are empty for meta tensors.
  m.def(("supports(" + call_schema() +
         ", bool needs_gradients, bool needs_tangents, bool keeps_centres, bool returns_max_logits) -> (str backend, "
         "str slow)")
            .c_str());
  implement<&supports>(m, "supports");
}

}  // namespace flashattn_ext
