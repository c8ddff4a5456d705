#include "sm80/tiles.h"
#include "sm90/tiles.h"
#include "tile_list.h"

namespace flashattn_ext {
namespace {

void describe(CudaTile* tile, const sm80::ForwardTile& sizes) {
  tile->queries = sizes.queries(), tile->keys = sizes.keys, tile->stages = sizes.stages;
  tile->detail = std::to_string(sizes.warps) + " warps, " + std::to_string(sizes.stages) +
                 (sizes.stages == 1 ? " stage" : " stages");
}
void describe(CudaTile* tile, const sm90::ForwardTile& sizes) {
  tile->queries = sizes.queries(), tile->keys = sizes.keys, tile->stages = sizes.stages;
  tile->detail = std::to_string(sizes.stages) + " stages";
}
void describe(CudaTile* tile, const sm90::BackwardTile& sizes) {
  tile->queries = sizes.queries, tile->keys = sizes.keys, tile->stages = sizes.stages;
  tile->detail =
      "stages: " + std::to_string(sizes.stages) + " of queries, " + std::to_string(sizes.key_stages) + " of keys";
}

template <class Row, size_t kRows>
void append(std::vector<CudaTile>* all, const char* backend, bool backward, const Row (&table)[kRows]) {
  for (const Row& row : table) {
    if (tile_kind(row.kind) != row.kind) continue;
    for (int choice = 0; choice < kRowTiles && row.tiles[choice].exists(); ++choice) {
      all->push_back({backend, backward, row.head_dims.qk, row.head_dims.v, can_drop(row.kind), choice});
      describe(&all->back(), row.tiles[choice]);
    }
  }
}

}  // namespace

std::vector<CudaTile> cuda_tiles() {
  std::vector<CudaTile> all;
  append(&all, "cuda-sm90", false, sm90::kForwardTiles);
  append(&all, "cuda-sm90", true, sm90::kBackwardTiles);
  append(&all, "cuda-sm80", false, sm80::kForwardTiles);
  return all;
}

}  // namespace flashattn_ext
