#include "call/validate.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <vector>

#include "tensors/dtype_name.h"
#include "tensors/mask_extremes.h"

namespace flashattn_ext {
namespace {

using NamedTensors = std::initializer_list<std::pair<const char*, const at::Tensor*>>;

std::string layout_of(const AttnCall& c) {
  if (c.is_varlen()) return "[total, heads, head_dim]";
  return c.bhsd ? "[batch, heads, seqlen, head_dim]" : "[batch, seqlen, heads, head_dim]";
}

}  // namespace

bool holds(const c10::SymBool& condition) {
  const std::optional<bool> known = condition.maybe_as_bool();  // inline, unlike expect_true
  return known ? *known : condition.expect_true(__FILE__, __LINE__);
}

bool has_shape(const at::Tensor& t, c10::SymIntArrayRef shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  for (int64_t dim = 0; same && dim < t.dim(); ++dim) same = holds(t.sym_size(dim).sym_eq(shape[dim]));
  return same;
}

void check_device(const char* name, const at::Tensor& t, const at::Tensor& q) {
  TORCH_CHECK_VALUE(t.device() == q.device(), name, ": expected the device of q (", q.device(), "), got ", t.device());
}

void check_dtype_of_q(const AttnCall& c) {
  const at::ScalarType dtype = c.q.scalar_type();
  TORCH_CHECK_TYPE(dtype != at::kFloat8_e5m2 && dtype != at::kFloat8_e5m2fnuz && dtype != at::kFloat8_e4m3fnuz,
                   "q: expected dtype float8_e4m3fn where inputs are fp8, got ", dtype_name(dtype),
                   "; flashattn_ext.quantize_fp8 makes float8_e4m3fn from the values");
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble ||
                       dtype == at::kFloat8_e4m3fn,
                   "q: expected dtype float16, bfloat16, float32, float8_e4m3fn or (CPU only) float64, got ",
                   dtype_name(dtype));
  // On an NPU the backend itself refuses float64.
  TORCH_CHECK_TYPE(dtype != at::kDouble || c.q.is_cpu() || c.q.is_meta() || c.q.is_privateuseone(),
                   "q: float64 is supported on the CPU only, got a tensor on ", c.q.device(), "; use float32 there");
}

namespace {

// `name`: descale_q, descale_k or descale_v.
void check_descale(const char* name, const std::optional<at::Tensor>& given, const AttnCall& c,
                   const c10::SymInt& heads_k) {
  if (!given) return;
  const at::Tensor& t = *given;
  TORCH_CHECK_VALUE(c.is_fp8(), name, ": expected None for keys and values of dtype ", dtype_name(c.k.scalar_type()),
                    ", because only float8_e4m3fn has descales; give it together with float8_e4m3fn inputs");
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, name, ": expected dtype float32, got ", dtype_name(t.scalar_type()));
  const auto fits = [&t](int64_t dim, const c10::SymInt& size) {
    return holds(t.sym_size(dim).sym_eq(1).sym_or(t.sym_size(dim).sym_eq(size)));
  };
  TORCH_CHECK_VALUE(t.dim() == 2 && fits(0, c.batch()) && fits(1, heads_k), name, ": expected shape [", c.batch(),
                    " or 1, ", heads_k, " or 1] (batch, KV heads), got ", t.sym_sizes());
  check_device(name, t, c.q);
}

}  // namespace

