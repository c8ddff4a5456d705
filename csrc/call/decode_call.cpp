#include "call/decode_call.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "call/validate.h"
#include "tensors/dtype_name.h"
#include "tensors/mask_extremes.h"

namespace flashattn_ext {

std::string decode_schema(bool appends) {
  const std::string k_mark = appends ? "(a!)" : "", v_mark = appends ? "(b!)" : "";
  return "Tensor q, Tensor" + k_mark + " k_cache, Tensor" + v_mark +
         " v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens, "
         "Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, SymInt cache_seqlen, "
         "bool rotary_interleaved, SymInt num_splits, bool returns_max_logits" +
         schema_of_options(Takers::kEveryOp);
}

DecodeCall read_decode_call(Arguments* arguments) {
  Arguments& next = *arguments;
  DecodeCall c;
  c.q = next.tensor();
  c.k = next.tensor();
  c.v = next.tensor();
  c.k_new = next.maybe_tensor();
  c.v_new = next.maybe_tensor();
  c.rotary_cos = next.maybe_tensor();
  c.rotary_sin = next.maybe_tensor();
  c.cache_seqlens = next.maybe_tensor();
  c.cache_batch_idx = next.maybe_tensor();
  c.cache_leftpad = next.maybe_tensor();
  c.block_table = next.maybe_tensor();
  c.cache_seqlen = next.integer();
  c.rotary_interleaved = next.flag();
  c.num_splits = next.integer();
  c.returns_max_logits = next.flag();
  next.options<Takers::kEveryOp>(&c);
  return c;
}

namespace {

void check_rank(const char* name, const at::Tensor& t, int64_t rank, const char* dimensions) {
  TORCH_CHECK_VALUE(t.dim() == rank, name, ": expected ", rank, " dimensions ", dimensions, ", got shape ",
                    t.sym_sizes());
}

void check_kind(const char* name, const at::Tensor& t, const DecodeCall& c) {
  TORCH_CHECK_TYPE(t.scalar_type() == c.q.scalar_type(), name, ": expected the dtype of q (",
                   dtype_name(c.q.scalar_type()), "), got ", dtype_name(t.scalar_type()));
  check_device(name, t, c.q);
}

// k_cache and v_cache have the dtype of q; fp8 caches also take q in bfloat16.
void check_kind_of_cache(const char* name, const at::Tensor& t, const DecodeCall& c) {
  const at::ScalarType dtype = c.q.scalar_type(), of_cache = t.scalar_type();
  if (dtype == at::kBFloat16) {
    TORCH_CHECK_TYPE(of_cache == at::kBFloat16 || of_cache == at::kFloat8_e4m3fn, name,
                     ": expected the dtype of q (bfloat16) or float8_e4m3fn, got ", dtype_name(of_cache));
  } else {
    TORCH_CHECK_TYPE(of_cache != at::kFloat8_e4m3fn || dtype == at::kFloat8_e4m3fn, "q: expected dtype bfloat16 or ",
                     "float8_e4m3fn with a cache of float8_e4m3fn, got ", dtype_name(dtype));
    TORCH_CHECK_TYPE(of_cache == dtype, name, ": expected the dtype of q (", dtype_name(dtype), "), got ",
                     dtype_name(of_cache));
  }
  check_device(name, t, c.q);
}

// New keys and values have the dtype of q; an fp8 cache takes them in bfloat16 and fp8, whatever the dtype of q.
void check_kind_of_new_keys(const char* name, const at::Tensor& t, const DecodeCall& c) {
  if (!c.is_fp8()) return check_kind(name, t, c);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kFloat8_e4m3fn, name,
                   ": expected dtype bfloat16, which is quantised, or float8_e4m3fn for a cache of float8_e4m3fn, got ",
                   dtype_name(t.scalar_type()));
  check_device(name, t, c.q);
}

void check_shape(const char* name, const at::Tensor& t, c10::SymIntArrayRef shape, const char* what) {
  TORCH_CHECK_VALUE(has_shape(t, shape), name, ": expected shape ", shape, " ", what, ", got ", t.sym_sizes());
}

void check_integers(const char* name, const std::optional<at::Tensor>& t, const DecodeCall& c) {
  if (!t) return;
  TORCH_CHECK_TYPE(t->scalar_type() == at::kInt, name, ": expected dtype int32, got ", dtype_name(t->scalar_type()));
  check_shape(name, *t, {c.batch()}, "[batch]");
  check_device(name, *t, c.q);
}

void check_caches(const DecodeCall& c) {
  if (c.is_varlen()) {
    check_rank("q", c.q, 3, "[total, heads, head_dim]");
  } else {
    check_rank("q", c.q, 4, "[batch, seqlen, heads, head_dim]");
  }
  check_dtype_of_q(c);
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor*>{"k_cache", &c.k}, {"v_cache", &c.v}}) {
    check_rank(name, *t, 4, c.block_table ? "[pages, page_size, heads, head_dim]" : "[batch, seqlen, heads, head_dim]");
    check_kind_of_cache(name, *t, c);
    check_head_dim(name, *t);
    // Other ops copy such a tensor. Copying a KV cache would take many times the time of the call, and new keys would
    // be appended to the copy.
    TORCH_CHECK_VALUE(holds(t->sym_stride(-1).sym_eq(1).sym_or(t->sym_size(-1).sym_eq(1))), name,
                      ": expected a contiguous last dimension, got strides ", t->sym_strides());
  }
  TORCH_CHECK_TYPE(c.v.scalar_type() == c.k.scalar_type(), "v_cache: expected the dtype of k_cache (",
                   dtype_name(c.k.scalar_type()), "), got ", dtype_name(c.v.scalar_type()));
  check_head_dim("q", c.q);
  const c10::SymInt heads_q = c.q.sym_size(c.head_axis()), heads_k = c.k.sym_size(2);
  check_shape("k_cache", c.k, {c.k.sym_size(0), c.k.sym_size(1), heads_k, c.q.sym_size(-1)}, "with the head_dim of q");
  check_shape("v_cache", c.v, {c.k.sym_size(0), c.k.sym_size(1), heads_k, c.v.sym_size(-1)}, "like k_cache");
  check_groups(c.q, heads_q, heads_k);
}

