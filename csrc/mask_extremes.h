// What the kernels want to know about the intervals of a Mask (IntervalExtremes in mask.h), made once for each Mask.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace flashattn_ext {

// int32 [.., Sk, 2] -> int32 [.., granules + supers, 4]: the extremes of every kMaskGranule keys, then those of every
// kMaskSuper granules. Nothing waits for the device.
at::Tensor mask_extremes(const at::Tensor& intervals);

// The shape of the result; also that of meta tensors, which mask_extremes_meta makes.
std::vector<c10::SymInt> mask_extremes_shape(const at::Tensor& intervals);
at::Tensor mask_extremes_meta(const at::Tensor& intervals);

}  // namespace flashattn_ext
