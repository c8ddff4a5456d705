// The ops of torch.ops.flashattn_ext: validate, allocate, fill AttnParams, hand over to a Backend. Besides validate.cpp
// the only file that sees torch.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceGuard.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pthread.h>
#include <torch/library.h>

#include <atomic>
#include <initializer_list>
#include <mutex>
#include <tuple>

#if defined(FLASHATTN_EXT_CUDA)
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "backend.h"
#include "dropout.h"
#include "validate.h"

namespace flashattn_ext {
namespace {

// --- the caller's thread pool
// -------------------------------------------------------------------------------------------

// The threads of an OpenMP pool do not exist in a forked child, which would wait for them forever.
std::atomic<bool> in_forked_child{false};
const int at_fork_registered = pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });

CpuExecutor cpu_executor() {
  CpuExecutor executor;
  const bool serial = in_forked_child.load() || at::in_parallel_region();
  executor.num_threads = serial ? 1 : at::get_num_threads();
  executor.run = [](int workers, void (*body)(void*, int), void* context) {
    if (workers == 1) return body(context, 0);
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) body(context, static_cast<int>(worker));
    });
  };
  return executor;
}

// --- the device of a call
// ----------------------------------------------------------------------------------------------------

std::string device_name(const at::Tensor& t) { return c10::DeviceTypeName(t.device().type(), true); }

// Makes the device of a tensor the current one, and holds what AttnParams::stream points to.
class Device {
 public:
  explicit Device(const at::Tensor& t) : guard_(t.device()) {
    if (t.is_cpu()) {
      executor_ = cpu_executor();
      stream_ = &executor_;
    }
#if defined(FLASHATTN_EXT_CUDA)
    if (t.is_cuda()) stream_ = c10::cuda::getCurrentCUDAStream().stream();
#endif
  }
  Device(const Device&) = delete;
  void* stream() const { return stream_; }

 private:
  at::DeviceGuard guard_;
  CpuExecutor executor_;
  void* stream_ = nullptr;  // of another device: the backend knows it
};

// --- from tensors to params
// ---------------------------------------------------------------------------------------------

at::Tensor with_contiguous_rows(const at::Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) <= 1 ? t : t.contiguous();
}

TensorView view_of(const AttnCall& c, const at::Tensor& t) {
  TensorView view;
  view.data = const_cast<void*>(t.const_data_ptr());
  view.batch_stride = c.is_varlen() ? 0 : t.stride(0);
  view.row_stride = t.stride(c.row_dim());
  view.head_stride = t.stride(c.head_axis());
  return view;
}

RowView row_view_of(const AttnCall& c, const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), c.is_varlen() ? 0 : t.stride(0), t.stride(c.is_varlen() ? 0 : 1)};
}

DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      return DType::kFloat32;
  }
}

// Replaces tensors by ones that kernels can read: rows contiguous, cu_seqlens contiguous, sink in the statistics dtype.
AttnCall readable(AttnCall c) {
  c.q = with_contiguous_rows(c.q);
  c.k = with_contiguous_rows(c.k);
  c.v = with_contiguous_rows(c.v);
  if (c.is_varlen()) {
    c.cu_seqlens_q = c.cu_seqlens_q->contiguous();
    c.cu_seqlens_k = c.cu_seqlens_k->contiguous();
  }
  if (c.sink) c.sink = c.sink->to(c.statistics_dtype()).contiguous();
  return c;
}

// Sizes and options: all that decides who runs the call.
template <class Params>
Params params_of(const AttnCall& c) {
  Params p;
  p.dtype = dtype_of(c.q);
  p.batch = c.batch();
  p.seqlen_q = c.is_varlen() ? c.max_seqlen_q : c.q.size(c.row_dim());
  p.seqlen_k = c.is_varlen() ? c.max_seqlen_k : c.k.size(c.row_dim());
  p.heads_q = c.q.size(c.head_axis());
  p.heads_k = c.k.size(c.head_axis());
  p.head_dim = c.q.size(-1);
  p.head_dim_v = c.v.size(-1);
  if (c.is_varlen()) {
    p.cu_seqlens_q = c.cu_seqlens_q->const_data_ptr<int32_t>();
    p.cu_seqlens_k = c.cu_seqlens_k->const_data_ptr<int32_t>();
    p.total_q = c.q.size(0);
    p.total_k = c.k.size(0);
  }
  p.window_left = c.window_left;
  p.window_right = c.causal ? 0 : c.window_right;  // causal caps the right side, and no side is below 0
  p.softmax_scale = c.softmax_scale;
  p.has_sink = c.smooth_softmax || c.sink;
  p.dropout_threshold = dropout_threshold(c.dropout_p);
  return p;
}