void check_places(const DecodeCall& c) {
  check_integers("cache_seqlens", c.cache_seqlens, c);
  check_integers("cache_batch_idx", c.cache_batch_idx, c);
  check_integers("cache_leftpad", c.cache_leftpad, c);
  const c10::SymInt entries = c.k.sym_size(0), batch = c.batch();
  if (!c.block_table) {
    TORCH_CHECK_VALUE(c.cache_batch_idx || holds(entries.sym_ge(batch)), "k_cache: expected an entry for each of the ",
                      batch, " sequences of q, or cache_batch_idx, got ", entries, " in shape ", c.k.sym_sizes());
    return;
  }
  TORCH_CHECK_VALUE(!c.cache_batch_idx,
                    "cache_batch_idx: expected None with a block_table, which has one row per sequence; give "
                    "block_table[cache_batch_idx] instead");
  const at::Tensor& table = *c.block_table;
  TORCH_CHECK_TYPE(table.scalar_type() == at::kInt, "block_table: expected dtype int32, got ",
                   dtype_name(table.scalar_type()));
  TORCH_CHECK_VALUE(table.dim() == 2 && holds(table.sym_size(0).sym_eq(batch)), "block_table: expected shape [", batch,
                    ", pages of a sequence], got ", table.sym_sizes());
  check_device("block_table", table, c.q);
  TORCH_CHECK_VALUE(holds(c.page_size().sym_ge(16)) && holds((c.page_size() % 16).sym_eq(0)),
                    "k_cache: expected pages of a multiple of 16 keys, got ", c.page_size(), " in shape ",
                    c.k.sym_sizes());
}

// Throws if elements of a cache that is written to share memory, as in an expanded tensor.
void check_cache_does_not_overlap(const char* name, const at::Tensor& cache) {
  if (cache.is_meta() || at::isTensorSubclassLike(cache) || cache.numel() == 0) return;  // checked when the graph runs
  std::vector<std::pair<int64_t, int64_t>> strides;  // (stride, size) of each dimension
  for (int64_t dim = 0; dim < cache.dim(); ++dim) {
    if (cache.size(dim) > 1) strides.emplace_back(cache.stride(dim), cache.size(dim));
  }
  std::sort(strides.begin(), strides.end());
  int64_t extent = 1;  // elements that the dimensions so far span
  for (const auto& [stride, size] : strides) {
    TORCH_CHECK_VALUE(stride >= extent, name, ": new keys are written to it, and elements of it share memory: strides ",
                      cache.strides(), " for shape ", cache.sizes(), "; give a cache that owns its memory (", name,
                      ".contiguous() makes one)");
    extent += (size - 1) * stride;
  }
}

