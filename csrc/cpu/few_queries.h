// Which sequences decode.h computes. It reads keys once for all query heads of a KV head and, except in invariant
// calls, divides the keys among workers (split-KV). forward.h computes the other sequences: it fills the lanes of its
// vectors with queries, of which a few would leave most lanes idle.
#pragma once

#include "backend/key_locator.h"
#include "params.h"
#include "rules/mask.h"

namespace flashattn_ext {

// lanes: of a vector of floats.
FLASHATTN_HOST_DEVICE bool has_few_queries(const DecodeParams& p, int64_t b, int64_t lanes) {
  constexpr int64_t kMostQueries = 16;
  const int64_t queries = query_sequence(p, b).length;
  // invariant_sums.h does not implement biases.
  if (queries > kMostQueries || p.heads_k == 0 || (p.invariant && p.has_bias())) return false;
  if (!p.splits_alone) return true;
  // A forward without a cache. The splits, and in invariant calls a work item, have fixed costs; slopes are added one
  // score at a time.
  const bool fills_lanes = queries > lanes / 2;
  if (queries > lanes || (fills_lanes && (p.invariant || p.alibi_slopes))) return false;
  const IndexRange visible = Mask(p, queries, KeyLocator(p, b).length).keys_of(0, queries);
  return visible.end - visible.begin >= queries * (fills_lanes ? 64 : p.invariant ? 16 : 8);
}

}  // namespace flashattn_ext
