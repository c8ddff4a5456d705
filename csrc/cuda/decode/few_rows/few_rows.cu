#include <algorithm>
#include <limits>

#include "cuda/decode/few_rows/few_rows.h"
#include "cuda/decode/few_rows/packed.h"
#include "cuda/decode/split/decode.h"
#include "cuda/decode/split/tiles.h"
#include "cuda/host/call.h"

namespace flashattn_ext::decode {

constexpr int64_t kFewQueries = 32;

// The most queries of a sequence with which a forward runs here. It depends on the shapes of one sequence. packs:
// whether the kernels of packed rows serve the call.
static int64_t most_few_queries(const AttnParams& p, bool packs) {
  // The kernels of sm90/ launch one thread block per query head and query tile, and their tiles have enough rows from
  // about 32 queries on: on an H200, 64 queries have 0.98 of the speed of a copy if the batch fills the GPU and every
  // query head has its own keys. Where several query heads share keys, packed rows are 1.1 to 1.8 times as fast with
  // 64 queries from 4096 keys on (with 2048 and batches of 8 they are 0.8 times), and as fast with 128. So other calls
  // come here only for sequences so long that large batches of them are rare: one sequence alone fills the GPU here,
  // and is up to 4 times as fast.
  constexpr int64_t kLongBytes = 128 << 20, kLeastPackedKeys = 4096;
  const bool is_long = p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v) * key_bytes(p) >= kLongBytes;
  if (is_long) return packs ? kMostPackedQueries : kMostFewQueries;
  return packs && p.group_size() > 1 && p.seqlen_k >= kLeastPackedKeys ? kMostFewQueries : kFewQueries;
}

bool has_few_queries(const AttnParams& p) {
  return !p.is_varlen() && !p.has_intervals() && p.batch * p.heads_q > 0 && p.seqlen_q > 0 &&
         p.seqlen_q <= kFewQueries && p.seqlen_k >= kLeastSplitKeys;
}

bool is_few_rows(const AttnParams& p, const PackedKernel* packed) {
  constexpr int64_t kWideColumns = 256, kMostNarrowRows = 64;  // above kWideColumns a tile has 16 rows
  // These come first, because every forward asks. Without query heads there may be no KV heads to divide by.
  static_assert(kMostPackedQueries >= kMostFewQueries && kMostPackedQueries >= kFewQueries);
  if (p.seqlen_q > kMostPackedQueries || p.seqlen_k < kLeastSplitKeys || p.heads_q == 0) return false;
  if (p.invariant || p.has_intervals() || p.has_dropout() || p.relative_bias || p.bias.data || p.centres.data)
    return false;
  const DecodeParams call = cached_call(p);
  if (p.seqlen_q > most_few_queries(p, has_packed_rows(call, packed))) return false;
  if (std::max(p.head_dim, p.head_dim_v) > kWideColumns && p.seqlen_q * p.group_size() > kMostNarrowRows) return false;
  // The kernel numbers the units (plan.h) in 32 bits.
  const int64_t tiles = p.seqlen_q * p.group_size() / 16 + 1,
                units = batch_entries(p) * key_rows(p) / kUnitKeys + p.batch;
  if (p.heads_k * units > std::numeric_limits<int32_t>::max() / (2 * tiles)) return false;
  return refuses(call).empty();
}

}  // namespace flashattn_ext::decode
