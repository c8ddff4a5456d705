// Which sequences decode.h computes, or in invariant calls invariant_decode.h. They read keys once for all query heads
// of a KV head, and decode.h divides the keys among workers (split-KV). forward.h computes the other sequences: it
// fills the lanes of its vectors with queries, of which a few would leave most lanes idle.
#pragma once

#include "../key_locator.h"
#include "../portable.h"

namespace flashattn_ext {

// lanes: of a vector of floats.
FLASHATTN_HOST_DEVICE bool has_few_queries(const DecodeParams& p, int64_t b, int64_t lanes) {
  constexpr int64_t kMostQueries = 16;
  const int64_t queries = query_sequence(p, b).length;
  // invariant_decode.h does not implement biases.
  if (queries > kMostQueries || p.heads_k == 0 || (p.invariant && p.has_bias())) return false;
  if (!p.splits_alone) return true;
  // A forward without a cache: with fewer keys, or as many queries as lanes, combining splits costs more than it saves.
  constexpr int64_t kLeastKeys = 32, kLeastKeysOfFullLanes = 1024;
  const int64_t keys = KeyLocator(p, b).length;
  return queries <= lanes && keys >= (queries <= lanes / 2 ? kLeastKeys : kLeastKeysOfFullLanes);
}

}  // namespace flashattn_ext
