// The entry points of the sm_90 kernels, which dispatch.cu calls. Each source that is compiled instantiates one of them
// for one element type and class of head dims.
#pragma once

#include <cstddef>

#include "../../params.h"

namespace flashattn_ext::sm90 {

constexpr size_t kForwardBytes = 64;  // workspace of the forward: TileGrid::taken

// T: __half or __nv_bfloat16; kHeadDim as in sm80/kernels.h. Every row of q, k and v is 16-byte aligned and a multiple
// of 16 bytes long; rows of `out` may be anywhere.
template <class T, int kHeadDim>
void forward(const AttnParams& p);

// Rows of dout are aligned as well; rows of out, dq, dk and dv may be anywhere.
template <class T, int kHeadDim>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim>
void backward(const AttnGradParams& p);

}  // namespace flashattn_ext::sm90
