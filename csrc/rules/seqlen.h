// Row range of one batch entry, for dense and varlen calls. It is clamped, so that invalid cu_seqlens cannot lead
// outside the tensors.
#pragma once

#include "params.h"
#include "portable.h"

namespace flashattn_ext {

struct Sequence {
  int64_t start;   // index of the first row among the packed rows; 0 in a dense call, which has a batch stride
  int64_t length;  // number of rows
};

FLASHATTN_HOST_DEVICE Sequence clamped_sequence(int64_t start, int64_t end, int64_t total) {
  start = start < 0 ? 0 : (start > total ? total : start);
  end = end < start ? start : (end > total ? total : end);
  return {start, end - start};
}

FLASHATTN_HOST_DEVICE Sequence packed_sequence(const int32_t* cu_seqlens, int64_t total, int64_t b) {
  return clamped_sequence(cu_seqlens[b], cu_seqlens[b + 1], total);
}

FLASHATTN_HOST_DEVICE Sequence query_sequence(const AttnParams& p, int64_t b) {
  return p.cu_seqlens_q ? packed_sequence(p.cu_seqlens_q, p.total_q, b) : Sequence{0, p.seqlen_q};
}

FLASHATTN_HOST_DEVICE Sequence key_sequence(const AttnParams& p, int64_t b) {
  return p.cu_seqlens_k ? packed_sequence(p.cu_seqlens_k, p.total_k, b) : Sequence{0, p.seqlen_k};
}

}  // namespace flashattn_ext
