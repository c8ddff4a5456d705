// Which keys a query sees (causal and window masks), and which queries a key is seen by: the one definition for every
// backend. Masks are aligned to the bottom right corner: query i stands at key position i + Sk - Sq.
#pragma once

#include "params.h"
#include "portable.h"

namespace flashattn_ext {

struct IndexRange {
  int64_t begin;
  int64_t end;  // exclusive; never below begin
};

struct Mask {
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t window_left;
  int64_t window_right;

  FLASHATTN_HOST_DEVICE Mask(const AttnParams& p, int64_t seqlen_q, int64_t seqlen_k)
      : seqlen_q(seqlen_q), seqlen_k(seqlen_k), window_left(p.window_left), window_right(p.window_right) {}

  FLASHATTN_HOST_DEVICE static IndexRange clamped(int64_t begin, int64_t end, int64_t length) {
    begin = begin < 0 ? 0 : (begin > length ? length : begin);
    end = end > length ? length : end;
    return {begin, end < begin ? begin : end};
  }

  // Keys that at least one query of [row_begin, row_end) sees. With one row: exactly the keys that it sees.
  FLASHATTN_HOST_DEVICE IndexRange keys_of(int64_t row_begin, int64_t row_end) const {
    const int64_t shift = seqlen_k - seqlen_q;
    const int64_t begin = window_left == kUnbounded ? 0 : row_begin + shift - window_left;
    const int64_t end = window_right == kUnbounded ? seqlen_k : row_end + shift + window_right;
    return clamped(begin, end, seqlen_k);
  }

  // Queries that see at least one key of [key_begin, key_end).
  FLASHATTN_HOST_DEVICE IndexRange rows_of(int64_t key_begin, int64_t key_end) const {
    const int64_t shift = seqlen_k - seqlen_q;
    const int64_t begin = window_right == kUnbounded ? 0 : key_begin - shift - window_right;
    const int64_t end = window_left == kUnbounded ? seqlen_q : key_end - shift + window_left;
    return clamped(begin, end, seqlen_q);
  }

  // True when every query of [row_begin, row_end) sees every key of [key_begin, key_end): the branch-free tile.
  FLASHATTN_HOST_DEVICE bool sees_all(int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end) const {
    const int64_t shift = seqlen_k - seqlen_q;
    const bool left = window_left == kUnbounded || row_end - 1 + shift - window_left <= key_begin;
    const bool right = window_right == kUnbounded || row_begin + shift + window_right >= key_end - 1;
    return left && right && key_end <= seqlen_k;
  }
};

}  // namespace flashattn_ext
