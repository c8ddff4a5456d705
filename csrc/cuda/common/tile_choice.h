// How the rows of the tile tables (sm80/tiles.h, sm90/tiles.h) are read. A build runs the first tile of every row; a
// private build that measures other tiles names their column: -DFLASHATTN_EXT_TILE_CHOICE=1 or 2.
#pragma once

#include <cstddef>

#include "kind.h"

#if !defined(FLASHATTN_EXT_TILE_CHOICE)
#define FLASHATTN_EXT_TILE_CHOICE 0
#endif

namespace flashattn_ext {

constexpr int kRowTiles = 3;
static_assert(FLASHATTN_EXT_TILE_CHOICE >= 0 && FLASHATTN_EXT_TILE_CHOICE < kRowTiles);

// A row with fewer tiles ends in zeros, for which its first tile stands in.
template <class Tile>
constexpr Tile choose(const Tile (&row)[kRowTiles]) {
  return row[row[FLASHATTN_EXT_TILE_CHOICE].exists() ? FLASHATTN_EXT_TILE_CHOICE : 0];
}

// The tile of a class of head dims and a kind, or of the kind whose row serves it.
template <class Tile, class Row, size_t kRows>
constexpr Tile find_tile(const Row (&table)[kRows], int head_dim, Kind kind) {
  for (const Row& row : table) {
    if (row.head_dim == head_dim && row.kind == kind) return choose(row.tiles);
  }
  return tile_kind(kind) == kind ? Tile{} : find_tile<Tile>(table, head_dim, tile_kind(kind));
}

}  // namespace flashattn_ext
