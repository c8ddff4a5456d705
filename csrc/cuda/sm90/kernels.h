// The entry points of the sm_90 kernels, which dispatch.cu calls. Each source that is compiled instantiates one of them
// for one element type, class of head dims and some kinds.
#pragma once

#include <cstddef>

#include "../common/kind.h"

namespace flashattn_ext::sm90 {

// Whether there is a backward of a kind; sm80's runs other calls. ptxas serialises the products of a general one
// (C7510), and they took 1.35 times the time of sm80's. csrc/sources.py has the same lists.
constexpr bool has_backward(int head_dim, Kind kind) {
  if (head_dim > 256) return kind == Kind::kPlain;
  return kind != Kind::kGeneral && ((kind != Kind::kScores && kind != Kind::kBias) || head_dim <= 128);
}
// The class of head dims whose backward runs another one: a bias of 16 bits has kernels of head_dim 128 alone. With 128
// queries a step, as up to 64, tiles of the bias and of its gradient do not fit in shared memory.
constexpr int backward_class(int head_dim, Kind kind) { return kind == Kind::kBias ? 128 : head_dim; }
// The same for the forward. Head dims above 256 are rare: other kinds of them have no kernels of their own.
constexpr bool has_forward(int head_dim, Kind kind) {
  return head_dim <= 256 || kind == Kind::kPlain || kind == Kind::kDropout;
}

// Columns of v that kernels of a kind have in a class of head dims of q and k and of v: as many as q and k but in plain
// ones. NARROW_VALUES in csrc/sources.py names those with fewer.
constexpr int value_class(int head_dim, int head_dim_v, Kind kind) {
  return kind == Kind::kPlain ? head_dim_v : head_dim;
}

constexpr size_t kForwardBytes = 64;  // workspace of the forward: TileGrid::taken

// T: __half or __nv_bfloat16; kHeadDim as in sm80/kernels.h; kHeadDimV: value_class(). Every row of q, k and v is
// 16-byte aligned and a multiple of 16 bytes long; rows of `out` may be anywhere.
template <class T, int kHeadDim, Kind kKind, int kHeadDimV = kHeadDim>
void forward(const AttnParams& p);

// Rows of dout are aligned as well; rows of out, dq, dk and dv may be anywhere.
template <class T, int kHeadDim, Kind kKind, int kHeadDimV = kHeadDim>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim, Kind kKind, int kHeadDimV = kHeadDim>
void backward(const AttnGradParams& p);

}  // namespace flashattn_ext::sm90
