// Invariant decoding calls with few queries, on Hopper: thread blocks compute one chunk of keys (cuda/host/chunks.h) of
// a sequence and KV head each with the kernel of the forward, and a second kernel adds the chunks up as the forward
// does.
#pragma once

#include <cstddef>

#include "cuda/host/chunks.h"

namespace flashattn_ext::decode {

// Whether a call runs here. It has the same bits as a forward of the packed call (prefill.h). kernel: that of the call;
// run is nullptr if it has no chunks.
bool has_chunks(const DecodeParams& p, const ChunkKernel& kernel);

size_t chunk_bytes(const DecodeParams& p, const ChunkKernel& kernel);
void run_chunks(const DecodeParams& p, const ChunkKernel& kernel);

}  // namespace flashattn_ext::decode
