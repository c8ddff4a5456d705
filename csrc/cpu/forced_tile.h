// Tile sizes of the CPU's forward other than those of tiles.h, for measurements.
#pragma once

#include <utility>

#include "../params.h"

namespace flashattn_ext {

// What later calls of the process use; zeros: tiles.h.
CpuTile forced_cpu_tile();

// Both multiples of 64 up to 1024, or both 0. Throws std::invalid_argument. Results may differ in their rounding.
void force_cpu_tile(int64_t queries, int64_t keys);

// Queries and keys of a tile of an fp32 forward.
std::pair<int64_t, int64_t> cpu_tile();

// Scratch memory of one thread for an fp32 forward, with the tiles in force.
int64_t cpu_scratch_bytes(int64_t head_dim);

}  // namespace flashattn_ext
