#include "validate.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <string>
#include <vector>

namespace flashattn_ext {
namespace {

constexpr int64_t kMaxHeadDim = 256;

using NamedTensors = std::vector<std::pair<const char*, const at::Tensor*>>;

std::string layout_of(const AttnCall& c) {
  if (c.is_varlen()) return "[total, heads, head_dim]";
  return c.bhsd ? "[batch, heads, seqlen, head_dim]" : "[batch, seqlen, heads, head_dim]";
}

void check_tensor_kinds(const AttnCall& c) {
  const int64_t rank = c.is_varlen() ? 3 : 4;
  const at::ScalarType dtype = c.q.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
                   "q: expected dtype float16, bfloat16, float32 or (CPU only) float64, got ", dtype);
  // On an NPU the backend says so, of float32 too.
  TORCH_CHECK_TYPE(dtype != at::kDouble || c.q.is_cpu() || c.q.is_meta() || c.q.is_privateuseone(),
                   "q: float64 is supported on the CPU only, got a tensor on ", c.q.device(), "; use float32 there");
  for (const auto& [name, t] : NamedTensors{{"q", &c.q}, {"k", &c.k}, {"v", &c.v}}) {
    TORCH_CHECK_VALUE(t->dim() == rank, name, ": expected ", rank, " dimensions ", layout_of(c), ", got shape ",
                      t->sizes());
    TORCH_CHECK_TYPE(t->scalar_type() == dtype, name, ": expected the dtype of q (", dtype, "), got ",
                     t->scalar_type());
    TORCH_CHECK_VALUE(t->device() == c.q.device(), name, ": expected the device of q (", c.q.device(), "), got ",
                      t->device());
  }
}

void check_sizes(const AttnCall& c) {
  const int64_t heads = c.head_axis(), rows = c.row_dim();
  if (!c.is_varlen()) {
    for (const auto& [name, t] : NamedTensors{{"k", &c.k}, {"v", &c.v}}) {
      TORCH_CHECK_VALUE(t->size(0) == c.q.size(0), name, ": expected the batch size of q (", c.q.size(0), "), got ",
                        t->size(0), " in shape ", t->sizes());
    }
  }
  TORCH_CHECK_VALUE(c.v.size(rows) == c.k.size(rows), "v: expected the length of k (", c.k.size(rows), "), got ",
                    c.v.size(rows), " in shape ", c.v.sizes());
  TORCH_CHECK_VALUE(c.v.size(heads) == c.k.size(heads), "v: expected the number of heads of k (", c.k.size(heads),
                    "), got ", c.v.size(heads), " in shape ", c.v.sizes());
  const int64_t heads_q = c.q.size(heads), heads_k = c.k.size(heads);
  TORCH_CHECK_VALUE(heads_k > 0 ? heads_q % heads_k == 0 : heads_q == 0,
                    "q: the number of query heads must be a multiple of the ", heads_k, " key heads, got ", heads_q,
                    " in shape ", c.q.sizes());
  TORCH_CHECK_VALUE(c.k.size(-1) == c.q.size(-1), "k: expected the head_dim of q (", c.q.size(-1), "), got ",
                    c.k.size(-1), " in shape ", c.k.sizes());
  for (const auto& [name, t] : NamedTensors{{"q", &c.q}, {"v", &c.v}}) {
    TORCH_CHECK_VALUE(t->size(-1) >= 1 && t->size(-1) <= kMaxHeadDim, name, ": head_dim must be in 1..", kMaxHeadDim,
                      ", got ", t->size(-1), " in shape ", t->sizes());
  }
}

void check_options(const AttnCall& c) {
  TORCH_CHECK_VALUE(std::isfinite(c.softmax_scale), "softmax_scale: expected a finite number, got ", c.softmax_scale);
  validate_dropout_p(c.dropout_p);
  TORCH_CHECK_VALUE(c.window_left >= -1 && c.window_right >= -1,
                    "window_size: both sides must be -1 (unbounded) or at least 0, got (", c.window_left, ", ",
                    c.window_right, ")");
  TORCH_CHECK_VALUE(c.max_seqlen_q >= 0, "max_seqlen_q: expected at least 0, got ", c.max_seqlen_q);
  TORCH_CHECK_VALUE(c.max_seqlen_k >= 0, "max_seqlen_k: expected at least 0, got ", c.max_seqlen_k);
  if (!c.sink) return;
  TORCH_CHECK_VALUE(!c.smooth_softmax,
                    "sink: cannot be combined with smooth_softmax=True, which is a sink of 0; give one of them");
  const at::Tensor& sink = *c.sink;
  TORCH_CHECK_TYPE(at::isFloatingType(sink.scalar_type()), "sink: expected a floating point dtype, got ",
                   sink.scalar_type());
  const int64_t heads_q = c.q.size(c.head_axis());
  TORCH_CHECK_VALUE(sink.dim() == 1 && sink.size(0) == heads_q, "sink: expected shape [", heads_q,
                    "], one logit per query head, got ", sink.sizes());
  TORCH_CHECK_VALUE(sink.device() == c.q.device(), "sink: expected the device of q (", c.q.device(), "), got ",
                    sink.device());
}

// On the CPU the values are checked too; on accelerators that would need a synchronisation, and the kernels clamp
// instead.
void check_cu_seqlens(const char* name, const at::Tensor& cu, const AttnCall& c, int64_t total, const char* tensor,
                      int64_t max_seqlen) {
  TORCH_CHECK_TYPE(cu.scalar_type() == at::kInt, name, ": expected dtype int32, got ", cu.scalar_type());
  TORCH_CHECK_VALUE(cu.dim() == 1 && cu.numel() >= 1, name, ": expected shape [batch + 1], got ", cu.sizes());
  TORCH_CHECK_VALUE(cu.device() == c.q.device(), name, ": expected the device of q (", c.q.device(), "), got ",
                    cu.device());
  if (!cu.is_cpu()) return;
  const at::Tensor flat = cu.contiguous();
  const int32_t* values = flat.const_data_ptr<int32_t>();
  const int64_t count = flat.numel();
  TORCH_CHECK_VALUE(values[0] == 0, name, ": must start at 0, got ", values[0]);
  for (int64_t b = 1; b < count; ++b) {
    TORCH_CHECK_VALUE(values[b] >= values[b - 1], name, ": must not decrease, got ", values[b - 1], " then ", values[b],
                      " at index ", b);
  }
  TORCH_CHECK_VALUE(values[count - 1] <= total, name, ": must end within the ", total, " rows of ", tensor, ", got ",
                    values[count - 1]);
  for (int64_t b = 1; b < count; ++b) {
    const int64_t length = values[b] - values[b - 1];
    TORCH_CHECK_VALUE(length <= max_seqlen, "max_seqlen_", tensor, ": expected at least the length ", length,
                      " of sequence ", b - 1, ", got ", max_seqlen);
  }
}

}  // namespace

