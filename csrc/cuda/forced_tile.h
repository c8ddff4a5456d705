// Tiles of the CUDA kernels other than the default ones, for measurements.
#pragma once

#include <string>
#include <vector>

namespace flashattn_ext {

struct CudaTile {
  std::string backend;
  bool backward;
  int head_dim;  // the largest of its class
  bool dropout;
  int choice = 0;  // the default one
  int queries = 0, keys = 0;
  int stages = 0;      // of what the loop walks over: keys and values, in the backward queries and gradients
  std::string detail;  // what else a tile of the backend has, in words
};

// Those of 16-bit types that this build has: without FLASHATTN_EXT_TUNE the default ones alone.
std::vector<CudaTile> cuda_tiles();

// Which tile of a class of head dims later calls of the process run; a class that has fewer runs its default one.
// Throws std::invalid_argument. Results may differ in their rounding.
void force_cuda_tile(int choice);
int forced_cuda_tile();

}  // namespace flashattn_ext
