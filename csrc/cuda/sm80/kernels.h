// The entry points of the sm_80 kernels, which dispatch.cu calls. Each source that is compiled instantiates one of them
// for one element type, class of head dims and some kinds.
#pragma once

#include <cstddef>

#include "../common/kernels.h"
#include "../common/kind.h"

namespace flashattn_ext::sm80 {

// Which kernel runs a call of a class of head dims and a kind. Up to 256 calls with scores or a Mask have few classes.
// Head dims above 256 are rare: fp32 has one kind of kernels for them, which finds out every option at run time, and
// 16-bit types one more, kPlain. What these leave to the other runs it with the widest class. csrc/sources.py has the
// same list.
template <class T, int kHeadDim, Kind kKind>
struct Instance {
  static constexpr bool kIsWide = kHeadDim > 256, kIsPlain = sizeof(T) == 2 && kKind == Kind::kPlain;
  static constexpr Kind kRun = kIsWide && !kIsPlain ? Kind::kGeneral : general_kind(kKind);
  static constexpr bool kIsRare = kRun == Kind::kGeneral || kRun == Kind::kIntervals;
  static constexpr int kWideClass = sizeof(T) == 2 && kRun == Kind::kGeneral ? 512 : kHeadDim;
  static constexpr int kClass = kIsWide ? kWideClass : kIsRare ? rare_class(kHeadDim) : kHeadDim;
};

// kHeadDim: 64, 96, 128, 144, 192, 256, 384 or 512, at least head_dim and head_dim_v. Every row of q, k, v and dout is
// 16-byte aligned and a multiple of 16 bytes long; the rows of other tensors may be anywhere.
template <class T, int kHeadDim, Kind kKind>
void forward(const AttnParams& p);
template <class T, int kHeadDim, Kind kKind>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim, Kind kKind>
void backward(const AttnGradParams& p);

template <class T, int kHeadDim, Kind kKind>
constexpr Kernels kernels() {
  using Run = Instance<T, kHeadDim, kKind>;
  return {0, forward<T, Run::kClass, Run::kRun>, backward_bytes<T, Run::kClass, Run::kRun>,
          backward<T, Run::kClass, Run::kRun>};
}

}  // namespace flashattn_ext::sm80
