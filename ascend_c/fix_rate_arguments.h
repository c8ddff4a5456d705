// The arguments of fix_rate.h, for kernel and binding.
#pragma once

#include "tiles.h"

namespace flashattn_ext {
namespace ascend {

struct FixRateArguments {
  // The stores of a core go round regions of GM of the size of its workspace slots for scores.
  static constexpr int64_t kRegions = 8, kPitch = SizesOf<2>::kKeys, kCoreBytes = kRegions * kRows * kPitch * 4;
  static constexpr int32_t kMostColumns = 256;

  void* to;         // [cores] of kCoreBytes
  int32_t columns;  // columns of the sums, which have kRows rows: a multiple of 16, at most kMostColumns
  int32_t times;
  bool fractals;
};

}  // namespace ascend
}  // namespace flashattn_ext
