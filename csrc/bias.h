// What is added to a logit because of where its score is: ALiBi (Press et al. 2021), a relative bias (Raffel et al.
// 2020, with one entry for each distance) and a bias of any shape. One definition for every backend.
//
//   logit(i, j) = capped score - slope * |d| + relative[clamp(d, -reach, reach) + reach] + bias[i][j],  d = j - i -
//   shift
//
// where row i is at the position of key i + shift (BasicMask::first_position). With g the gradient of a logit,
//
//   dslope = -sum g * |d|,  drelative[e] = the sum of g over the scores with that clamped distance,  dbias[i][j] = g
//
// each summed over everything that reads the same entry: batch entries, rows, for a bias also heads and rows that it
// has in common.
#pragma once

#include "params.h"
#include "portable.h"

namespace flashattn_ext {

// The biases of one head of one sequence. Real: fp32, or fp64 for fp64 inputs. Terms that are absent are 0.
template <class Real>
struct HeadBias {
  Real slope = 0;
  const Real* relative = nullptr;  // of distance 0; entries -reach to reach
  int64_t reach = 0;
  const void* bias = nullptr;  // of row 0 and key 0, in p.bias.dtype
  int64_t row_stride = 0;

  FLASHATTN_HOST_DEVICE HeadBias() {}  // named, because FLASHATTN_HOST_DEVICE makes it a part of its caller
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
