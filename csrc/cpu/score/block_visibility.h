// The visibility policy of a BlockMask (rules/mask.h) for one head. head_mask.h takes visible tiles from its lists, and
// panel_mask.h takes the bits of a partial tile. In calls with a BlockMask a tile is one of its blocks (tile_size() in
// tiles.h).
#pragma once

#include "cpu/vectors/tiles.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The bits of a partial block by key: bit r % 32 of word r / 32 says whether row r sees the key.
struct BlockColumns {
  uint32_t of_key[kMaskBlock][kMaskBlockWords];

  // rows: the bits of the block by row.
  FLASHATTN_SHARED explicit BlockColumns(const uint32_t* rows) {
    static_assert(kMaskBlockWords == 4, "a vector below has the words of one row");
    typedef uint32_t Words __attribute__((vector_size(16)));
    for (int64_t part = 0; part < kMaskBlockWords; ++part) {
      // Four squares of 32 x 32 bits at once, one in each word: halves of ever smaller squares are exchanged.
      Words square[32];
      std::memcpy(square, rows + part * 32 * kMaskBlockWords, sizeof square);
      uint32_t mask = 0xFFFFu;
      for (int size = 16; size; size >>= 1, mask ^= mask << size) {
        for (int r = 0; r < 32; r = (r + size + 1) & ~size) {
          const Words differs = ((square[r] >> size) ^ square[r + size]) & mask;
          square[r + size] ^= differs;
          square[r] ^= differs << size;
        }
      }
      for (int word = 0; word < 4; ++word) {
        for (int key = 0; key < 32; ++key) of_key[word * 32 + key][part] = square[key][word];
      }
    }
  }
};

class BlockVisibility {
 public:
  BlockVisibility() = default;
  BlockVisibility(const AttnParams& p, int64_t b, int64_t h) : lists_(p, b, h) {}

  // The number of a tile of rows or of keys that is past every other.
  static constexpr int64_t kNoTile = std::numeric_limits<int32_t>::max();

  // Whether the rows of a tile see any key of another one, and all of them.
  Visibility visibility(int64_t row_tile, int64_t key_tile) const {
    const MaskBlock* const block = find(row_tile, key_tile);
    return !block ? Visibility::kNone : block->is_whole() ? Visibility::kAll : Visibility::kSome;
  }
  // The bits of a tile that is partly visible.
  BlockColumns columns(int64_t row_tile, int64_t key_tile) const {
    return BlockColumns(lists_.bits_of(*find(row_tile, key_tile)));
  }
  // The first tile of keys from `tile` on that the rows see, and the last one up to `tile`: -1 if there is none.
  int64_t next_keys(int64_t row_tile, int64_t tile) const { return first_from(lists_.of_rows(row_tile), tile); }
  int64_t previous_keys(int64_t row_tile, int64_t tile) const {
    const MaskBlockRun run = lists_.of_rows(row_tile);
    const MaskBlock* const after = run.first_from(tile + 1);
    return after == run.begin ? -1 : after[-1].block;
  }
  // The first tile of rows from `tile` on that see the keys.
  int64_t next_rows(int64_t key_tile, int64_t tile) const { return first_from(lists_.of_keys(key_tile), tile); }

 private:
  static int64_t first_from(MaskBlockRun run, int64_t block) {
    const MaskBlock* const found = run.first_from(block);
    return found == run.end ? kNoTile : found->block;
  }
  const MaskBlock* find(int64_t row_tile, int64_t key_tile) const {
    const MaskBlockRun run = lists_.of_rows(row_tile);
    const MaskBlock* const found = run.first_from(key_tile);
    return found != run.end && found->block == key_tile ? found : nullptr;
  }

  MaskBlockLists lists_;
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