// A dimension of two tensors with the same stride in both: an element of one and an element of the other, `difference`
// apart in that dimension, are difference * stride apart in memory.
struct CommonDimension {
  int64_t stride, least, most;  // least and most: the range of the difference
};

// Whether sum of difference_i * stride_i over the dimensions from `first` on, with strides in descending order, can be
// `distance`.
bool reaches(const std::vector<CommonDimension>& dimensions, size_t first, int64_t distance) {
  if (first == dimensions.size()) return distance == 0;
  int64_t least = 0, most = 0;  // what the dimensions after `first` reach
  for (size_t i = first + 1; i < dimensions.size(); ++i) {
    least += dimensions[i].least * dimensions[i].stride;
    most += dimensions[i].most * dimensions[i].stride;
  }
  const auto& [stride, least_difference, most_difference] = dimensions[first];
  const int64_t begin = std::max(least_difference, (distance - most) / stride - 1);
  const int64_t end = std::min(most_difference, (distance - least) / stride + 1);
  for (int64_t difference = begin; difference <= end; ++difference) {
    const int64_t rest = distance - difference * stride;
    if (least <= rest && rest <= most && reaches(dimensions, first + 1, rest)) return true;
  }
  return false;
}

// Whether an element of `a` is an element of `b`. Of tensors that differ in a stride only the first elements are
// compared. Halves of one tensor that alternate in memory share no element.
bool share_elements(const at::Tensor& a, const at::Tensor& b) {
  const auto begin_a = reinterpret_cast<intptr_t>(a.const_data_ptr());
  const auto begin_b = reinterpret_cast<intptr_t>(b.const_data_ptr());
  if (a.numel() == 0 || b.numel() == 0) return false;
  if (begin_a == begin_b) return true;
  std::vector<CommonDimension> dimensions;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    const int64_t size_a = a.size(dim), size_b = b.size(dim);
    if (size_a == 1 && size_b == 1) continue;
    if (size_a > 1 && size_b > 1 && a.stride(dim) != b.stride(dim)) return false;
    dimensions.push_back({size_a > 1 ? a.stride(dim) : b.stride(dim), 1 - size_b, size_a - 1});
  }
  std::sort(dimensions.begin(), dimensions.end(), [](const auto& x, const auto& y) { return x.stride > y.stride; });
  const int64_t distance = begin_b - begin_a, element = a.element_size();
  return distance % element == 0 && reaches(dimensions, 0, distance / element);
}

void check_caches_do_not_overlap(const DecodeCall& c) {
  check_cache_does_not_overlap("k_cache", c.k);
  check_cache_does_not_overlap("v_cache", c.v);
  for (const at::Tensor* t : {&c.k, &c.v}) {
    if (t->is_meta() || at::isTensorSubclassLike(*t)) return;  // checked when the graph runs
  }
  TORCH_CHECK_VALUE(!share_elements(c.k, c.v),
                    "v_cache: new keys are written to k_cache and new values to v_cache, and the two share memory, got "
                    "shapes ",
                    c.k.sizes(), " and ", c.v.sizes(), " with strides ", c.k.strides(), " and ", c.v.strides(),
                    "; give caches that do not overlap, or write the keys yourself and call without k and v");
}

