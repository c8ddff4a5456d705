// What a row of the table of kernels must serve (KernelCall in rows.h), of a call with these parameters.
#pragma once

#include <algorithm>

#include "cuda/sm80/shared/tiles.h"
#include "cuda/table/stages.h"

namespace flashattn_ext {

// A call with its inputs widened.
inline KernelCall widened_call(KernelCall call) {
  if (call.type == kE4m3) call.type = kBf16;
  return call;
}
// Invariant calls in fp8 have the bits of decoding, which widens its caches.
inline KernelCall forward_call(const AttnParams& p) {
  const Options options = p.invariant ? invariant_options(options_of(p)) : options_of(p);
  const KernelCall call{type_bit(p.dtype), p.head_dim, p.head_dim_v, options, p.row_maxima.data != nullptr,
                        p.invariant};
  return p.invariant ? widened_call(call) : call;
}
// `invariant` is about out and lse: derivatives, like gradients, are those of the call without it.
inline KernelCall backward_call(const AttnParams& p, Options options) {
  return {type_bit(p.dtype), p.head_dim, p.head_dim_v, options};
}

// What a row of kSm80Forward must have for a call. A call with row_maxima runs a general kernel where those of its own
// options do not track them. Invariant calls with a Mask run one of three classes of head dims, and others the plain
// kernels of these classes, which have the same steps.
inline KernelCall sm80_forward_call(KernelCall call) {
  const int64_t columns = std::max(call.head_dim, call.head_dim_v);
  if (columns > 256) return call;
  if (call.is_invariant) {
    call.head_dim = columns > 128 ? 256 : columns > 64 ? 128 : 64;
    if (call.wants_largest) call.options = call.options | kIntervals;
  }
  if (call.wants_largest && !sm80::tells_largest(call.options)) {
    call.options = call.options & kFp8 ? kFp8General : kGeneral;
  }
  return call;
}

}  // namespace flashattn_ext
