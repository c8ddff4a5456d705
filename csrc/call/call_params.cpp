#include "call/call_params.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

#include "rules/dropout.h"
#include "rules/mask.h"
#include "rules/score.h"
#include "tensors/huge_pages.h"
#include "tensors/mask_extremes.h"

namespace flashattn_ext {

at::Tensor with_readable_rows(const at::Tensor& t, int64_t row_dim, const Backend& backend) {
  const bool overlaps = row_dim >= 0 && t.size(row_dim) > 1 && t.stride(row_dim) < t.size(-1);
  const bool copies_rows = overlaps && !backend.reads_overlapping_rows;
  if (!copies_rows && (t.stride(-1) == 1 || t.size(-1) <= 1)) return t;
  at::Tensor distinct = t;
  for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) {
    if (t.stride(dim) == 0 && t.size(dim) > 1 && !(copies_rows && dim == row_dim))
      distinct = distinct.narrow(dim, 0, 1);
  }
  return distinct.contiguous().expand(t.sizes());
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

TensorView row_numbers_view_of(const AttnCall& c, const at::Tensor& t) {
  const int heads = c.is_varlen() ? 0 : 1;
  return {const_cast<void*>(t.const_data_ptr()), c.is_varlen() ? 0 : t.stride(0), t.stride(heads + 1), t.stride(heads)};
}

DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8;
    default:
      return DType::kFloat32;
  }
}

namespace {

// A contiguous tensor, aligned for loads of `bytes` bytes.
at::Tensor aligned(const at::Tensor& t, size_t bytes) {
  const at::Tensor whole = t.contiguous();
  return reinterpret_cast<uintptr_t>(whole.const_data_ptr()) % bytes ? whole.clone() : whole;
}

// The stride of a dimension; 0 where the tensor is broadcast.
int64_t shared_stride(const at::Tensor& t, int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

BiasView bias_view_of(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), dtype_of(t.scalar_type()), shared_stride(t, 0), shared_stride(t, 1),
          shared_stride(t, 2)};
}

DescaleView descale_view_of(const std::optional<at::Tensor>& t) {
  if (!t) return {};
  return {t->const_data_ptr<float>(), shared_stride(*t, 0), shared_stride(*t, 1)};
}

// Needs seqlen_q and seqlen_k.
void set_blocks(const at::Tensor& lists, const at::Tensor& bits, AttnParams* p) {
  BlockMaskView& view = p->blocks;
  view.lists = lists.const_data_ptr<int32_t>();
  view.bits = reinterpret_cast<const uint32_t*>(bits.const_data_ptr<int32_t>());
  view.heads = lists.size(1);
  view.head_stride = lists.size(2);
  view.batch_stride = lists.size(0) == 1 ? 0 : view.heads * view.head_stride;
  view.entries = (lists.size(2) - mask_start_words(p->seqlen_q, p->seqlen_k)) / 4;
  view.partial_blocks = bits.size(0);
}

// Sets the pointers of the tensors that change the logits.
void set_scores(const AttnCall& c, AttnParams* p) {
  if (c.alibi_slopes) {
    p->alibi_slopes = c.alibi_slopes->const_data_ptr();
    p->alibi_batch_stride = c.alibi_slopes->dim() == 2 ? c.alibi_slopes->size(1) : 0;
  }
  if (c.relative_bias) {
    p->relative_bias = c.relative_bias->const_data_ptr();
    p->relative_reach = c.relative_bias->size(1) / 2;
  }
  if (c.bias) p->bias = bias_view_of(*c.bias);
  if (c.mask_lists) set_blocks(*c.mask_lists, *c.mask_bits, p);
  if (!c.mask_intervals) return;
  const at::Tensor &intervals = *c.mask_intervals, &extremes = *c.mask_extremes;
  IntervalView& view = p->intervals;
  view.data = intervals.const_data_ptr<int32_t>();
  view.heads = intervals.size(-3);
  view.head_stride = intervals.size(-2);
  view.extremes = extremes.const_data_ptr<int32_t>();
  view.extremes_head_stride = extremes.size(-2);
  if (c.is_varlen() || intervals.size(0) == 1) return;
  view.batch_stride = view.heads * view.head_stride;
  view.extremes_batch_stride = view.heads * view.extremes_head_stride;
}

}  // namespace