void check_fp8(const AttnCall& c, const c10::SymInt& heads_k) {
  check_descale("descale_q", c.descale_q, c, heads_k);
  check_descale("descale_k", c.descale_k, c, heads_k);
  check_descale("descale_v", c.descale_v, c, heads_k);
  TORCH_CHECK_VALUE(!c.descale_q || c.q.scalar_type() == at::kFloat8_e4m3fn, "descale_q: expected None for q of dtype ",
                    dtype_name(c.q.scalar_type()), ", because only float8_e4m3fn has descales");
  if (c.out_dtype) {
    TORCH_CHECK_VALUE(c.is_fp8(), "out_dtype: expected None for keys and values of dtype ",
                      dtype_name(c.k.scalar_type()), ", because out has the dtype of q there; convert out instead");
    TORCH_CHECK_TYPE(*c.out_dtype == at::kBFloat16 || *c.out_dtype == at::kHalf || *c.out_dtype == at::kFloat,
                     "out_dtype: expected bfloat16, float16 or float32, got ", dtype_name(*c.out_dtype));
  }
  if (!c.is_fp8()) return;
  constexpr char kInstead[] = " is not implemented for float8_e4m3fn inputs; convert q, k and v to bfloat16";
  TORCH_CHECK_NOT_IMPLEMENTED(c.dropout_p.is_symbolic() || c.dropout_p.expect_float() == 0, "dropout_p: dropout",
                              kInstead);
  TORCH_CHECK_NOT_IMPLEMENTED(!c.alibi_slopes, "alibi_slopes: a bias", kInstead);
  TORCH_CHECK_NOT_IMPLEMENTED(!c.relative_bias, "relative_bias: a bias", kInstead);
  TORCH_CHECK_NOT_IMPLEMENTED(!c.bias, "bias: a bias", kInstead);
  TORCH_CHECK_NOT_IMPLEMENTED(!c.mask_lists, "mask: a BlockMask", kInstead);
}

void check_has_derivatives(const AttnCall& c) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c.is_fp8(),
      "q: inputs of float8_e4m3fn have no backward and no other derivatives; convert q, k and v "
      "to bfloat16 for them");
}

void refuse_derivatives_of_fp8(const AttnCall& c) {
  validate(c);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "q: inputs of float8_e4m3fn have no derivatives (no backward, no forward mode), and a tensor of the call "
      "requires "
      "a gradient or has a tangent; call under torch.no_grad(), or convert q, k and v to bfloat16");
}

void check_head_dim(const char* name, const at::Tensor& t) {
  const c10::SymInt head_dim = t.sym_size(-1);
  TORCH_CHECK_VALUE(holds(head_dim.sym_ge(1)) && holds(head_dim.sym_le(kLargestHeadDim)), name,
                    ": head_dim must be in 1..", kLargestHeadDim, ", got ", head_dim, " in shape ", t.sym_sizes());
}

void check_groups(const at::Tensor& q, const c10::SymInt& heads_q, const c10::SymInt& heads_k) {
  TORCH_CHECK_VALUE(heads_k > 0 ? heads_q % heads_k == 0 : heads_q == 0,
                    "q: the number of query heads must be a multiple of the ", heads_k, " KV heads, got ", heads_q,
                    " in shape ", q.sym_sizes());
}

namespace {

void check_tensor_kinds(const AttnCall& c) {
  const int64_t rank = c.is_varlen() ? 3 : 4;
  const at::ScalarType dtype = c.q.scalar_type();
  check_dtype_of_q(c);
  for (const auto& [name, t] : NamedTensors{{"q", &c.q}, {"k", &c.k}, {"v", &c.v}}) {
    TORCH_CHECK_VALUE(t->dim() == rank, name, ": expected ", rank, " dimensions ", layout_of(c), ", got shape ",
                      t->sym_sizes());
    TORCH_CHECK_TYPE(t->scalar_type() == dtype, name, ": expected the dtype of q (", dtype_name(dtype), "), got ",
                     dtype_name(t->scalar_type()));
    check_device(name, *t, c.q);
  }
}

void check_size(const char* name, const at::Tensor& t, int64_t dim, const c10::SymInt& expected, const char* what) {
  TORCH_CHECK_VALUE(holds(t.sym_size(dim).sym_eq(expected)), name, ": expected the ", what, " (", expected, "), got ",
                    t.sym_size(dim), " in shape ", t.sym_sizes());
}

void check_sizes(const AttnCall& c) {
  const int64_t heads = c.head_axis(), rows = c.row_dim();
  if (!c.is_varlen()) {
    check_size("k", c.k, 0, c.q.sym_size(0), "batch size of q");
    check_size("v", c.v, 0, c.q.sym_size(0), "batch size of q");
  }
  check_size("v", c.v, rows, c.k.sym_size(rows), "length of k");
  check_size("v", c.v, heads, c.k.sym_size(heads), "number of heads of k");
  const c10::SymInt heads_q = c.q.sym_size(heads), heads_k = c.k.sym_size(heads);
  check_groups(c.q, heads_q, heads_k);
  check_size("k", c.k, -1, c.q.sym_size(-1), "head_dim of q");
  check_head_dim("q", c.q);
  check_head_dim("v", c.v);
}

}  // namespace

