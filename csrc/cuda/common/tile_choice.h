// How the rows of the tile tables (sm80/tiles.h, sm90/tiles.h) are read. A build runs the first tile of every row; a
// private build that measures other tiles names their column: -DFLASHATTN_EXT_TILE_CHOICE=1 or 2.
#pragma once

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

}  // namespace flashattn_ext