AttnCall readable(AttnCall c, const Backend& backend) {
  for (at::Tensor* t : {&c.q, &c.k, &c.v}) *t = with_readable_rows(*t, c.row_dim(), backend);
  if (c.is_varlen()) {
    c.cu_seqlens_q = c.cu_seqlens_q->contiguous();
    c.cu_seqlens_k = c.cu_seqlens_k->contiguous();
  }
  const auto as_statistics = [&c](std::optional<at::Tensor>* t) {
    if (*t) *t = (*t)->to(c.statistics_dtype()).contiguous();
  };
  as_statistics(&c.sink);
  as_statistics(&c.alibi_slopes);
  as_statistics(&c.relative_bias);
  if (c.bias) {
    const bool widens = c.q.scalar_type() == at::kDouble;
    c.bias = with_readable_rows(widens ? c.bias->to(at::kDouble) : *c.bias, -1, backend);
  }
  if (c.mask_intervals) {
    const Origin origin = origin_of(c.origin);
    if (origin.row > 0) {  // intervals count rows of the larger call; kernels count rows of this call
      c.mask_intervals = c.mask_intervals->clamp_min(0).sub(origin.row);
      c.mask_extremes = mask_extremes(*c.mask_intervals);
    }
    c.mask_intervals = aligned(*c.mask_intervals, 2 * sizeof(int32_t));
    c.mask_extremes = aligned(*c.mask_extremes, sizeof(IntervalExtremes));
  }
  if (c.mask_lists) {
    c.mask_lists = aligned(*c.mask_lists, 4 * sizeof(int32_t));
    c.mask_bits = aligned(*c.mask_bits, 4 * sizeof(int32_t));
  }
  return c;
}

Origin origin_of(const std::optional<std::vector<c10::SymInt>>& given) {
  Origin origin;
  if (!given) return origin;
  const std::vector<c10::SymInt>& place = *given;
  origin.batch = place[0].expect_int();
  origin.head = place[1].expect_int();
  if (place.size() == 2) return origin;
  origin.row = place[2].expect_int();
  origin.key = place[3].expect_int();
  const int64_t shift = place.size() > 4 ? place[4].expect_int() : 0;
  origin.shift = static_cast<int32_t>(origin.row + shift - origin.key);
  origin.length_mask = 0;
  return origin;
}

void set_options(const AttnCall& c, AttnParams* params) {
  AttnParams& p = *params;
  p.dtype = dtype_of(c.q.scalar_type());
  p.is_fp8 = c.is_fp8();
  p.out_dtype = dtype_of(c.dtype_of_out());
  p.batch = c.is_varlen() ? c.cu_seqlens_q->numel() - 1 : c.q.size(0);
  p.seqlen_q = c.is_varlen() ? c.max_seqlen_q.expect_int() : c.q.size(c.row_dim());
  p.seqlen_k = c.is_varlen() ? c.max_seqlen_k.expect_int() : c.k.size(c.row_dim());
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
  p.window_left = c.window_left.expect_int();
  p.window_right = c.causal ? 0 : c.window_right.expect_int();  // causal caps the right side, and no side is below 0
  p.softmax_scale = c.softmax_scale.expect_float();
#define CALL_SCORE(name, off, takers, accepts, expected, effective) \
  {                                                                 \
    const double value = c.name.expect_float();                     \
    p.name = effective;                                             \
  }
  FLASHATTN_SCORE_OPTIONS(CALL_SCORE)
#undef CALL_SCORE
  set_scores(c, &p);
  p.has_sink = c.smooth_softmax || c.sink;
  p.dropout_threshold = dropout_threshold(c.dropout_p.expect_float());
  p.deterministic = c.deterministic;
  p.invariant = c.invariant;
  p.origin = origin_of(c.origin);
}

void set_memory(const AttnCall& c, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& rng_state,
                AttnParams* p) {
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
  p->descale_q = descale_view_of(c.descale_q);
  p->descale_k = descale_view_of(c.descale_k);
  p->descale_v = descale_view_of(c.descale_v);
  set_scores(c, p);
  p->rng_state = rng_state.defined() ? rng_state.const_data_ptr<int64_t>() : nullptr;
}

void set_rows_of_no_sequence(const std::optional<at::Tensor>& cu_seqlens, const at::Tensor& t, int64_t row_dim,
                             double value) {
  if (!cu_seqlens) return;
  const int64_t begin = cu_seqlens->is_cpu() ? cu_seqlens->const_data_ptr<int32_t>()[cu_seqlens->numel() - 1] : 0;
  if (begin < t.size(row_dim)) t.narrow(row_dim, begin, t.size(row_dim) - begin).fill_(value);
}

void set_rows_of_no_sequence(const AttnCall& c, const at::Tensor& out, const at::Tensor& lse) {
  set_rows_of_no_sequence(c.cu_seqlens_q, out, c.row_dim(), 0);
  set_rows_of_no_sequence(c.cu_seqlens_q, lse, 1, -std::numeric_limits<double>::infinity());
}

at::Tensor new_row_maxima(const AttnCall& c, bool wanted, AttnParams* params) {
  if (!wanted) return {};
  const at::Tensor maxima = at::empty_symint(c.lse_shape(), c.q.options().dtype(c.statistics_dtype()));
  params->row_maxima = row_view_of(c, maxima);
  return maxima;
}

