// The entry points of the sm_80 kernels. Each source that is compiled instantiates one of them for one element type,
// class of head dims and some options: the rows of cuda/table/kernel_table.h.
#pragma once

#include <algorithm>

#include "cuda/sm80/shared/tiles.h"
#include "cuda/table/kernels.h"

namespace flashattn_ext::sm80 {

// kHeadDim: at least head_dim and head_dim_v. Every row of q, k, v and dout is 16-byte aligned and a multiple of 16
// bytes long; the rows of other tensors may have any alignment.
template <class T, int kHeadDim, Options kOptions>
void forward(const AttnParams& p);
template <class T, int kHeadDim, Options kOptions>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim, Options kOptions>
void backward(const AttnGradParams& p);
// Rows of the tangents of q, k and v are aligned as those of q, k and v are.
template <class T, int kHeadDim, Options kOptions>
void jvp(const JvpParams& p);
template <class T, int kHeadDim, Options kOptions>
size_t second_bytes(const SecondParams& p);
template <class T, int kHeadDim, Options kOptions>
void second(const SecondParams& p);

// Whether the forward of a row up to 256 head dims (forward.cuh) tracks the largest logit of a row. The kernels of most
// calls would spill registers with it.
constexpr bool tells_largest(Options options) { return includes(options, kIntervals); }

// Rows for RowKernels (cuda/dispatch.cuh).
struct ForwardRows {
  using Kernel = ForwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm80Forward;
  // A call with row_maxima runs a general kernel where those of its own options do not track them.
  static constexpr KernelCall needed(KernelCall call) {
    const bool large = call.head_dim > 256 || call.head_dim_v > 256;
    if (call.is_invariant && !large) call = invariant(call);
    if (call.wants_largest && !large && !tells_largest(call.options)) {
      call.options = call.options & kFp8 ? kFp8General : kGeneral;
    }
    return call;
  }
  // Kernels for a Mask exist for three classes of head dims, and have the steps of the plain kernels of these classes.
  // They track the largest logit.
  static constexpr KernelCall invariant(KernelCall call) {
    const int64_t columns = std::max(call.head_dim, call.head_dim_v);
    call.head_dim = columns > 128 ? 256 : columns > 64 ? 128 : 64;
    if (call.wants_largest) call.options = call.options | kIntervals;
    return call;
  }
  template <class T, int kHeadDim, int, Options kOptions>
  static constexpr Kernel kernel() {
    constexpr int kLeast = least_shared<sizeof(T), kHeadDim>();
    return {forward<T, kHeadDim, kOptions>, 0, kLeast > kSmallShared ? kLeast : 0};
  }
};
struct BackwardRows {
  using Kernel = BackwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm80Backward;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int, Options kOptions>
  static constexpr Kernel kernel() {
    return {backward<T, kHeadDim, kOptions>, backward_bytes<T, kHeadDim, kOptions>};
  }
};
struct JvpRows {
  using Kernel = JvpKernel;
  static constexpr const auto& kTable = kernel_table::kSm80Jvp;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int, Options kOptions>
  static constexpr Kernel kernel() {
    constexpr int kLeast = derivative_shared<sizeof(T), kHeadDim>();
    return {jvp<T, kHeadDim, kOptions>, 0, kLeast > kSmallShared ? kLeast : 0};
  }
};
struct SecondRows {
  using Kernel = SecondKernel;
  static constexpr const auto& kTable = kernel_table::kSm80Second;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int, Options kOptions>
  static constexpr Kernel kernel() {
    return {second<T, kHeadDim, kOptions>, second_bytes<T, kHeadDim, kOptions>};
  }
};

}  // namespace flashattn_ext::sm80