#define CALL_NUMBER(name, default_value, takers, accepts, expected) \
  void check_##name(const c10::SymFloat& given) {                   \
    if (given.is_symbolic()) return;                                \
    [[maybe_unused]] const double value = given.expect_float();     \
    TORCH_CHECK_VALUE(accepts, expected ", got ", given);           \
  }
#include "call/options.def"

void check_numbers(const AttnCall& c) {
#define CALL_NUMBER(name, default_value, takers, accepts, expected) check_##name(c.name);
#define CALL_INTEGER(name, default_value, takers, accepts, expected) \
  {                                                                  \
    const c10::SymInt& value = c.name;                               \
    TORCH_CHECK_VALUE(holds(accepts), expected ", got ", value);     \
  }
#define CALL_INTEGERS(name, takers, check) check(c.name);
#include "call/options.def"
}

namespace {

void check_sink(const AttnCall& c) {
  TORCH_CHECK_VALUE(!c.smooth_softmax,
                    "sink: cannot be combined with smooth_softmax=True, which is a sink of 0; give one of them");
  const at::Tensor& sink = *c.sink;
  TORCH_CHECK_TYPE(at::isFloatingType(sink.scalar_type()), "sink: expected a floating point dtype, got ",
                   dtype_name(sink.scalar_type()));
  const c10::SymInt heads_q = c.q.sym_size(c.head_axis());
  TORCH_CHECK_VALUE(sink.dim() == 1 && holds(sink.sym_size(0).sym_eq(heads_q)), "sink: expected shape [", heads_q,
                    "], one logit per query head, got ", sink.sym_sizes());
  check_device("sink", sink, c.q);
}

bool is_either(const c10::SymInt& size, const c10::SymInt& one, const c10::SymInt& other) {
  return holds(size.sym_eq(one).sym_or(size.sym_eq(other)));
}

void check_alibi_slopes(const AttnCall& c) {
  const at::Tensor& slopes = *c.alibi_slopes;
  const c10::SymInt heads_q = c.q.sym_size(c.head_axis()), batch = c.batch();
  TORCH_CHECK_TYPE(slopes.scalar_type() == at::kFloat || slopes.scalar_type() == c.statistics_dtype(),
                   "alibi_slopes: expected dtype float32", c.q.scalar_type() == at::kDouble ? " or float64" : "",
                   ", got ", dtype_name(slopes.scalar_type()));
  const bool of_batch = slopes.dim() == 2 && holds(slopes.sym_size(0).sym_eq(batch));
  TORCH_CHECK_VALUE((slopes.dim() == 1 || of_batch) && holds(slopes.sym_size(-1).sym_eq(heads_q)),
                    "alibi_slopes: expected shape [", heads_q, "] or [", batch, ", ", heads_q,
                    "], one slope per query head, got ", slopes.sym_sizes());
  check_device("alibi_slopes", slopes, c.q);
}

void check_relative_bias(const AttnCall& c) {
  const at::Tensor& relative = *c.relative_bias;
  const c10::SymInt heads_q = c.q.sym_size(c.head_axis());
  TORCH_CHECK_TYPE(at::isFloatingType(relative.scalar_type()), "relative_bias: expected a floating point dtype, got ",
                   dtype_name(relative.scalar_type()));
  TORCH_CHECK_VALUE(relative.dim() == 2 && holds(relative.sym_size(0).sym_eq(heads_q)),
                    "relative_bias: expected shape [", heads_q, ", 2 L + 1], a row per query head, got ",
                    relative.sym_sizes());
  TORCH_CHECK_VALUE(
      holds((relative.sym_size(1) % 2).sym_eq(1)),
      "relative_bias: expected an odd number of entries per head, one for each distance from -L to L, got ",
      relative.sym_size(1), " in shape ", relative.sym_sizes());
  check_device("relative_bias", relative, c.q);
}

void check_bias(const AttnCall& c) {
  const at::Tensor& bias = *c.bias;
  TORCH_CHECK_VALUE(!c.is_varlen(), "bias: expected None in a packed call, got shape ", bias.sym_sizes(),
                    "; use alibi_slopes, relative_bias or mask there, or padded sequences in forward()");
  TORCH_CHECK_TYPE(bias.scalar_type() == at::kFloat || bias.scalar_type() == c.q.scalar_type(),
                   "bias: expected dtype float32 or the dtype of q (", dtype_name(c.q.scalar_type()), "), got ",
                   dtype_name(bias.scalar_type()));
  const c10::SymInt batch = c.batch(), heads_q = c.q.sym_size(c.head_axis()), rows = c.q.sym_size(c.row_dim()),
                    keys = c.k.sym_size(c.row_dim());
  TORCH_CHECK_VALUE(bias.dim() == 4 && is_either(bias.sym_size(0), batch, 1) &&
                        is_either(bias.sym_size(1), heads_q, 1) && is_either(bias.sym_size(2), rows, 1) &&
                        holds(bias.sym_size(3).sym_eq(keys)),
                    "bias: expected shape [", batch, " or 1, ", heads_q, " or 1, ", rows, " or 1, ", keys, "], got ",
                    bias.sym_sizes());
  check_device("bias", bias, c.q);
}

}  // namespace