namespace {

at::TensorOptions max_logits_options(const AttnCall& c) { return c.q.options().dtype(at::kFloat); }

// Reduces row maxima to one maximum per sequence: [Hq, total_q] to [sequences, Hq]. The host cannot read cu_seqlens of
// an accelerator, so rows of no sequence, which no kernel writes, go to one more sequence, which is dropped.
at::Tensor largest_of_sequences(const AttnCall& c, const at::Tensor& row_maxima) {
  const int64_t sequences = c.cu_seqlens_q->numel() - 1, heads = row_maxima.size(0);
  const at::Tensor rows = at::arange(row_maxima.size(1), c.cu_seqlens_q->options());
  const at::Tensor ends = c.cu_seqlens_q->narrow(0, 1, sequences).contiguous();
  const at::Tensor sequence_of = at::searchsorted(ends, rows, /*out_int32=*/false, /*right=*/true)
                                     .masked_fill_(rows.lt(c.cu_seqlens_q->select(0, 0)), sequences);
  const at::Tensor largest =
      at::full({heads, sequences + 1}, -std::numeric_limits<double>::infinity(), row_maxima.options());
  largest.scatter_reduce_(1, sequence_of.expand(row_maxima.sizes()), row_maxima, "amax");
  return largest.narrow(1, 0, sequences).t();
}

}  // namespace

at::Tensor largest_of_rows_meta(const AttnCall& c, bool wanted) {
  return wanted ? at::empty_symint(c.max_logits_shape(), max_logits_options(c)) : at::empty({0}, max_logits_options(c));
}

at::Tensor largest_of_rows(const AttnCall& c, const at::Tensor& row_maxima, const AttnParams& params,
                           const Backend& backend) {
  const at::Tensor results = largest_of_rows_meta(c, row_maxima.defined());
  if (results.numel() == 0) return results;
  if (backend.max_logits) {
    backend.max_logits(params, results.data_ptr<float>());
    return results;
  }
  if (row_maxima.numel() == 0) return results.fill_(-std::numeric_limits<double>::infinity());
  return results.copy_(c.is_varlen() ? largest_of_sequences(c, row_maxima) : row_maxima.amax(-1));
}

namespace {

at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::Tensor t = at::empty(sizes, options);
  ask_for_huge_pages(t);
  return t;
}

at::Tensor as_dtype(const at::Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  return empty_in_huge_pages(t.sizes(), t.options().dtype(dtype)).copy_(t);
}

}  // namespace

BiasGradients bias_gradient_buffers(const AttnCall& c, const BackwardCall& b, const Backend& backend,
                                    const AttnGradParams* params) {
  const auto sums = c.q.options().dtype(c.statistics_dtype());
  BiasGradients buffers;
  if (c.alibi_slopes && b.needs_dalibi_slopes) buffers.alibi_slopes = at::zeros(c.alibi_slopes->sizes(), sums);
  if (c.relative_bias && b.needs_drelative_bias) buffers.relative_bias = at::zeros(c.relative_bias->sizes(), sums);
  if (!c.bias || !b.needs_dbias) return buffers;
  const std::vector<int64_t> scores{c.q.size(0), c.q.size(c.head_axis()), c.q.size(c.row_dim()), c.bias->size(3)};
  if (c.bias->sizes() == scores) {
    buffers.bias = empty_in_huge_pages(scores, c.bias->options());
    if (params && backend.writes_bias_gradient) {
      AttnGradParams p = *params;
      set_memory(buffers, &p);
      if (backend.writes_bias_gradient(p)) return buffers;
    }
    buffers.bias.zero_();
  } else {
    const bool in_order = &backend == &cpu_backend();  // the CPU backend adds in a fixed order
    const at::IntArrayRef sizes = c.deterministic && !in_order ? at::IntArrayRef(scores) : c.bias->sizes();
    buffers.bias = empty_in_huge_pages(sizes, sums).zero_();
  }
  return buffers;
}

void set_memory(const BiasGradients& gradients, AttnGradParams* p) {
  if (gradients.alibi_slopes.defined()) p->dalibi_slopes = gradients.alibi_slopes.data_ptr();
  if (gradients.relative_bias.defined()) p->drelative_bias = gradients.relative_bias.data_ptr();
  if (gradients.bias.defined()) p->dbias = bias_view_of(gradients.bias);
}

BiasGradients finished(const BiasGradients& sums, const AttnCall& given) {
  const auto of = [&given](const at::Tensor& sum, const std::optional<at::Tensor>& input) {
    if (!sum.defined()) return at::empty({0}, given.q.options().dtype(given.statistics_dtype()));
    return as_dtype(at::sum_to(sum, input->sizes()), input->scalar_type());
  };
  return {
#define CALL_BIAS(name, dims, takers, check) of(sums.name, given.name),
#include "call/options.def"
  };
}

BiasGradients finished_meta(const AttnCall& given, const BackwardCall& b) {
  const auto of = [&given](bool needed, const std::optional<at::Tensor>& input) {
    if (!needed || !input) return at::empty({0}, given.q.options().dtype(given.statistics_dtype()));
    return at::empty_symint(input->sym_sizes(), input->options());
  };
  return {
#define CALL_BIAS(name, dims, takers, check) of(b.needs_d##name, given.name),
#include "call/options.def"
  };
}

}  // namespace flashattn_ext