// Where the tensors of a readable call lie.
void set_memory(const AttnCall& c, const at::Tensor& out, const at::Tensor& lse, AttnParams* p) {
  if (c.is_varlen()) {
    p->cu_seqlens_q = c.cu_seqlens_q->const_data_ptr<int32_t>();
    p->cu_seqlens_k = c.cu_seqlens_k->const_data_ptr<int32_t>();
  }
  p->q = view_of(c, c.q);
  p->k = view_of(c, c.k);
  p->v = view_of(c, c.v);
  p->out = view_of(c, out);
  p->lse = row_view_of(c, lse);
  p->sink = c.sink ? c.sink->const_data_ptr() : nullptr;
}

// The backend that runs the call, and its stream if this file does not know that one.
const Backend& backend_supporting(const at::Tensor& device_of, AttnParams* p, bool backward) {
  std::string reason;
  const Backend& backend = backend_for(device_name(device_of), *p, backward, &reason);
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), "backend '", backend.name, "': ", reason);
  if (backend.current_stream) p->stream = backend.current_stream(device_of.device().index());
  return backend;
}

void check_formats(const Backend& backend, std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors) {
  if (!backend.private_format) return;
  for (const auto& [name, t] : tensors) {
    const std::string format = backend.private_format(*t);
    TORCH_CHECK_VALUE(format.empty(), name, ": expected a tensor in rows, got one in ", format);
  }
}

at::Tensor workspace_for(const AttnCall& c, size_t bytes, AttnParams* p) {
  constexpr size_t kAlignment = 64;
  at::Tensor workspace = at::empty({static_cast<int64_t>(bytes + kAlignment)}, c.q.options().dtype(at::kByte));
  const auto address = reinterpret_cast<uintptr_t>(workspace.data_ptr());
  p->workspace = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  return workspace;
}

at::Tensor like(const AttnCall& c, const at::Tensor& t, int64_t head_dim) {
  std::vector<int64_t> shape = t.sizes().vec();
  shape.back() = head_dim;
  return at::empty(shape, c.q.options());
}

// Packed rows behind the last sequence belong to none: they get what a row that sees nothing gets.
void clear_rows_behind(const std::optional<at::Tensor>& cu_seqlens, const at::Tensor& t, int64_t row_dim,
                       double value) {
  if (!cu_seqlens || !cu_seqlens->is_cpu()) return;
  const int64_t end = cu_seqlens->const_data_ptr<int32_t>()[cu_seqlens->numel() - 1];
  if (end < t.size(row_dim)) t.narrow(row_dim, end, t.size(row_dim) - end).fill_(value);
}

// A fresh source from the generator of the device, which torch.manual_seed rules. A captured CUDA graph reads the
// generator's device memory anew at each replay.
RngSource draw(const at::Tensor& device_of) {
  RngSource source;
#if defined(FLASHATTN_EXT_CUDA)
  if (device_of.is_cuda()) {
    constexpr uint64_t kStep = 4;  // the generator counts in fours; a mask needs one offset of its own
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device_of.device().index());
    std::lock_guard<std::mutex> lock(generator.mutex());
    const at::PhiloxCudaState state = at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(kStep);
    if (state.captured_) {
      source.seed_pointer = reinterpret_cast<const int64_t*>(state.seed_.ptr);
      source.offset_pointer = reinterpret_cast<const int64_t*>(state.offset_.ptr);
      source.offset = static_cast<int64_t>(state.offset_intragraph_);
    } else {
      source.seed = static_cast<int64_t>(state.seed_.val);
      source.offset = static_cast<int64_t>(state.offset_.val);
    }
    // Offset 0 belongs to explicit seeds.
    source.offset += 1;
    return source;
  }
