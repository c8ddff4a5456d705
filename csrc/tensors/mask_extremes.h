// Summaries of the intervals of a Mask for the kernels (IntervalExtremes in mask.h), computed once per Mask.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace flashattn_ext {

// int32 [.., Sk, 2] -> int32 [.., granules + supers, 4]: the extremes of every kMaskGranule keys, followed by the
// extremes of every kMaskSuper granules. Does not synchronise with the device.
at::Tensor mask_extremes(const at::Tensor& intervals);

// The shape of the result. mask_extremes_meta returns a meta tensor of this shape.
std::vector<c10::SymInt> mask_extremes_shape(const at::Tensor& intervals);
at::Tensor mask_extremes_meta(const at::Tensor& intervals);

}  // namespace flashattn_ext
