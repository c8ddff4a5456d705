#include "dispatch.h"

#include <algorithm>

#include "../csrc/dropout.h"
#include "tiles.h"

namespace flashattn_ext {
namespace ascend {

std::string supports(const AttnParams& p, bool backward) {
  if (p.dtype == DType::kFloat32 || p.dtype == DType::kFloat64)
    return std::string(p.dtype == DType::kFloat32 ? "fp32" : "fp64") +
           " inputs are not implemented by the Ascend C kernels; use fp16 or bf16, or the CPU backend";
  if (backward) return "the backward is not implemented by the Ascend C kernels yet; use the CPU backend";
  constexpr int64_t kLongest = int64_t{1} << 30;
  if (std::max(p.seqlen_q, p.total_q) > kLongest || std::max(p.seqlen_k, p.total_k) > kLongest)
    return "sequences longer than 2^30 are not implemented by the Ascend C kernels; shorten them";
  return {};
}

int64_t forward_cores(const AttnParams& p, int64_t cores) {
  // Packed sequences end anywhere: at most one block of rows is not full in each.
  const int64_t blocks = p.is_varlen() ? p.total_q / kRows + p.batch : p.batch * ((p.seqlen_q + kRows - 1) / kRows);
  return std::min(cores, blocks * p.heads_q);
}

size_t forward_workspace_bytes(const AttnParams& p, int64_t cores) {
  return static_cast<size_t>(forward_cores(p, cores) * kForwardWorkspaceBytes + kWorkspaceAlignment);
}

Arguments arguments_of(const AttnParams& p) {
  Arguments a;
  static_cast<AttnParams&>(a) = p;
  a.scale = static_cast<float>(p.softmax_scale);
  a.inverse_keep = static_cast<float>(1.0 / keep_probability(p.dropout_threshold));
  const auto address = reinterpret_cast<uintptr_t>(p.workspace);
  a.workspace =
      reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
  return a;
}

}  // namespace ascend
}  // namespace flashattn_ext