#endif
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  source.seed = static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(generator)->random64());
  return source;
}

at::Tensor new_rng_state(const AttnCall& c, std::optional<int64_t> rng_seed, const Backend& backend,
                         const AttnParams& p) {
  at::Tensor state = at::empty(c.rng_state_shape(), c.q.options().dtype(at::kLong));
  if (state.numel() == 0) return state;
  RngSource source;
  if (rng_seed) {
    source.seed = *rng_seed;
  } else if (dropout_threshold(c.dropout_p) < 256) {
    source = backend.draw ? backend.draw(c.q.device().index()) : draw(c.q);
  }
  backend.write_rng_state(p, source, state.data_ptr<int64_t>());
  return state;
}

// --- the ops
// ------------------------------------------------------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& cu_seqlens_q,
    const std::optional<at::Tensor>& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool bhsd,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double dropout_p,
    std::optional<int64_t> rng_seed, bool smooth_softmax, const std::optional<at::Tensor>& sink) {
  AttnCall c{q,
             k,
             v,
             cu_seqlens_q,
             cu_seqlens_k,
             max_seqlen_q,
             max_seqlen_k,
             bhsd,
             softmax_scale,
             causal,
             window_left,
             window_right,
             dropout_p,
             smooth_softmax,
             sink};
  validate(c);
  const Device device(q);
  AttnParams p = params_of<AttnParams>(c);
  p.stream = device.stream();
  const Backend& backend = backend_supporting(q, &p, false);
  check_formats(backend, {{"q", &q}, {"k", &k}, {"v", &v}});
  c = readable(c);
  at::Tensor out = like(c, q, v.size(-1));
  std::vector<int64_t> lse_shape{q.size(c.head_axis()), q.size(c.row_dim())};
  if (!c.is_varlen()) lse_shape.insert(lse_shape.begin(), q.size(0));
  at::Tensor lse = at::empty(lse_shape, q.options().dtype(c.statistics_dtype()));

  set_memory(c, out, lse, &p);
  const at::Tensor rng_state = new_rng_state(c, rng_seed, backend, p);
  p.rng_state = rng_state.const_data_ptr<int64_t>();
  const at::Tensor workspace = workspace_for(c, backend.forward_workspace_bytes(p), &p);
  clear_rows_behind(c.cu_seqlens_q, out, c.row_dim(), 0);
  clear_rows_behind(c.cu_seqlens_q, lse, 1, -std::numeric_limits<double>::infinity());
  // Only the device knows which rows those are. On CUDA the backend clears them.
  if (c.is_varlen() && q.is_privateuseone()) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
  }
  backend.forward(p);
  return {out, lse, rng_state};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const std::optional<at::Tensor>& dout, const std::optional<at::Tensor>& dlse, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state,
    const std::optional<at::Tensor>& cu_seqlens_q, const std::optional<at::Tensor>& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, bool bhsd, double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
    double dropout_p, bool smooth_softmax, const std::optional<at::Tensor>& sink, bool deterministic) {
  AttnCall c{q,
             k,
             v,
             cu_seqlens_q,
             cu_seqlens_k,
             max_seqlen_q,
             max_seqlen_k,
             bhsd,
             softmax_scale,
             causal,
             window_left,
             window_right,
             dropout_p,
             smooth_softmax,
             sink};
  validate(c, {dout, dlse, out, lse, rng_state});
  const Device device(q);
  AttnGradParams p = params_of<AttnGradParams>(c);
  p.deterministic = deterministic;
  p.stream = device.stream();
  const Backend& backend = backend_supporting(q, &p, true);
  check_formats(backend, {{"dout", dout ? &*dout : &out}, {"q", &q}, {"k", &k}, {"v", &v}, {"out", &out}});
  c = readable(c);
  const at::Tensor out_rows = with_contiguous_rows(out);
  const at::Tensor dout_rows = dout ? with_contiguous_rows(*dout) : at::zeros(out.sizes(), out.options());
  const at::Tensor lse_rows = lse.contiguous(), state = rng_state.contiguous();
  at::Tensor dq = like(c, q, q.size(-1)), dk = like(c, k, k.size(-1)), dv = like(c, v, v.size(-1));
  at::Tensor dsink = at::empty({sink ? sink->size(0) : 0}, q.options().dtype(c.statistics_dtype()));

  set_memory(c, out_rows, lse_rows, &p);
  p.rng_state = state.const_data_ptr<int64_t>();
  at::Tensor dlse_rows;
  if (dlse) {
    dlse_rows = dlse->contiguous();
    p.dlse = row_view_of(c, dlse_rows);
  }
  p.dout = view_of(c, dout_rows);
  p.dq = view_of(c, dq);
  p.dk = view_of(c, dk);
  p.dv = view_of(c, dv);
  p.dsink = sink ? dsink.data_ptr() : nullptr;
  const at::Tensor workspace = workspace_for(c, backend.backward_workspace_bytes(p), &p);
  clear_rows_behind(c.cu_seqlens_q, dq, c.row_dim(), 0);
  clear_rows_behind(c.cu_seqlens_k, dk, c.row_dim(), 0);
  clear_rows_behind(c.cu_seqlens_k, dv, c.row_dim(), 0);
  backend.backward(p);
  return {dq, dk, dv, sink ? dsink.to(sink->scalar_type()) : dsink};
}

