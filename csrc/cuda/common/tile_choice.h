// How the rows of the tile tables (sm80/tiles.h, sm90/tiles.h) are read. The first tile of a row is what every build
// runs; builds with FLASHATTN_EXT_TUNE compile the others too, for measurements: `flashattn-ext bench tune`.
#pragma once

namespace flashattn_ext {

#if defined(FLASHATTN_EXT_TUNE)
constexpr int kTileChoices = 3;
#else
constexpr int kTileChoices = 1;
#endif

// A row that has fewer tiles ends in zeros, which stand for the first one.
constexpr int kRowTiles = 3;
template <class Tile>
constexpr Tile choose(const Tile (&row)[kRowTiles], int choice) {
  return row[row[choice].exists() ? choice : 0];
}

}  // namespace flashattn_ext
