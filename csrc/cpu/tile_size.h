// How many queries and keys a tile of the CPU kernels has.
//
// On an EPYC 9005 with 1 MB of L2 cache a core, 192 x 192 is as fast as any tile up to 256 x 256 within 2 % on the
// average of head dims from 64 to 512 in fp32 and 16 bit; 128 x 128 is up to 7 % slower and 64 x 64 up to 20 %, and
// larger tiles would leave fewer of them for the threads to share (docs/results/cpu.md). The loops of a tile read its
// keys, values and scores many times over, its queries and results once: a tile is 192 x 192 where the former fit the
// L2 cache of a core, or where its size is not known, and otherwise 128 x 128. The measurements are of one CPU: that a
// smaller cache wants the smaller tile follows from that count alone.
#pragma once

#include <cstdint>

namespace flashattn_ext {

struct TileSize {
  int64_t queries, keys;
};

// dropout.h wants key tiles that start at multiples of 64 and query tiles that start at multiples of 16, mask.h key
// tiles of whole granules, and gemm.h query tiles of whole panels.
constexpr int64_t kTileMultiple = 64;
constexpr int64_t kLargestTile = 512;  // what set_tile_size() takes

// The tile for a cache of l2_bytes, 0 where its size is not known. row_bytes: of the rows of k and v of one key, as the
// products read them. score_bytes: of one score.
TileSize tile_that_fits(int64_t l2_bytes, int64_t row_bytes, int64_t score_bytes);

// The tile for this machine. The same call has the same one, whatever its batch and its sequences and however many
// threads compute it: it decides the order of sums.
TileSize tile_size(int64_t row_bytes, int64_t score_bytes);

// Gives every call another tile, to measure and to test it; {0, 0} ends that. Not while a call runs. Throws
// std::invalid_argument where a size is no multiple of kTileMultiple up to kLargestTile.
void set_tile_size(const TileSize& size);

}  // namespace flashattn_ext
