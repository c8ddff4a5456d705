#include <algorithm>
#include <limits>

#include "../common/call.h"
#include "decode.h"
#include "few_rows.h"
#include "tiles.h"

namespace flashattn_ext::decode {

DecodeParams cached_call(const AttnParams& p) {
  DecodeParams call;
  static_cast<AttnParams&>(call) = p;
  call.splits_alone = true;
  call.cache.is_packed = p.is_varlen();
  call.cache.entries = batch_entries(p);
  call.cache.page_size = call.cache.seqlen = key_rows(p);
  return call;
}

constexpr int64_t kMostQueries = 32, kLeastKeys = 512;

bool has_few_queries(const AttnParams& p) {
  return !p.is_varlen() && !p.has_intervals() && p.batch * p.heads_q > 0 && p.seqlen_q > 0 &&
         p.seqlen_q <= kMostQueries && p.seqlen_k >= kLeastKeys;
}

bool is_few_rows(const AttnParams& p) {
  // The kernels of sm90/ launch one thread block per query head and query tile, and their tiles have enough rows from
  // about 32 queries on. The decoding kernels reach, relative to sm90/ on an H200 with 32 queries, 7 times the speed
  // for one sequence (65536 keys, 32:8 heads) and 0.62 to 0.88 of it if the batch fills the GPU; with 64 queries twice
  // and 0.65. So they take more than 32 queries only for sequences so long that large batches of them are rare. Below
  // 512 keys split-KV gains little.
  constexpr int64_t kLongBytes = 128 << 20;
  constexpr int64_t kWideColumns = 256, kMostNarrowRows = 64;  // above kWideColumns a tile has 16 rows
  const bool is_long = p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v) * key_bytes(p) >= kLongBytes;
  if (p.seqlen_q > (is_long ? kMostFewQueries : kMostQueries) || p.seqlen_k < kLeastKeys) return false;
  if (p.invariant || p.has_intervals() || p.has_dropout() || p.relative_bias || p.bias.data || p.centres.data)
    return false;
  if (std::max(p.head_dim, p.head_dim_v) > kWideColumns && p.seqlen_q * p.group_size() > kMostNarrowRows) return false;
  // The kernel numbers the units (plan.h) in 32 bits.
  const int64_t tiles = p.seqlen_q * p.group_size() / 16 + 1,
                units = batch_entries(p) * key_rows(p) / kUnitKeys + p.batch;
  if (p.heads_k * units > std::numeric_limits<int32_t>::max() / (2 * tiles)) return false;
  return refuses(cached_call(p)).empty();
}

size_t few_rows_bytes(const AttnParams& p) { return workspace_bytes(cached_call(p)); }

void run_few_rows(const AttnParams& p) { run(cached_call(p)); }

}  // namespace flashattn_ext::decode