void check_new_keys(const DecodeCall& c) {
  TORCH_CHECK_VALUE(c.k_new.has_value() == c.v_new.has_value(), "k: k and v must be given together");
  if (!c.k_new) {
    TORCH_CHECK_VALUE(!c.rotary_cos, "rotary_cos: expected None where k and v are, got shape ",
                      c.rotary_cos->sym_sizes(), "; rotate q before the call");
    return;
  }
  TORCH_CHECK_VALUE(!c.is_varlen(), "k: expected None in a packed call, got shape ", c.k_new->sym_sizes());
  TORCH_CHECK_VALUE(c.cache_seqlens || c.cache_seqlen >= 0,
                    "cache_seqlens: expected where the keys of k go, an int or int32 [batch], got None");
  check_rank("k", *c.k_new, 4, "[batch, new keys, heads, head_dim]");
  check_kind_of_new_keys("k", *c.k_new, c);
  check_kind_of_new_keys("v", *c.v_new, c);
  TORCH_CHECK_TYPE(c.v_new->scalar_type() == c.k_new->scalar_type(), "v: expected the dtype of k (",
                   dtype_name(c.k_new->scalar_type()), "), got ", dtype_name(c.v_new->scalar_type()));
  const c10::SymInt batch = c.batch(), heads = c.k.sym_size(2), count = c.new_keys();
  check_shape("k", *c.k_new, {batch, count, heads, c.k.sym_size(3)}, "[batch, new keys, heads, head_dim]");
  check_shape("v", *c.v_new, {batch, count, heads, c.v.sym_size(3)}, "[batch, new keys, heads, head_dim]");
  TORCH_CHECK_VALUE(holds(count.sym_le(c.capacity())), "k: expected at most the ", c.capacity(),
                    " keys that the cache has room for, got ", count);
  check_caches_do_not_overlap(c);
}

void check_rotary(const DecodeCall& c) {
  TORCH_CHECK_VALUE(c.rotary_cos.has_value() == c.rotary_sin.has_value(),
                    "rotary_cos: rotary_cos and rotary_sin must be given together");
  if (!c.rotary_cos) return;
  for (const at::ScalarType dtype : {c.q.scalar_type(), c.k_new->scalar_type()}) {
    TORCH_CHECK_NOT_IMPLEMENTED(dtype != at::kFloat8_e4m3fn,
                                "rotary_cos: a rotation of q or k of float8_e4m3fn is not implemented; give both in "
                                "bfloat16, or rotate them before they are quantised");
  }
  const at::Tensor& cos = *c.rotary_cos;
  check_rank("rotary_cos", cos, 2, "[positions, rotary dim / 2]");
  check_kind("rotary_cos", cos, c);
  check_kind("rotary_sin", *c.rotary_sin, c);
  check_shape("rotary_sin", *c.rotary_sin, cos.sym_sizes(), "like rotary_cos");
  const c10::SymInt dim = cos.sym_size(1) * 2;
  TORCH_CHECK_VALUE(holds(dim.sym_ge(1)) && holds(dim.sym_le(c.q.sym_size(-1))),
                    "rotary_cos: expected 1 to head_dim / 2 columns for a head_dim of ", c.q.sym_size(-1), ", got ",
                    cos.sym_size(1));
  TORCH_CHECK_VALUE(holds(cos.sym_size(0).sym_ge(c.capacity())) && holds(cos.sym_size(0).sym_ge(1)),
                    "rotary_cos: expected a row for each of the ", c.capacity(), " positions of the cache, got ",
                    cos.sym_size(0));
}

// --- values of CPU tensors; the fake tensors of a traced graph have none ---

bool is_readable(const std::optional<at::Tensor>& t) { return t && t->is_cpu() && !at::isTensorSubclassLike(*t); }

// Checks that the value of each sequence b is in [least, most(b)].
template <class Least, class Most>
void check_values(const char* name, const std::optional<at::Tensor>& t, Least least, Most most) {
  if (!is_readable(t)) return;
  const at::Tensor flat = t->contiguous();
  const int32_t* values = flat.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < flat.numel(); ++b) {
    TORCH_CHECK_VALUE(least <= values[b] && values[b] <= most(b), name, ": expected ", least, " to ", most(b),
                      " for sequence ", b, ", got ", values[b]);
  }
}

// Checks that no two sequences, which append keys in any order, have the same entry of the cache.
void check_entries_are_distinct(const DecodeCall& c) {
  if (!c.k_new || holds(c.new_keys().sym_eq(0)) || !is_readable(c.cache_batch_idx)) return;
  const at::Tensor flat = c.cache_batch_idx->contiguous();
  std::vector<std::pair<int32_t, int64_t>> entries;  // (entry, sequence)
  for (int64_t b = 0; b < flat.numel(); ++b) entries.emplace_back(flat.const_data_ptr<int32_t>()[b], b);
  std::sort(entries.begin(), entries.end());
  for (size_t i = 1; i < entries.size(); ++i) {
    TORCH_CHECK_VALUE(entries[i].first != entries[i - 1].first,
                      "cache_batch_idx: new keys are written to the entries that it names, expected each at most once, "
                      "got ",
                      entries[i].first, " for the sequences ", entries[i - 1].second, " and ", entries[i].second);
  }
}

