// What choose.h decides: the GPU that it reads, the choice for a call, and what the row of a choice says. Host code.
#pragma once

#include "backend/cached_call.h"
#include "cuda/decode/few_queries/pack_gqa.h"
#include "cuda/decode/prefill/chunks.h"
#include "cuda/host/call.h"
#include "cuda/sm80/shared/tiles.h"
#include "cuda/table/stages.h"

namespace flashattn_ext {

// Whose rows a backend runs: those for every GPU (cuda-sm80), or on Hopper these and its own (cuda-sm90).
enum class Family { kEveryGpu, kHopper };

struct Gpu {
  int multiprocessors = 0;
  int block_shared = 0;  // bytes of shared memory that a thread block may have
};

enum class Way {
  kTiles,    // a thread block for each tile of queries, in a backward of keys: the kernels of sm80/ and sm90/
  kChunks,   // forward: one for each chunk of keys (decode/prefill/chunks.h)
  kPackGqa,  // forward: split-KV with PackGQA on the tensor cores of Hopper (decode/few_queries/pack_gqa.h)
  kSplit,    // forward: split-KV over tiles of decoding (decode/split/)
  kPrefill,  // a decoding call as a varlen forward, which makes a choice of its own (decode/prefill/prefill.h)
  kFewQueriesBackward,  // backward: split-KV over the rows of a KV head (decode/few_queries/backward.h)
};

// What happens to inputs before. The kernels of split-KV read fp8 as it is, with any alignment.
enum class Inputs { kAsGiven, kAligned, kWidened };

struct Choice {
  TableRow row;  // the kernel; none: no row serves the call
  Way way = Way::kTiles;
  Inputs inputs = Inputs::kAligned;
  bool transposes = false;  // values in e4m3: whether the kernel transposes them itself, or another one before it
};

// How decoding runs a row of kSm90Invariant; `run` is not set.
inline ChunkKernel chunk_tile(const TableRow& row) {
  const sm90::ForwardTile tile = compiled_tile(table_row<Stage::kSm90Invariant>(row).tiles);
  return {nullptr, tile.queries(), tiles_of_chunk(tile.keys) * tile.keys, tile.keys};
}
// A row of kSm90PackGqa; `run` is not set.
inline decode::PackGqaKernel pack_gqa_tile(const TableRow& row) {
  const auto& kernel = table_row<Stage::kSm90PackGqa>(row);
  const sm90::ForwardTile tile = compiled_tile(kernel.tiles);
  return {nullptr, tile.queries(), tile.keys, kernel.head_dims.qk};
}

// Shared memory that a thread block of a forward or of forward mode needs, in bytes; 0: what every GPU has.
inline int least_shared(const TableRow& row) {
  const int bytes = row.type == kFp32 ? 4 : 2;
  const int least =
      row.stage == Stage::kSm80Forward ? sm80::least_shared(bytes, table_row<Stage::kSm80Forward>(row).head_dims.qk)
      : row.stage == Stage::kSm80Jvp   ? sm80::derivative_shared(bytes, table_row<Stage::kSm80Jvp>(row).head_dims.qk)
                                       : 0;
  return least > sm80::kSmallShared ? least : 0;
}

// Whether the rows of q and of the caches are aligned for TMA.
inline bool has_aligned_rows(const DecodeParams& p) {
  const auto aligned = [&](const TensorView& t, int64_t columns) {
    return rows_are_aligned(t, columns, element_bytes(p));
  };
  const bool has_q = p.rotary.cos ? p.head_dim % 8 == 0 : aligned(p.q, p.head_dim);
  return has_q && aligned(p.k, p.head_dim) && aligned(p.v, p.head_dim_v);
}

}  // namespace flashattn_ext