void check_intervals(const AttnCall& c, const std::optional<c10::SymInt>& keys) {
  const at::Tensor& intervals = *c.mask_intervals;
  TORCH_CHECK_TYPE(intervals.scalar_type() == at::kInt, "mask: expected intervals of dtype int32, got ",
                   dtype_name(intervals.scalar_type()));
  check_device("mask", intervals, c.q);
  const c10::SymInt heads_q = c.q.sym_size(c.head_axis()), heads_k = c.k.sym_size(c.head_axis());
  const auto heads_fit = [&](const c10::SymInt& heads) {
    return holds(heads.sym_eq(1).sym_or(heads.sym_eq(heads_k)).sym_or(heads.sym_eq(heads_q)));
  };
  const bool fits = intervals.dim() == (c.is_varlen() ? 3 : 4) && heads_fit(intervals.sym_size(-3)) &&
                    (c.is_varlen() || is_either(intervals.sym_size(0), c.batch(), 1)) &&
                    (!keys || holds(intervals.sym_size(-2).sym_eq(*keys))) && holds(intervals.sym_size(-1).sym_eq(2));
  if (c.is_varlen()) {
    TORCH_CHECK_VALUE(fits, "mask: expected intervals of shape [1 or ", heads_k, " or ", heads_q, ", ", *keys,
                      ", 2] (heads, keys of all sequences, first and last), got ", intervals.sym_sizes());
  } else {
    TORCH_CHECK_VALUE(fits, "mask: expected intervals of shape [", c.batch(), " or 1, 1 or ", heads_k, " or ", heads_q,
                      ", ", keys ? c10::str(*keys) : "keys", ", 2] (batch, heads, ",
                      keys ? "keys" : "the last keys of each sequence", ", first and last), got ",
                      intervals.sym_sizes());
  }
}

