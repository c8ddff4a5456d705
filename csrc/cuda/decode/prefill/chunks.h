// Invariant decoding calls with few queries, on Hopper: thread blocks compute one chunk of keys (cuda/host/chunks.h) of
// a sequence and KV head each with the kernel of the forward, and a second kernel adds the chunks up as the forward
// does.
#pragma once

#include <cstddef>

#include "cuda/host/call.h"
#include "cuda/host/chunks.h"

namespace flashattn_ext::decode {

constexpr int kMostChunkColumns = 256;  // columns of v and out

inline int64_t chunks_of(const DecodeParams& p, const ChunkKernel& kernel) {
  return tile_count(p.cache.capacity(), kernel.keys);
}
inline int64_t columns_of(const DecodeParams& p) { return (p.head_dim_v + 7) / 8 * 8; }
// Rows of all partial results.
inline int64_t partial_rows(const DecodeParams& p, const ChunkKernel& kernel) {
  return p.batch * p.heads_q * p.seqlen_q * chunks_of(p, kernel);
}

// A call has the same bits here as a forward of the packed call (prefill.h) has.
size_t chunk_bytes(const DecodeParams& p, const ChunkKernel& kernel);
void run_chunks(const DecodeParams& p, const ChunkKernel& kernel);

}  // namespace flashattn_ext::decode
