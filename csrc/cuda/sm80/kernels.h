// The entry points of the sm_80 kernels. Each source that is compiled instantiates one of them for one element type,
// class of head dims and some kinds: the rows of ../table/kernel_table.h.
#pragma once

#include "../table/kernels.h"
#include "tiles.h"

namespace flashattn_ext::sm80 {

// kHeadDim: at least head_dim and head_dim_v. Every row of q, k, v and dout is 16-byte aligned and a multiple of 16
// bytes long; the rows of other tensors may have any alignment.
template <class T, int kHeadDim, Kind kKind>
void forward(const AttnParams& p);
template <class T, int kHeadDim, Kind kKind>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim, Kind kKind>
void backward(const AttnGradParams& p);

// Whether the forward of a kind up to 256 head dims (forward.cuh) tracks the largest logit of a row. The kernels of
// most calls would spill registers with it; a call with row_maxima runs kGeneral instead.
constexpr bool tells_largest(Kind kind) { return kind != Kind::kPlain && kind != Kind::kDropout; }

// Rows for RowKernels (../dispatch.cuh).
struct ForwardRows {
  using Kernel = ForwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm80Forward;
  template <class T, int kHeadDim, int, Kind kKind>
  static constexpr Kernel kernel() {
    constexpr int kLeast = least_shared<sizeof(T), kHeadDim>();
    return {forward<T, kHeadDim, kKind>, 0, kLeast > kSmallShared ? kLeast : 0, kHeadDim > 256 || tells_largest(kKind)};
  }
};
struct BackwardRows {
  using Kernel = BackwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm80Backward;
  template <class T, int kHeadDim, int, Kind kKind>
  static constexpr Kernel kernel() {
    return {backward<T, kHeadDim, kKind>, backward_bytes<T, kHeadDim, kKind>};
  }
};

}  // namespace flashattn_ext::sm80
