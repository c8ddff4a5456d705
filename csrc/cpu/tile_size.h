// Numbers of queries and keys in a tile of the CPU kernels.
//
// On an EPYC 9005 with 1 MB of L2 cache a core, 192 x 192 is as fast as any tile up to 256 x 256 within 2 % on average
// over head dims from 64 to 512 in fp32 and 16 bits; 128 x 128 is up to 7 % slower and 64 x 64 up to 20 %, and larger
// tiles would be fewer and balance the threads worse (docs/results/cpu.md). The loops of a tile read its keys, values
// and scores many times over, its queries and results once: a tile is 192 x 192 if keys, values and scores fit the L2
// cache of a core, or if its size is unknown, and otherwise 128 x 128. Only one CPU was measured; the smaller tile for
// smaller caches is derived from this count, not measured.
#pragma once

#include <cstdint>

namespace flashattn_ext {

struct TileSize {
  int64_t queries, keys;
};

// dropout.h needs key tiles that start at multiples of 64 and query tiles that start at multiples of 16, mask.h needs
// key tiles of whole granules, and gemm.h needs query tiles of whole panels.
constexpr int64_t kTileMultiple = 64;
constexpr int64_t kLargestTile = 512;  // the limit of set_tile_size()

// The tile for a cache of l2_bytes, 0 if unknown. row_bytes: bytes of the k and v rows of one key, as the products read
// them. score_bytes: bytes of one score.
TileSize tile_that_fits(int64_t l2_bytes, int64_t row_bytes, int64_t score_bytes);

// The tile for this machine. It does not depend on batch, sequence lengths or number of threads, because it determines
// the order of sums.
TileSize tile_size(int64_t row_bytes, int64_t score_bytes);

// Overrides the tile of calls without a BlockMask, for measurements and tests; {0, 0} restores the default. Not while a
// call runs. Throws std::invalid_argument unless both sizes are multiples of kTileMultiple up to kLargestTile.
void set_tile_size(const TileSize& size);

}  // namespace flashattn_ext
