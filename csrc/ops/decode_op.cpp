// The decoding op, torch.ops.flashattn_ext.decode: `default` reads the KV caches, `append` first writes new keys and
// values to them. Python calls their overloads `call` and `append_call`, as in ops.cpp.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "call/call_params.h"
#include "call/decode_call.h"
#include "tensors/mask_extremes.h"
#include "tensors/op_device.h"

namespace flashattn_ext {
namespace {

// A dense view of a cache or of new keys. In a packed call `view_of` would treat them as packed tensors.
TensorView view_of_keys(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

const int32_t* integers_of(std::optional<at::Tensor>* t) {
  if (!*t) return nullptr;
  *t = (*t)->contiguous();
  return (*t)->const_data_ptr<int32_t>();
}

// Sets everything except pointers and strides, which `set_decode_memory` sets.
void set_decode_options(const DecodeCall& c, DecodeParams* params) {
  DecodeParams& p = *params;
  set_options(c, &p);
  p.heads_k = c.k.size(2);
  p.seqlen_k = c.is_varlen() ? c.max_seqlen_k.expect_int() : c.capacity().expect_int();
  p.total_k = 0;
  KeyCache& cache = p.cache;
  cache.entries = c.k.size(0);
  cache.page_size = c.k.size(1);
  cache.pages_per_sequence = c.block_table ? c.block_table->size(1) : 1;
  cache.seqlen = c.cache_seqlen < 0 ? cache.capacity() : c.cache_seqlen.expect_int();
  cache.new_keys = c.new_keys().expect_int();
  if (c.block_table) cache.block_table = c.block_table->const_data_ptr<int32_t>();
  if (c.rotary_cos) {
    p.rotary.cos = c.rotary_cos->const_data_ptr();
    p.rotary.rows = c.rotary_cos->size(0);
    p.rotary.dim = 2 * c.rotary_cos->size(1);
    p.rotary.interleaved = c.rotary_interleaved;
    p.rotary.rotates_each_row = c.has_window();
  }
  if (c.k_new) {
    p.k_new = view_of_keys(*c.k_new);
    p.v_new = view_of_keys(*c.v_new);
    p.new_dtype = dtype_of(c.k_new->scalar_type());
  }
  p.num_splits = c.num_splits.expect_int();
  p.mask_keys = c.mask_intervals ? c.mask_intervals->size(2) : 0;
}

// The address range of a tensor: first byte and one past the last.
std::pair<const char*, const char*> memory_of(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
  const auto* const begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, t.numel() ? begin + (last + 1) * static_cast<int64_t>(t.element_size()) : begin};
}
bool may_overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto [a_begin, a_end] = memory_of(a);
  const auto [b_begin, b_end] = memory_of(b);
  return a_begin < b_end && b_begin < a_end;
}

// Copies the inputs of an appending call that overlap a cache in memory: kernels append rows in any order and read q
// afterwards.
void copy_what_is_written_to(DecodeCall* c) {
  const auto copy = [c](at::Tensor* t) {
    if (may_overlap(*t, c->k) || may_overlap(*t, c->v)) *t = t->clone(at::MemoryFormat::Contiguous);
  };
  copy(&c->q);
  for (std::optional<at::Tensor>* t : {&c->k_new, &c->v_new, &c->rotary_cos, &c->rotary_sin}) {
    if (*t) copy(&**t);
  }
}

// Replaces small tensors by contiguous copies where kernels need them.
void make_readable(DecodeCall* call, const Backend& backend) {
  DecodeCall& c = *call;
  const at::Tensor k_cache = c.k, v_cache = c.v;
  static_cast<AttnCall&>(c) = readable(std::move(static_cast<AttnCall&>(c)), backend);
  c.k = k_cache;  // appended keys must go to the caches themselves, not to copies
  c.v = v_cache;
  for (std::optional<at::Tensor>* t : {&c.k_new, &c.v_new}) {
    if (*t) *t = with_readable_rows(**t, 1, backend);
  }
  for (std::optional<at::Tensor>* t : {&c.rotary_cos, &c.rotary_sin}) {
    if (*t) *t = (*t)->contiguous();
  }
  if (c.k_new) copy_what_is_written_to(&c);
}

void set_decode_memory(DecodeCall* call, const at::Tensor& out, const at::Tensor& lse, DecodeParams* params) {
  DecodeCall& c = *call;
  DecodeParams& p = *params;
  set_memory(c, out, lse, /*rng_state=*/{}, &p);
  p.k = view_of_keys(c.k);
  p.v = view_of_keys(c.v);
  if (c.k_new) {
    p.k_new = view_of_keys(*c.k_new);
    p.v_new = view_of_keys(*c.v_new);
  }
  if (c.rotary_cos) {
    p.rotary.cos = c.rotary_cos->const_data_ptr();
    p.rotary.sin = c.rotary_sin->const_data_ptr();
  }
  p.cache.seqlens = integers_of(&c.cache_seqlens);
  p.cache.batch_idx = integers_of(&c.cache_batch_idx);
  p.cache.leftpad = integers_of(&c.cache_leftpad);
  if (c.block_table && c.block_table->stride(1) != 1) c.block_table = c.block_table->contiguous();
  if (c.block_table) {
    p.cache.block_table = c.block_table->const_data_ptr<int32_t>();
    p.cache.block_table_stride = c.block_table->stride(0);
  }
}

void decode(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  DecodeCall c = read_decode_call(&arguments);
  validate(c);
  const Device device(c.q);
  DecodeParams p;
  const at::Tensor row_maxima = new_row_maxima(c, c.returns_max_logits && !c.q.is_meta(), &p);
  const Backend* backend = nullptr;
  if (!c.q.is_meta()) {
    set_decode_options(c, &p);
    const auto refusal = [&p](const Backend& candidate) { return refuses_decode(candidate, p); };
    backend = &backend_supporting(device, c.q, &p, refusal);
  }
  const at::Tensor out = at::empty_symint(c.out_shape(), c.q.options().dtype(c.dtype_of_out()));
  const at::Tensor lse = at::empty_symint(c.lse_shape(), c.q.options().dtype(c.statistics_dtype()));
  if (!backend) return arguments.finish(out, lse, largest_of_rows_meta(c, c.returns_max_logits));

  make_readable(&c, *backend);
  set_decode_memory(&c, out, lse, &p);
  set_rows_of_no_sequence(c, out, lse);
  if (p.heads_k > 0) {  // otherwise the call has neither rows nor keys, and backends divide by the number of KV heads
    const at::Tensor workspace = workspace_for(c.q, backend->decode_workspace_bytes(p), &p);
    backend->decode(p);
  }
  arguments.finish(out, lse, largest_of_rows(c, row_maxima, p, *backend));
}

template <bool kAppends>
void decode_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static const c10::OperatorHandle pure = c10::Dispatcher::singleton().findSchemaOrThrow(
      kAppends ? "flashattn_ext::decode_append" : "flashattn_ext::decode", "");
  push_scalars(op, stack);
  // `keys` are the dispatch keys of the overload `call`; the op also has a kernel for ADInplaceOrView (autograd.cpp).
  const bool counts = kAppends && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
  pure.redispatchBoxed(counts ? keys.add(c10::DispatchKey::ADInplaceOrView) : keys, stack);
}

}  // namespace

// Two op names, because torch's operator registry cannot distinguish overloads that differ only in mutability.
TORCH_LIBRARY_FRAGMENT(flashattn_ext, m) {
  const auto def = [&m](const std::string& name, bool appends, const std::string& scalars) {
    const std::string schema =
        name + "(" + decode_schema(appends) + scalars + ") -> (Tensor out, Tensor lse, Tensor max_logits)";
    m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  };
  def("decode", false, ", Tensor[] scalars");
  def("decode.call", false, "");
  def("decode_append", true, ", Tensor[] scalars");
  def("decode_append.call", true, "");
  implement<&decode>(m, "decode");
  implement<&decode>(m, "decode_append");
}

TORCH_LIBRARY_IMPL(flashattn_ext, CompositeImplicitAutograd, m) {
  m.impl("decode.call", torch::CppFunction::makeFromBoxedFunction<&decode_call<false>>());
  m.impl("decode_append.call", torch::CppFunction::makeFromBoxedFunction<&decode_call<true>>());
}

}  // namespace flashattn_ext
