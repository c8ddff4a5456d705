// The arguments of a kernel for one call, passed by value: the parameters of every backend, and values that the scalar
// unit cannot compute from them because it has no double.
#pragma once

#include "../csrc/params.h"
#include "../csrc/rules/score.h"

// How arguments travel to a kernel. CANN 8 copies the text of a parameter's struct into the launcher that it generates,
// which therefore has to stand alone: no namespace, no base, no name of another file, sizes in digits.
struct FlashattnBytes {
  alignas(8) unsigned char bytes[1088];
};

namespace flashattn_ext {
namespace ascend {

// Floats from row to row of a sum: whole repeats.
FLASHATTN_HOST_DEVICE constexpr int64_t sum_pitch(int64_t head_dim) { return (head_dim + 63) / 64 * 64; }
// Sums over diagonals have this many distances beyond the reach on either side. They belong to the entries at its ends.
constexpr int64_t kDiagonalMargin = 512;

struct Arguments : AttnGradParams {
  // Whether the kernel finds delta of rows with few keys (row_delta.h): beside the code of every option the instruction
  // cache has no room for it.
  static constexpr bool kFindsDelta = true;
  static constexpr bool kDealsByArea = true;  // schedule.h, likewise
  static constexpr bool kLongSteps = false;   // SizesOf

  ScoreRule<float, void> score;  // score.h
  float cap = 0;                 // cap of the score's tanh, in natural units; 0: none
  float inverse_keep = 1.0f;     // 1 / p_keep of dropout
  bool exact_scale = false;      // softmax_scale is a power of two

  // Backward, in the workspace: per-row values and sums of all rows of a head, one head after the other, in fp32.
  int64_t rows_q = 0, rows_k = 0;  // rows per head: total_q or batch * seqlen_q; likewise for keys
  void* delta = nullptr;           // [Hq, rows_q]
  void* dq_sum = nullptr;          // [Hq, rows_q, sum_pitch(D)]
  void* dk_sum = nullptr;          // [Hk, rows_k, sum_pitch(D)]
  void* dv_sum = nullptr;          // [Hk, rows_k, sum_pitch(Dv)]

  // Backward, in the workspace, if the gradient of a bias is wanted: sums of bias_gradients.h, for both vector cores.
  int64_t slope_blocks = 0;       // blocks of keys of a head
  void* slope_sums = nullptr;     // [B, Hq, slope_blocks, 2], packed [Hq, slope_blocks, 2]
  int64_t relative_pitch = 0;     // distances, with a margin
  void* relative_sums = nullptr;  // [B, 2, Hq, relative_pitch]

  // With a Mask, in the workspace: the memory of isolation.h.
  int64_t check_count = 0;   // vector cores of the device
  void* checks = nullptr;    // [check_count] fp32
  void* isolated = nullptr;  // [cores, rows of a core, isolated_pitch()], in the type of an input

  void* keep_mask = nullptr;  // dropout_mask: [B, Hq, Sq, Sk], a byte for each score

  // Whether the call has an option of ArgumentsWith, like the functions of AttnParams.
  FLASHATTN_HOST_DEVICE bool has_score_option() const { return score.changes_products(); }
  FLASHATTN_HOST_DEVICE bool has_bias_gradient() const { return dalibi_slopes || drelative_bias || dbias.data; }
  // Dropout without biases and a Mask, for which the forward has a faster way.
  FLASHATTN_HOST_DEVICE bool has_dropout_alone() const { return has_dropout() && !has_bias() && !has_intervals(); }

  // Elements from row to row of `isolated`.
  FLASHATTN_HOST_DEVICE int64_t isolated_pitch() const {
    return sum_pitch(head_dim > head_dim_v ? head_dim : head_dim_v);
  }
  // In whole blocks of 32 bytes.
  FLASHATTN_HOST_DEVICE int64_t slope_sums_count() const {
    return ((is_varlen() ? 1 : batch) * heads_q * slope_blocks * 2 + 7) / 8 * 8;
  }
  FLASHATTN_HOST_DEVICE int64_t relative_sums_count() const { return batch * 2 * heads_q * relative_pitch; }
};

// Options that kernels may be compiled without, as bits: their code is large, and few calls have them. Short steps are
// an option of the forward: a kernel without it has long ones (has_long_steps in dispatch.h).
constexpr uint32_t kScoreOption = 1, kBiases = 2, kMask = 4, kDropout = 8, kShortSteps = 16;
// The sets of options in the table of kernels.
constexpr uint32_t kLongOptions = 0, kPlainOptions = kScoreOption | kShortSteps,
                   kDropoutOptions = kPlainOptions | kDropout, kMaskOptions = kPlainOptions | kMask,
                   kBiasOptions = kMaskOptions | kBiases, kEveryOption = kBiasOptions | kDropout;

// The arguments of a kernel that is compiled with these options alone. Its code asks them whether a call has an option
// in the way it asks Arguments, which stand for every option, and the compiler leaves out the code of the others.
template <uint32_t kOptions>
struct ArgumentsWith : Arguments {
  static constexpr bool kFindsDelta = kOptions != kEveryOption, kDealsByArea = kFindsDelta;
  static constexpr bool kLongSteps = !(kOptions & kShortSteps);

  FLASHATTN_HOST_DEVICE bool has_score_option() const {
    return (kOptions & kScoreOption) && Arguments::has_score_option();
  }
  FLASHATTN_HOST_DEVICE bool has_bias() const { return (kOptions & kBiases) && Arguments::has_bias(); }
  FLASHATTN_HOST_DEVICE bool has_bias_gradient() const {
    return (kOptions & kBiases) && Arguments::has_bias_gradient();
  }
  FLASHATTN_HOST_DEVICE bool has_intervals() const { return (kOptions & kMask) && Arguments::has_intervals(); }
  FLASHATTN_HOST_DEVICE bool has_dropout() const { return (kOptions & kDropout) && Arguments::has_dropout(); }
  FLASHATTN_HOST_DEVICE bool has_dropout_alone() const { return !(kOptions & (kBiases | kMask)) && has_dropout(); }
};

}  // namespace ascend
}  // namespace flashattn_ext