namespace {

void check_mask(const AttnCall& c) {
  const at::Tensor &intervals = *c.mask_intervals, &extremes = *c.mask_extremes;
  check_intervals(c, c.k.sym_size(c.row_dim()));
  const std::vector<c10::SymInt> shape = mask_extremes_shape(intervals);
  TORCH_CHECK_VALUE(
      extremes.scalar_type() == at::kInt && extremes.device() == intervals.device() && has_shape(extremes, shape),
      "mask_extremes: expected the result of flashattn_ext::mask_extremes for mask_intervals, int32 ",
      c10::SymIntArrayRef(shape), " on ", intervals.device(), ", got ", dtype_name(extremes.scalar_type()), " ",
      extremes.sym_sizes(), " on ", extremes.device());
}

}  // namespace

void check_tensors(const AttnCall& c) {
  const auto checked_together = [](const AttnCall&) {};  // by validate()
#define CALL_TENSOR(name, dims, takers, check) \
  if (c.name) check(c);
#define CALL_LEARNED CALL_TENSOR
#define CALL_BIAS CALL_TENSOR
#include "call/options.def"
}

void check_cu_seqlens(const char* name, const at::Tensor& cu, const AttnCall& c, const char* tensor,
                      const at::Tensor* packed, const c10::SymInt& longest) {
  TORCH_CHECK_TYPE(cu.scalar_type() == at::kInt, name, ": expected dtype int32, got ", dtype_name(cu.scalar_type()));
  TORCH_CHECK_VALUE(cu.dim() == 1 && holds(cu.sym_size(0).sym_ge(1)), name, ": expected shape [batch + 1], got ",
                    cu.sym_sizes());
  check_device(name, cu, c.q);
  if (!cu.is_cpu() || at::isTensorSubclassLike(cu)) return;
  const int64_t max_seqlen = longest.expect_int();
  const at::Tensor flat = cu.contiguous();
  const int32_t* values = flat.const_data_ptr<int32_t>();
  const int64_t count = flat.numel();
  TORCH_CHECK_VALUE(values[0] == 0, name, ": must start at 0, got ", values[0]);
  for (int64_t b = 1; b < count; ++b) {
    TORCH_CHECK_VALUE(values[b] >= values[b - 1], name, ": must not decrease, got ", values[b - 1], " then ", values[b],
                      " at index ", b);
  }
  TORCH_CHECK_VALUE(!packed || values[count - 1] <= packed->size(0), name, ": must end within the ", packed->size(0),
                    " rows of ", tensor, ", got ", values[count - 1]);
  for (int64_t b = 1; b < count; ++b) {
    const int64_t length = values[b] - values[b - 1];
    TORCH_CHECK_VALUE(length <= max_seqlen, "max_seqlen_", tensor, ": expected at least the length ", length,
                      " of sequence ", b - 1, ", got ", max_seqlen);
  }
}

void check_origin(const std::optional<std::vector<c10::SymInt>>& origin) {
  if (!origin) return;
  // Sums of two positions must fit into 32 bits, which some kernels use.
  constexpr int64_t kLargest = int64_t{1} << 29;
  const std::vector<c10::SymInt>& place = *origin;
  TORCH_CHECK_VALUE(
      place.size() == 2 || place.size() == 4 || place.size() == 5,
      "origin: expected None, (batch, head) or (batch, head, row, key), the latter with shift as a fifth or ",
      "without, got ", place.size(), " numbers");
  for (size_t i = 0; i < std::min<size_t>(place.size(), 4); ++i)
    TORCH_CHECK_VALUE(holds(place[i].sym_ge(0)) && holds(place[i].sym_le(kLargest)),
                      "origin: expected numbers from 0 to 2^29, got ", place);
  if (place.size() < 5) return;
  const c10::SymInt position = place[2] + place[4] - place[3];
  TORCH_CHECK_VALUE(holds(position.sym_ge(-kLargest)) && holds(position.sym_le(kLargest)),
                    "origin: expected row + shift - key from -2^29 to 2^29, got ", place);
}