void validate_dropout_p(double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p < 1, "dropout_p: expected a probability in [0, 1), got ", dropout_p);
}

void validate(const AttnCall& c) {
  TORCH_CHECK_VALUE(c.cu_seqlens_q.has_value() == c.cu_seqlens_k.has_value(),
                    "cu_seqlens: cu_seqlens_q and cu_seqlens_k must be given together");
  check_tensor_kinds(c);
  check_sizes(c);
  check_options(c);
  if (!c.is_varlen()) return;
  check_cu_seqlens("cu_seqlens_q", *c.cu_seqlens_q, c, c.q.size(0), "q", c.max_seqlen_q);
  check_cu_seqlens("cu_seqlens_k", *c.cu_seqlens_k, c, c.k.size(0), "k", c.max_seqlen_k);
  TORCH_CHECK_VALUE(c.cu_seqlens_k->numel() == c.cu_seqlens_q->numel(),
                    "cu_seqlens_k: expected the length of cu_seqlens_q (", c.cu_seqlens_q->numel(), "), got ",
                    c.cu_seqlens_k->numel());
}

void validate(const AttnCall& c, const BackwardCall& b) {
  validate(c);
  std::vector<int64_t> out_shape = c.q.sizes().vec();
  out_shape.back() = c.v.size(-1);
  const int64_t rows = c.q.size(c.row_dim()), heads = c.q.size(c.head_axis());
  const std::vector<int64_t> lse_shape =
      c.is_varlen() ? std::vector<int64_t>{heads, rows} : std::vector<int64_t>{c.q.size(0), heads, rows};
  auto check = [&c](const char* name, const at::Tensor& t, at::IntArrayRef shape, at::ScalarType dtype) {
    TORCH_CHECK_VALUE(t.sizes() == shape, name, ": expected shape ", shape, ", got ", t.sizes());
    TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, ": expected dtype ", dtype, ", got ", t.scalar_type());
    TORCH_CHECK_VALUE(t.device() == c.q.device(), name, ": expected the device of q (", c.q.device(), "), got ",
                      t.device());
  };
  if (b.dout) check("dout", *b.dout, out_shape, c.q.scalar_type());
  if (b.dlse) check("dlse", *b.dlse, lse_shape, c.statistics_dtype());
  check("out", b.out, out_shape, c.q.scalar_type());
  check("lse", b.lse, lse_shape, c.statistics_dtype());
  check("rng_state", b.rng_state, c.rng_state_shape(), at::kLong);
}

}  // namespace flashattn_ext
