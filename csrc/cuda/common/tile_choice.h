// How the rows of the tile tables (sm80/tiles.h, sm90/tiles.h) are read. A build runs the first tile of every row; a
// private build that measures other tiles names their column: -DFLASHATTN_EXT_TILE_CHOICE=1 or 2.
#pragma once

#include <cstddef>

#include "kind.h"

#if !defined(FLASHATTN_EXT_TILE_CHOICE)
#define FLASHATTN_EXT_TILE_CHOICE 0
#endif

namespace flashattn_ext {

// A class of head dims: the most columns of q and k, and of v and out, that its kernels take. They are the same in
// nearly all classes.
struct HeadDims {
  int qk, v;
  constexpr HeadDims(int both) : HeadDims(both, both) {}
  constexpr HeadDims(int qk, int v) : qk(qk), v(v) {}
  constexpr bool operator==(const HeadDims& other) const { return qk == other.qk && v == other.v; }
};

constexpr int kRowTiles = 3;
static_assert(FLASHATTN_EXT_TILE_CHOICE >= 0 && FLASHATTN_EXT_TILE_CHOICE < kRowTiles);

// A row with fewer tiles ends in zeros, for which its first tile stands in.
template <class Tile>
constexpr Tile choose(const Tile (&row)[kRowTiles]) {
  return row[row[FLASHATTN_EXT_TILE_CHOICE].exists() ? FLASHATTN_EXT_TILE_CHOICE : 0];
}

// The tile of a class of head dims and a kind, or of the kind whose row serves it.
template <class Tile, class Row, size_t kRows>
constexpr Tile find_tile(const Row (&table)[kRows], HeadDims head_dims, Kind kind) {
  for (const Row& row : table) {
    if (row.head_dims == head_dims && row.kind == kind) return choose(row.tiles);
  }
  return tile_kind(kind) == kind ? Tile{} : find_tile<Tile>(table, head_dims, tile_kind(kind));
}

}  // namespace flashattn_ext
