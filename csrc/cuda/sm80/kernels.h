// The entry points of the sm_80 kernels, which dispatch.cu calls. Each source that is compiled instantiates one of them
// for one element type, class of head dims and some kinds.
#pragma once

#include <cstddef>

#include "../common/kind.h"

namespace flashattn_ext::sm80 {

// kHeadDim: 64, 96, 128, 144, 192 or 256, at least head_dim and head_dim_v. Every row of q, k, v and dout is 16-byte
// aligned and a multiple of 16 bytes long; the rows of other tensors may be anywhere.
template <class T, int kHeadDim, Kind kKind>
void forward(const AttnParams& p);
template <class T, int kHeadDim, Kind kKind>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim, Kind kKind>
void backward(const AttnGradParams& p);

}  // namespace flashattn_ext::sm80
