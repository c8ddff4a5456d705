#include "table/kernel_table.h"
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
  if (sizes.order == sm90::BackwardOrder::kApart) tile->detail += ", dq apart";
  if (sizes.order == sm90::BackwardOrder::kApartOnce) tile->detail += ", dq apart, one turn";
  if (sizes.order == sm90::BackwardOrder::kPairs) tile->detail += ", in pairs";
  if (sizes.order == sm90::BackwardOrder::kThreePhases) tile->detail += ", three phases";
}

// Tiles for GPUs with less shared memory are not alternatives.
bool is_alternative(const sm80::ForwardTile& tile) { return tile.exists() && tile.column_warps == 1; }
template <class Tile>
bool is_alternative(const Tile& tile) {
  return tile.exists();
}

// The rows that calls without options but dropout run.
template <class Row, size_t kRows>
void append(std::vector<CudaTile>* all, const char* backend, bool backward, const Row (&table)[kRows]) {
  for (const Row& row : table) {
    for (const Options options : {kPlain, kDropout}) {
      const KernelCall call{kFp16, row.head_dims.qk, row.head_dims.v, options};
      if (first_row(table, call) != &row) continue;
      for (int choice = 0; choice < kTileChoices && is_alternative(row.tiles[choice]); ++choice) {
        all->push_back({backend, backward, row.head_dims.qk, row.head_dims.v, options == kDropout, choice});
        describe(&all->back(), row.tiles[choice]);
      }
    }
  }
}

}  // namespace

std::vector<CudaTile> cuda_tiles() {
  std::vector<CudaTile> all;
  append(&all, "cuda-sm90", false, kernel_table::kSm90Forward);
  append(&all, "cuda-sm90", true, kernel_table::kSm90Backward);
  append(&all, "cuda-sm80", false, kernel_table::kSm80Forward);
  return all;
}

}  // namespace flashattn_ext
