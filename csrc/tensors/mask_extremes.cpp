// mask_extremes: the kernel of the device's backend if it has one, otherwise torch operators, which run on every
// device.
#include "tensors/mask_extremes.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <limits>

#include "rules/mask.h"
#include "tensors/dtype_name.h"
#include "tensors/op_device.h"

namespace flashattn_ext {
namespace {

void check(const at::Tensor& intervals) {
  TORCH_CHECK_TYPE(intervals.scalar_type() == at::kInt, "intervals: expected dtype int32, got ",
                   dtype_name(intervals.scalar_type()));
  TORCH_CHECK_VALUE(intervals.dim() >= 2 && intervals.sym_size(-1).sym_eq(2).expect_true(__FILE__, __LINE__),
                    "intervals: expected shape [.., seqlen_k, 2], got ", intervals.sym_sizes());
}

// Reshapes [.., n, 2] to [.., groups, size, 2]. The last row is repeated as padding, which changes no extreme.
at::Tensor grouped(const at::Tensor& rows, int64_t size) {
  const int64_t count = rows.size(-2), groups = at::ceil_div(count, size), missing = groups * size - count;
  std::vector<int64_t> tail = rows.sizes().vec();
  tail[tail.size() - 2] = missing;
  const at::Tensor whole = missing ? at::cat({rows, rows.narrow(-2, count - 1, 1).expand(tail)}, -2) : rows;
  return whole.unflatten(-2, {groups, size});
}

// The backend with a mask_extremes kernel that can run on the current device; sets p->stream. nullptr if there is none.
const Backend* backend_with_kernel(const at::Tensor& intervals, const Device& device, AttnParams* p) {
  const std::string name = device_name(intervals);
  p->dtype = DType::kFloat16;  // there is no q; every backend supports this type
  for (const Backend* backend : backends()) {
    if (name != backend->device || !backend->mask_extremes || !backend->supports(*p, false).empty()) continue;
    p->stream = device.stream(*backend);
    return backend;
  }
  return nullptr;
}

}  // namespace

std::vector<c10::SymInt> mask_extremes_shape(const at::Tensor& intervals) {
  const c10::SymInt granules = (intervals.sym_size(-2) + (kMaskGranule - 1)) / kMaskGranule;
  std::vector<c10::SymInt> shape = intervals.sym_sizes().vec();
  shape[shape.size() - 2] = granules + (granules + (kMaskSuper - 1)) / kMaskSuper;
  shape.back() = 4;
  return shape;
}

at::Tensor mask_extremes_meta(const at::Tensor& intervals) {
  check(intervals);
  return at::empty_symint(mask_extremes_shape(intervals), intervals.options());
}

at::Tensor mask_extremes(const at::Tensor& intervals) {
  check(intervals);
  if (intervals.size(-2) == 0 || intervals.numel() == 0) return mask_extremes_meta(intervals);
  const Device device(intervals);
  AttnParams p;
  if (const Backend* const backend = backend_with_kernel(intervals, device, &p)) {
    const at::Tensor pairs = intervals.contiguous(), extremes = mask_extremes_meta(intervals);
    p.intervals.data = pairs.const_data_ptr<int32_t>();
    p.seqlen_k = pairs.size(-2);
    p.intervals.heads = pairs.numel() / 2 / p.seqlen_k;
    backend->mask_extremes(p, extremes.data_ptr<int32_t>());
    return extremes;
  }
  // A key that is masked for every row becomes (INT_MAX, 0): it does not widen `any` and makes `all` empty.
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const at::Tensor no_row = at::arange(kMax, -1, -kMax, intervals.options());
  const at::Tensor rows = intervals.clamp_min(0);
  const at::Tensor seen = rows.select(-1, 0).lt(rows.select(-1, 1)).unsqueeze(-1);
  const at::Tensor granules = grouped(at::where(seen, rows, no_row), kMaskGranule);
  at::Tensor smallest = at::amin(granules, -2),
             largest = at::amax(granules, -2);  // [.., granules, 2]: extremes of first and of last
  smallest = at::cat({smallest, at::amin(grouped(smallest, kMaskSuper), -2)}, -2);
  largest = at::cat({largest, at::amax(grouped(largest, kMaskSuper), -2)}, -2);
  // any_first, any_last, all_first, all_last
  return at::cat(
      {smallest.narrow(-1, 0, 1), largest.narrow(-1, 1, 1), largest.narrow(-1, 0, 1), smallest.narrow(-1, 1, 1)}, -1);
}

}  // namespace flashattn_ext
