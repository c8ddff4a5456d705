// Numbers of queries and keys in a tile of the CPU kernels: 192 x 192 if its keys, values and scores, which its loops
// read many times over, fit the L2 cache of a core, or if the size of that is unknown; otherwise 128 x 128.
// docs/results/cpu.md has the figures of these and of other tiles.
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