void check_lengths(const DecodeCall& c) {
  const auto of_cache = [&](const c10::SymInt& keys) { return keys.sym_le(c.capacity() - c.new_keys()); };
  TORCH_CHECK_VALUE(holds(c.cache_seqlen.sym_ge(-1)) && holds(of_cache(c.cache_seqlen)),
                    "cache_seqlens: expected 0 to the ", c.capacity(), " keys that the cache has room for less the ",
                    c.new_keys(), " of k, got ", c.cache_seqlen);
  if (!c.q.is_cpu() || at::isTensorSubclassLike(c.q)) return;
  const int64_t capacity = c.capacity().expect_int(), room = capacity - c.new_keys().expect_int();
  check_values("cache_seqlens", c.cache_seqlens, 0, [&](int64_t) { return room; });
  check_values("cache_batch_idx", c.cache_batch_idx, 0, [&](int64_t) { return c.k.size(0) - 1; });
  check_entries_are_distinct(c);
  const bool has_lengths = is_readable(c.cache_seqlens);
  const at::Tensor lengths = has_lengths ? c.cache_seqlens->contiguous() : at::Tensor();
  const int64_t length = c.cache_seqlen < 0 ? capacity : c.cache_seqlen.expect_int();
  check_values("cache_leftpad", c.cache_leftpad, 0,
               [&](int64_t b) { return has_lengths ? lengths.const_data_ptr<int32_t>()[b] : length; });
  if (!is_readable(c.cu_seqlens_k)) return;
  const at::Tensor starts = c.cu_seqlens_k->contiguous();
  const int32_t* values = starts.const_data_ptr<int32_t>();
  for (int64_t b = 0; b + 1 < starts.numel(); ++b) {
    TORCH_CHECK_VALUE(values[b + 1] - values[b] <= capacity, "cu_seqlens_k: expected at most the ", capacity,
                      " keys that the block_table has room for, got ", values[b + 1] - values[b], " for sequence ", b);
  }
}

}  // namespace

void validate(const DecodeCall& c) {
  TORCH_CHECK_VALUE(c.cu_seqlens_q.has_value() == c.cu_seqlens_k.has_value(),
                    "cu_seqlens: cu_seqlens_q and cu_seqlens_k must be given together");
  check_caches(c);
  check_numbers(c);
  if (c.is_varlen()) {
    check_cu_seqlens("cu_seqlens_q", *c.cu_seqlens_q, c, "q", &c.q, c.max_seqlen_q);
    check_cu_seqlens("cu_seqlens_k", *c.cu_seqlens_k, c, "k", nullptr, c.max_seqlen_k);
    check_shape("cu_seqlens_k", *c.cu_seqlens_k, c.cu_seqlens_q->sym_sizes(), "like cu_seqlens_q");
    TORCH_CHECK_VALUE(!c.cache_seqlens && c.cache_seqlen < 0 && !c.cache_leftpad,
                      "cache_seqlens: expected None, and so cache_leftpad, in a packed call, whose cu_seqlens_k has "
                      "the lengths");
  }
  check_places(c);
  check_new_keys(c);
  check_rotary(c);
  check_lengths(c);
  check_tensors(c);
  check_fp8(c, c.k.sym_size(2));
  TORCH_CHECK_VALUE(c.mask_intervals.has_value() == c.mask_extremes.has_value(),
                    "mask: mask_intervals and mask_extremes must be given together");
  if (c.mask_intervals) {
    TORCH_CHECK_VALUE(!c.is_varlen(), "mask: expected None in a packed call with a block_table");
    check_intervals(c, std::nullopt);
  }
  TORCH_CHECK_VALUE(holds(c.num_splits.sym_ge(0)) && holds(c.num_splits.sym_le(256)),
                    "num_splits: expected 0 (chosen by the backend) to 256, got ", c.num_splits);
}

}  // namespace flashattn_ext
