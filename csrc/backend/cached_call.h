// A call without a KV cache as a decoding call, for backends whose kernels of decoding also run forwards with few
// queries.
#pragma once

#include "params.h"

namespace flashattn_ext {

// The call whose KV cache holds exactly the keys and values of this one.
inline DecodeParams cached_call(const AttnParams& p) {
  DecodeParams call;
  static_cast<AttnParams&>(call) = p;
  call.splits_alone = true;
  call.cache.is_packed = p.is_varlen();
  call.cache.entries = p.is_varlen() ? 1 : p.batch;
  call.cache.page_size = call.cache.seqlen = p.is_varlen() ? p.total_k : p.seqlen_k;
  return call;
}

}  // namespace flashattn_ext