void validate_rng_state(const std::optional<at::Tensor>& given, const c10::SymFloat& dropout_p,
                        const at::Tensor& device_of) {
  const bool drops = !dropout_p.is_symbolic() && dropout_p.expect_float() > 0;
  if (!given) {
    TORCH_CHECK_VALUE(!drops, "rng_state: expected a tensor, {seed, offset}, for a call with dropout, got None");
    return;
  }
  const at::Tensor& rng_state = *given;
  TORCH_CHECK_TYPE(rng_state.scalar_type() == at::kLong, "rng_state: expected dtype int64, got ",
                   dtype_name(rng_state.scalar_type()));
  check_device("rng_state", rng_state, device_of);
  if (!drops) return;
  TORCH_CHECK_VALUE(rng_state.dim() == 1 && holds(rng_state.sym_size(0).sym_eq(2)),
                    "rng_state: expected shape [2], {seed, offset}, for a call with dropout, got ",
                    rng_state.sym_sizes());
}

void validate(const AttnCall& c) {
  TORCH_CHECK_VALUE(c.cu_seqlens_q.has_value() == c.cu_seqlens_k.has_value(),
                    "cu_seqlens: cu_seqlens_q and cu_seqlens_k must be given together");
  check_tensor_kinds(c);
  check_sizes(c);
  check_numbers(c);
  if (c.is_varlen()) {
    check_cu_seqlens("cu_seqlens_q", *c.cu_seqlens_q, c, "q", &c.q, c.max_seqlen_q);
    check_cu_seqlens("cu_seqlens_k", *c.cu_seqlens_k, c, "k", &c.k, c.max_seqlen_k);
    TORCH_CHECK_VALUE(holds(c.cu_seqlens_k->sym_size(0).sym_eq(c.cu_seqlens_q->sym_size(0))),
                      "cu_seqlens_k: expected the length of cu_seqlens_q (", c.cu_seqlens_q->sym_size(0), "), got ",
                      c.cu_seqlens_k->sym_size(0));
  }
  check_tensors(c);
  check_fp8(c, c.k.sym_size(c.head_axis()));
  TORCH_CHECK_VALUE(c.mask_intervals.has_value() == c.mask_extremes.has_value(),
                    "mask: mask_intervals and mask_extremes must be given together");
  if (c.mask_intervals) check_mask(c);
  TORCH_CHECK_VALUE(c.mask_lists.has_value() == c.mask_bits.has_value(),
                    "mask: mask_lists and mask_bits must be given together");
  if (c.mask_lists) check_block_mask(c);
}

void check_shape_and_dtype(const char* name, const at::Tensor& t, c10::SymIntArrayRef shape, at::ScalarType dtype,
                           const AttnCall& c) {
  TORCH_CHECK_VALUE(has_shape(t, shape), name, ": expected shape ", shape, ", got ", t.sym_sizes());
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, ": expected dtype ", dtype_name(dtype), ", got ",
                   dtype_name(t.scalar_type()));
  check_device(name, t, c.q);
}

void validate(const AttnCall& c, const BackwardCall& b) {
  validate(c);
  check_has_derivatives(c);
  const auto check = [&c](const char* name, const at::Tensor& t, c10::SymIntArrayRef shape, at::ScalarType dtype) {
    check_shape_and_dtype(name, t, shape, dtype, c);
  };
  const std::vector<c10::SymInt> out_shape = c.out_shape(), lse_shape = c.lse_shape();
  if (b.dout) check("dout", *b.dout, out_shape, c.q.scalar_type());
  if (b.dlse) check("dlse", *b.dlse, lse_shape, c.statistics_dtype());
  check("out", b.out, out_shape, c.q.scalar_type());
  if (b.lse_words) check("lse_words", *b.lse_words, c.row_numbers_shape(2), c.statistics_dtype());
  if (b.centres) check("centres", *b.centres, c.row_numbers_shape(kCentres), c.statistics_dtype());
  check("lse", b.lse, lse_shape, c.statistics_dtype());
}

}  // namespace flashattn_ext
