#include "dispatch.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "../csrc/backend/backend.h"
#include "../csrc/rules/dropout.h"
#include "../csrc/rules/mask.h"
#include "tiles.h"

namespace flashattn_ext {
namespace ascend {

std::string supports(const AttnParams& p, bool backward) {
  if (p.dtype == DType::kFloat64)
    return "fp64 inputs are not implemented by the Ascend C kernels, whose cores have no fp64; use fp32, fp16 or bf16, "
           "or the CPU backend";
  if (p.is_fp8) return refuses_fp8(p, "Ascend C");
  if (!backward && p.invariant) return refuses_invariant(p, "Ascend C");
  if (p.has_blocks()) return refuses_blocks(p, "Ascend C");
  if (std::max(p.head_dim, p.head_dim_v) > kMaxHeadDim)
    return "head dims above 256 are not implemented by the Ascend C kernels, got " + std::to_string(p.head_dim) +
           " of q and k and " + std::to_string(p.head_dim_v) + " of v; use the CPU or CUDA backend";
  if (p.row_maxima.data)
    return "return_max_logits is not implemented by the Ascend C kernels; leave it out, and use the CPU or CUDA "
           "backend "
           "where the largest logits are looked at";
  for (const std::string& lacking :
       {refuses_origin(p, "Ascend C"), refuses_score_options(p, {"softcap"}, "Ascend C")}) {
    if (!lacking.empty()) return lacking;
  }
  constexpr int64_t kLongest = int64_t{1} << 30;
  if (std::max(p.seqlen_q, p.total_q) > kLongest || std::max(p.seqlen_k, p.total_k) > kLongest)
    return "sequences longer than 2^30 are not implemented by the Ascend C kernels; shorten them";
  return {};
}

namespace {

// Rows of a packed or dense tensor in blocks. Packed sequences end anywhere: at most one block of each is not full.
int64_t row_blocks(const AttnParams& p, int64_t total, int64_t length) {
  return p.is_varlen() ? total / kRows + p.batch : p.batch * ((length + kRows - 1) / kRows);
}

// Hands out parts of the workspace; without memory it only counts.
class Carver {
 public:
  explicit Carver(const void* workspace) {
    const auto address = reinterpret_cast<uintptr_t>(workspace);
    begin_ = next_ = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  }
  void* take(int64_t bytes) {
    void* const part = reinterpret_cast<void*>(next_);
    next_ += static_cast<uintptr_t>((bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
    return part;
  }
  size_t bytes() const { return next_ - begin_ + kWorkspaceAlignment; }

 private:
  uintptr_t begin_, next_;
};

// `cores`: that run a kernel with cube cores; `all_cores`: of the device.
void carve_isolation(Carver* carver, Arguments* a, int64_t cores, int64_t all_cores, int64_t rows_fp32,
                     int64_t rows_of_16_bits) {
  if (!a->has_intervals()) return;
  a->check_count = kVectorCores * all_cores;
  a->checks = carver->take(a->check_count * 4);
  const int64_t elements = cores * a->isolated_pitch();
  a->isolated = carver->take(a->dtype == DType::kFloat32 ? elements * rows_fp32 * 4 : elements * rows_of_16_bits * 2);
}
void carve_forward(Carver* carver, Arguments* a, int64_t all_cores) {
  const int64_t cores = forward_cores(*a, all_cores);
  a->workspace = carver->take(cores * forward_slot_bytes(*a));
  carve_isolation(carver, a, cores, all_cores, SizesOf<4>::kIsolatedForward, SizesOf<2>::kIsolatedForward);
}
void carve_backward(Carver* carver, Arguments* a, int64_t all_cores) {
  const int64_t cores = backward_cores(*a, all_cores);
  a->workspace = carver->take(cores * backward_slot_bytes(a->dtype));
  carve_isolation(carver, a, cores, all_cores, SizesOf<4>::kIsolatedBackward, SizesOf<2>::kIsolatedBackward);
  a->delta = carver->take(a->heads_q * a->rows_q * 4);
  a->dq_sum = carver->take(a->heads_q * a->rows_q * sum_pitch(a->head_dim) * 4);
  a->dk_sum = carver->take(a->heads_k * a->rows_k * sum_pitch(a->head_dim) * 4);
  a->dv_sum = carver->take(a->heads_k * a->rows_k * sum_pitch(a->head_dim_v) * 4);
  if (a->dalibi_slopes) a->slope_sums = carver->take(a->slope_sums_count() * 4);
  if (a->drelative_bias) a->relative_sums = carver->take(a->relative_sums_count() * 4);
}

void set_numbers(Arguments* a) {
  a->score = ScoreRule<float, void>::of(*a);
  int exponent;
  const float scale = a->score.softmax_scale;  // above 1 a product may overflow
  a->exact_scale = scale <= 1 && std::isnormal(scale) && std::frexp(scale, &exponent) == 0.5f;
  a->cap = static_cast<float>(a->softcap);
  a->inverse_keep = static_cast<float>(1.0 / keep_probability(a->dropout_threshold));
  a->slope_blocks = a->is_varlen() ? a->total_k / kRows + a->batch + 1 : (a->seqlen_k + kRows - 1) / kRows;
  a->relative_pitch = (2 * (a->relative_reach + kDiagonalMargin) + 8) / 8 * 8;
  a->rows_q = a->is_varlen() ? a->total_q : a->batch * a->seqlen_q;
  a->rows_k = a->is_varlen() ? a->total_k : a->batch * a->seqlen_k;
}

}  // namespace

bool has_long_steps(const AttnParams& p) {
  constexpr Tiling kLong = kTilingOfLongSteps;
  if (p.dtype == DType::kFloat32 || std::max(p.head_dim, p.head_dim_v) > kLong.head_dim) return false;
  if (p.has_score_option() || p.has_bias() || p.has_intervals() || p.has_dropout()) return false;
  const int64_t sequences = std::max<int64_t>(p.batch, 1);
  const int64_t seqlen_q = p.is_varlen() ? p.total_q / sequences : p.seqlen_q;
  const int64_t seqlen_k = p.is_varlen() ? p.total_k / sequences : p.seqlen_k, row = (seqlen_q - 1) / 2;
  const auto seen = BasicMask<int64_t>(p, seqlen_q, seqlen_k).keys_of(row, row + 1);
  return seen.end - seen.begin > kLong.keys;
}

int64_t forward_slot_bytes(const AttnParams& p) {
  if (has_long_steps(p)) return SizesOf<2, true>::kForwardWorkspaceBytes;
  return p.dtype == DType::kFloat32 ? SizesOf<4>::kForwardWorkspaceBytes : SizesOf<2>::kForwardWorkspaceBytes;
}
int64_t backward_slot_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? SizesOf<4>::kBackwardWorkspaceBytes : SizesOf<2>::kBackwardWorkspaceBytes;
}

int64_t forward_cores(const AttnParams& p, int64_t cores) {
  return std::min(cores, row_blocks(p, p.total_q, p.seqlen_q) * p.heads_q);
}
int64_t backward_cores(const AttnGradParams& p, int64_t cores) {
  if (!p.heads_q) return 0;
  return std::min(cores, (p.deterministic ? p.batch : row_blocks(p, p.total_k, p.seqlen_k)) * p.heads_k);
}

Arguments forward_arguments(const AttnParams& p, int64_t cores) {
  Arguments a;
  static_cast<AttnParams&>(a) = p;
  set_numbers(&a);
  Carver carver(p.workspace);
  carve_forward(&carver, &a, cores);
  return a;
}
Arguments backward_arguments(const AttnGradParams& p, int64_t cores) {
  Arguments a;
  static_cast<AttnGradParams&>(a) = p;
  set_numbers(&a);
  Carver carver(p.workspace);
  carve_backward(&carver, &a, cores);
  return a;
}

Arguments dropout_mask_arguments(const AttnParams& p, bool* mask) {
  Arguments a;
  static_cast<AttnParams&>(a) = p;
  set_numbers(&a);
  a.keep_mask = mask;
  return a;
}

size_t kernel_of(Stage stage, const Arguments& a) {
  struct Row {
    Stage stage;
    DType type;
    uint32_t options;
  };
#define FLASHATTN_ROW(cores, stage, type, options, name) {Stage::stage, DType::type, options},
  static constexpr Row kRows[] = {FLASHATTN_KERNELS(FLASHATTN_ROW)};
#undef FLASHATTN_ROW
  const uint32_t has = (a.has_score_option() ? kScoreOption : 0) | (a.has_bias() ? kBiases : 0) |
                       (a.has_intervals() ? kMask : 0) | (a.has_dropout() ? kDropout : 0) |
                       (has_long_steps(a) ? 0 : kShortSteps);
  const auto runs = [&](const Row& row) {
    return row.stage == stage && (row.type == a.dtype || stage == Stage::kDropoutMask) && (has & ~row.options) == 0;
  };
  return static_cast<size_t>(std::find_if(std::begin(kRows), std::end(kRows), runs) - std::begin(kRows));
}

size_t forward_workspace_bytes(const AttnParams& p, int64_t cores) {
  Carver carver(nullptr);
  Arguments a;
  static_cast<AttnParams&>(a) = p;
  carve_forward(&carver, &a, cores);
  return carver.bytes();
}
size_t backward_workspace_bytes(const AttnGradParams& p, int64_t cores) {
  Carver carver(nullptr);
  Arguments a;
  static_cast<AttnGradParams&>(a) = p;
  set_numbers(&a);
  carve_backward(&carver, &a, cores);
  return carver.bytes();
}

}  // namespace ascend
}  // namespace flashattn_ext
