// The entry points of the sm_90 kernels: instantiated by csrc/sources.py, one class of head dims in each file, and
// called by dispatch.cu.
#pragma once

#include <cstddef>

#include "../../params.h"

namespace flashattn_ext::sm90 {

constexpr size_t kForwardBytes = 64;  // of workspace: the counter of tiles

// T: __half or __nv_bfloat16; kHeadDim as in sm80/kernels.h. Every row of q, k and v is 16-byte aligned and a multiple
// of 16 bytes long; rows of `out` may lie anywhere.
template <class T, int kHeadDim>
void forward(const AttnParams& p);

// The same, and of dout; rows of out, dq, dk and dv may lie anywhere.
template <class T, int kHeadDim>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim>
void backward(const AttnGradParams& p);

}  // namespace flashattn_ext::sm90
