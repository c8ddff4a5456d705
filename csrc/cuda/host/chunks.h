// Chunks of keys. An invariant call on Hopper accumulates every kChunkKeys keys of a row by themselves and adds the
// results up from the last chunk to the first (chunks.cuh). Chunks begin at multiples of a number of keys that depends
// on the kernel alone: the bits of a row are the same whether one thread block computes its chunks one after another,
// as in a forward, or many do at the same time, as in decoding.
#pragma once

#include "params.h"

namespace flashattn_ext {

constexpr int kChunkKeys = 4096;  // the least keys of a chunk, which is whole tiles of keys
constexpr int tiles_of_chunk(int tile_keys) { return (kChunkKeys + tile_keys - 1) / tile_keys; }
template <int kTileKeys>
constexpr int kTilesOfChunk = tiles_of_chunk(kTileKeys);

// The softmax of a row over some chunks: the maximum that its weights are relative to, in units of log2, and their sum.
struct ChunkSum {
  float max, sum;
};

// The pages of a KV cache, whose keys are read in place. Every sequence begins with a page.
struct KeyPages {
  TensorView k, v;                 // [entries, page_size, Hk, D]
  const int32_t* table = nullptr;  // [B, pages of a sequence]; nullptr: keys are rows of the packed call
  int64_t table_stride = 0;
  int page_size = 0;
  int entries = 0;
  int box_rows = 0;  // copied at once: the most that divide a page and a tile of keys
};

// A call in which thread blocks compute one chunk of a sequence and head each. Sequence b of a call with this many
// chunks is sequence 2 b of the packed call (cuda/decode/prefill/prefill.h).
struct ChunkPartials {
  float* out = nullptr;      // [slots, rows, columns], not normalised
  ChunkSum* sums = nullptr;  // [slots, rows]
  float* largest = nullptr;  // [slots, rows]: largest logits, in units of log2; nullptr: not wanted
  int chunks = 0;            // chunks of a sequence, from the shapes. Slot: (b * heads + h) * chunks + chunk
  int heads = 0;             // heads of a sequence: query heads / group
  int keys = 0;              // keys of a chunk
  int rows = 0;              // rows of a sequence and head, which are one tile of queries: queries * group
  int group = 1;         // query heads that read the same keys and are rows of one tile; row i is of query i / group
  int columns = 0;       // columns of a row, whole vectors
  int* taken = nullptr;  // TileGrid::taken, zeroed
  KeyPages pages;
};

// The kernel of a row of the table, and what it needs.
struct ChunkKernel {
  void (*run)(const AttnParams&, const ChunkPartials&) = nullptr;
  int rows = 0;       // at most, of a sequence and head
  int keys = 0;       // keys of a chunk
  int tile_keys = 0;  // keys of a tile
};

}  // namespace flashattn_ext
