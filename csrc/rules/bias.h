// Additive terms of a logit that depend on its position: ALiBi (Press et al. 2021), a relative bias (Raffel et al.
// 2020, with one entry for each distance) and a bias of any shape. One definition for every backend.
//
//   logit(i, j) = capped score - slope * |d| + relative[clamp(d, -reach, reach) + reach] + bias[i][j]
//   d = j - i - shift
//
// where row i is at the position of key i + shift (BasicMask::first_position). Kernels add biases in units of log2
// (in_log2_units in score.h), where every finite bias is finite. With g the gradient of a logit,
//
//   dslope = -sum g * |d|
//   drelative[e] = the sum of g over the scores with that clamped distance
//   dbias[i][j] = g
//
// each summed over all scores that read the same entry: over batch entries and rows, and for a bias over every
// dimension in which it is broadcast.
//
// Centres. Three of these sums may run over all keys of a row: the sum for a slope, and the sums for both ends of the
// relative bias (distances of -reach and less, of reach and more). Each adds up g_j x_j, where x_j is |d|, or 1 in that
// end and 0 elsewhere, and nearly cancels out. The forward keeps a centre c = sum p_j x_j for each of them and row (on
// the CPU and on NVIDIA GPUs), with which the backward forms
//
//   sum_j g_j x_j = sum_j g_j (x_j - c) + c * (p_sink * delta + dlse)
//
// where p_sink is the weight of the row's sink, 0 without one. docs/dataflow.md says why. The equation holds for every
// c; a forward that keeps no centres leaves them 0. Both ends are one entry when reach is 0; each score counts for one
// of them.
#pragma once

#include "params.h"

namespace flashattn_ext {

// The centres of a row: of a slope, and of both ends of the relative bias.
constexpr int kCentres = 3;
enum Centre : int { kDistance, kBelow, kAbove };

// The biases of one head of one sequence. Real: fp32, or fp64 for fp64 inputs. Terms that are absent are 0.
template <class Real>
struct HeadBias {
  Real slope = 0;
  const Real* relative = nullptr;  // the entry of distance 0; those of -reach to reach lie around it
  int64_t reach = 0;
  const void* bias = nullptr;  // the element of row 0 and key 0, in p.bias.dtype
  int64_t row_stride = 0;

  FLASHATTN_HOST_DEVICE HeadBias() {}  // user-provided, so that FLASHATTN_HOST_DEVICE forces it inline
  FLASHATTN_HOST_DEVICE static HeadBias of(const AttnParams& p, int64_t b, int64_t h) {
    HeadBias head;
    if (p.alibi_slopes) head.slope = static_cast<const Real*>(p.alibi_slopes)[b * p.alibi_batch_stride + h];
    if (p.relative_bias) {
      head.reach = p.relative_reach;
      head.relative = static_cast<const Real*>(p.relative_bias) + h * (2 * head.reach + 1) + head.reach;
    }
    if (p.bias.data) {
      const int64_t bytes = p.bias.dtype == DType::kFloat64 ? 8 : p.bias.dtype == DType::kFloat32 ? 4 : 2;
      head.bias = static_cast<const char*>(p.bias.data) + (b * p.bias.batch_stride + h * p.bias.head_stride) * bytes;
      head.row_stride = p.bias.row_stride;
    }
    return head;
  }

  // The entry of the relative bias for a distance.
  FLASHATTN_HOST_DEVICE int64_t entry(int64_t distance) const {
    return distance < -reach ? -reach : distance > reach ? reach : distance;
  }
};

}  // namespace flashattn_ext