// `like` only names the device.
at::Tensor dropout_mask(const at::Tensor& device_of, int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k,
                        double dropout_p, int64_t rng_seed, int64_t rng_offset) {
  validate_dropout_p(dropout_p);
  for (const auto& [name, size] :
       {std::pair<const char*, int64_t>{"B", batch}, {"H", heads}, {"Sq", seqlen_q}, {"Sk", seqlen_k}}) {
    TORCH_CHECK_VALUE(size >= 0, name, ": expected at least 0, got ", size);
  }
  const Device device(device_of);
  AttnParams p;
  p.dtype = DType::kFloat16;  // there is no q; every backend has this type
  p.batch = batch;
  p.heads_q = heads;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.dropout_threshold = dropout_threshold(dropout_p);
  p.stream = device.stream();
  const Backend& backend = backend_supporting(device_of, &p, false);
  at::Tensor mask = at::empty({batch, heads, seqlen_q, seqlen_k}, device_of.options().dtype(at::kBool));
  at::Tensor rng_state = at::empty({2}, device_of.options().dtype(at::kLong));
  RngSource source;
  source.seed = rng_seed;
  source.offset = rng_offset;
  p.rng_state = rng_state.const_data_ptr<int64_t>();
  backend.write_rng_state(p, source, rng_state.data_ptr<int64_t>());
  backend.dropout_mask(p, mask.data_ptr<bool>());
  return mask;
}

}  // namespace

TORCH_LIBRARY(flashattn_ext, m) {
  // Dropout draws from torch's generator, so that equal calls are not equal results.
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt "
      "max_seqlen_k, "
      "bool bhsd, float softmax_scale, bool causal, SymInt window_left, SymInt window_right, float dropout_p, int? "
      "rng_seed, "
      "bool smooth_softmax, Tensor? sink) -> (Tensor out, Tensor lse, Tensor rng_state)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def(
      "backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rng_state, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool bhsd, float "
      "softmax_scale, "
      "bool causal, SymInt window_left, SymInt window_right, float dropout_p, bool smooth_softmax, Tensor? sink, bool "
      "deterministic) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "dropout_mask(Tensor device_of, SymInt batch, SymInt heads, SymInt seqlen_q, SymInt seqlen_k, float dropout_p, "
      "int rng_seed, "
      "int rng_offset) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

void implement(torch::Library& m) {
  m.impl("forward", &forward);
  m.impl("backward", &backward);
  m.impl("dropout_mask", &dropout_mask);
}

TORCH_LIBRARY_IMPL(flashattn_ext, CPU, m) { implement(m); }
// Also without a backend for them: then the call says that this build has none. PrivateUse1 is torch_npu's.
TORCH_LIBRARY_IMPL(flashattn_ext, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(flashattn_ext, PrivateUse1, m) { implement(m); }

}  // namespace flashattn_ext
