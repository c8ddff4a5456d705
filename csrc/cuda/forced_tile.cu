#include <atomic>
#include <stdexcept>

#include "forced_tile.h"
#include "sm80/tiles.h"
#include "sm90/tiles.h"

namespace flashattn_ext {
namespace {

std::atomic<int> forced{0};

void describe(CudaTile* tile, const sm80::ForwardTile& of) {
  tile->queries = of.queries(), tile->keys = of.keys, tile->stages = of.stages;
  tile->detail =
      std::to_string(of.warps) + " warps, " + std::to_string(of.stages) + (of.stages == 1 ? " stage" : " stages");
}
#if defined(FLASHATTN_EXT_SM90)
void describe(CudaTile* tile, const sm90::ForwardTile& of) {
  tile->queries = of.queries(), tile->keys = of.keys, tile->stages = of.stages;
  tile->detail = std::to_string(of.stages) + " stages";
}
void describe(CudaTile* tile, const sm90::BackwardTile& of) {
  tile->queries = of.queries, tile->keys = of.keys, tile->stages = of.stages;
  tile->detail = "stages: " + std::to_string(of.stages) + " of queries, " + std::to_string(of.key_stages) + " of keys";
}
#endif

template <class Tile>
void append(std::vector<CudaTile>* all, const CudaTile& like, const Tile (&row)[kRowTiles]) {
  for (int choice = 0; choice < kTileChoices && row[choice].exists(); ++choice) {
    all->push_back(like);
    all->back().choice = choice;
    describe(&all->back(), row[choice]);
  }
}

}  // namespace

std::vector<CudaTile> cuda_tiles() {
  std::vector<CudaTile> all;
#if defined(FLASHATTN_EXT_SM90)
  for (const auto& row : sm90::kForwardTiles) append(&all, {"cuda-sm90", false, row.head_dim, row.dropout}, row.tiles);
  for (const auto& row : sm90::kBackwardTiles) append(&all, {"cuda-sm90", true, row.head_dim, row.dropout}, row.tiles);
#endif
  for (const auto& row : sm80::kForwardTiles) append(&all, {"cuda-sm80", false, row.head_dim, row.dropout}, row.tiles);
  return all;
}

void force_cuda_tile(int choice) {
  if (choice < 0 || choice >= kTileChoices)
    throw std::invalid_argument("choice: expected 0 to " + std::to_string(kTileChoices - 1) +
                                " (more in a build with FLASHATTN_EXT_TUNE=1), got " + std::to_string(choice));
  forced.store(choice, std::memory_order_relaxed);
}

int forced_cuda_tile() { return forced.load(std::memory_order_relaxed); }

}  // namespace flashattn_ext
