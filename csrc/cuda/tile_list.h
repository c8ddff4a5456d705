// The tile tables of the CUDA kernels as a list, for the command line.
#pragma once

#include <string>
#include <vector>

namespace flashattn_ext {

struct CudaTile {
  std::string backend;
  bool backward;
  int head_dim, head_dim_v;  // the largest of its class: of q and k, and of v
  bool dropout;
  int choice = 0;  // column in its row of the table: what FLASHATTN_EXT_TILE_CHOICE names, 0 by default
  int queries = 0, keys = 0;
  int stages = 0;      // of keys and values; in the backward, of queries and output gradients
  std::string detail;  // further sizes of a tile of the backend, in words
};

// All tiles of all kernels of 16-bit types, whether or not this build has and runs them.
std::vector<CudaTile> cuda_tiles();

}  // namespace flashattn_ext
