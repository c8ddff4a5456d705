// A BlockMask in the kernels: the blocks of a tile of rows or of keys, and what of a partial block a lane sees.
// rules/mask.h says what the lists and the bits are. Tiles are aligned: a tile lies within one block, or is one.
//
// The lists are in memory that nothing has checked. Starts are clamped to the entries that there are, so that no entry
// outside of a list is read, and bits of a number that does not exist are not read. Kernels compare the blocks of
// entries with the tiles that they may visit before they compute addresses from them.
#pragma once

#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"
#include "rules/mask.h"

namespace flashattn_ext {

constexpr int kBlockSide = static_cast<int>(kMaskBlock);  // rows and keys of a block

// How many tiles of `kTile` rows or keys a block has; the block of a tile; where the tile begins in the block.
template <int kTile>
constexpr int kTilesOfBlock = kBlockSide / kTile;
template <int kTile>
__device__ __forceinline__ int block_of(int tile) {
  static_assert(kBlockSide % kTile == 0, "tiles must be aligned to blocks");
  return tile / kTilesOfBlock<kTile>;
}
template <int kTile>
__device__ __forceinline__ int place_in_block(int tile) {
  return tile % kTilesOfBlock<kTile> * kTile;
}

// --- lists ----------------------------------------------------------------------------------------------------------

// Entries [begin, end) of one of a head's lists: the blocks of keys that a block of rows sees, or those of rows that
// see a block of keys, in ascending order.
struct BlockRun {
  const int2* entries;
  int begin, end;

  __device__ __forceinline__ MaskBlock at(int i) const {
    const int2 entry = __ldg(entries + i);
    return {entry.x, entry.y};
  }
  // The first entry whose block is at least `block`; `end` if there is none. kLanes: 32 where all lanes of a warp call
  // it together, which takes one round of loads up to 32 entries, and two up to 1024.
  template <int kLanes = 1>
  __device__ __forceinline__ int first_from(int block) const {
    int first = begin;
    for (int left = end - begin; left > 0;) {
      // Each lane looks at the last entry of one of kLanes + 1 parts; the first ones are below `block`.
      const int part = (left + kLanes) / (kLanes + 1), last = (kLanes == 1 ? 1 : lane() + 1) * part - 1;
      const bool is_below = last < left && __ldg(&entries[first + last].x) < block;
      const int below = (kLanes == 1 ? is_below : __popc(__ballot_sync(~0u, is_below))) * part;
      first += below;
      left = min(below == kLanes * part ? part : part - 1, left - below);
    }
    return first;
  }
};

// The two lists of a query head of a batch entry, in a call with a BlockMask.
struct HeadBlocks {
  MaskBlockLists lists;
  int entries;  // that each list has room for

  __device__ __forceinline__ HeadBlocks(const AttnParams& p, int b, int h)
      : lists(p, b, h), entries(static_cast<int>(p.blocks.entries)) {}

  // block: of rows or of keys that exist.
  __device__ __forceinline__ BlockRun of_rows(int block) const { return run(lists.by_rows, lists.row_starts + block); }
  __device__ __forceinline__ BlockRun of_keys(int block) const { return run(lists.by_keys, lists.key_starts + block); }

 private:
  __device__ __forceinline__ BlockRun run(const MaskBlock* list, const int32_t* starts) const {
    const int begin = min(max(__ldg(starts), 0), entries);
    return {reinterpret_cast<const int2*>(list), begin, max(min(__ldg(starts + 1), entries), begin)};
  }
};

// Whether the query heads of a KV head have lists of their own. Otherwise they share those of any of them.
__device__ __forceinline__ bool has_lists_of_query_heads(const AttnParams& p) { return p.blocks.heads > p.heads_k; }

// Tiles of kTile rows or keys, counted along a run of entries: place i * kTilesOfBlock + j is tile j of the block of
// entry i.
template <int kTile>
struct TilesOfRun {
  BlockRun run;

  // The first place whose tile is at least `tile`. kLanes: as above.
  template <int kLanes = 1>
  __device__ __forceinline__ int first_from(int tile) const {
    constexpr int kTiles = kTilesOfBlock<kTile>;
    const int block = block_of<kTile>(tile), entry = run.first_from<kLanes>(block);
    const bool inside = tile % kTiles != 0 && entry < run.end && run.at(entry).block == block;
    return entry * kTiles + (inside ? tile % kTiles : 0);
  }
};

// --- bits -----------------------------------------------------------------------------------------------------------

// The bits of one row of a block, for kKeys keys: bit key % 32 of word key / 32.
template <int kKeys>
struct RowBits {
  static constexpr int kWords = (kKeys + 31) / 32;
  static_assert(kKeys == 16 || kKeys == 32 || kKeys == 64 || kKeys == 128);
  uint32_t words[kWords];
};

// A block that is partly visible. An entry may have a number of bits that does not exist: the mask has more partial
// blocks than its `max_partial`. Then no bits are read: every pair counts as visible, and the rows of the block become
// NaN in the forward, whose lse of NaN all other kernels read.
struct PartialBlock {
  const uint32_t* bits;  // [kMaskBlock][kMaskBlockWords]; null: they do not exist

  PartialBlock() = default;
  // number: MaskBlock::bits of a block that is not whole.
  __device__ __forceinline__ PartialBlock(const AttnParams& p, int number)
      : bits(static_cast<uint32_t>(number) < static_cast<uint64_t>(p.blocks.partial_blocks)
                 ? p.blocks.bits + static_cast<int64_t>(number) * (kMaskBlock * kMaskBlockWords)
                 : nullptr) {}

  __device__ __forceinline__ bool exists() const { return bits != nullptr; }

  // Returns the bits of kKeys keys of a row. row: within the block; key: the first of the keys, a multiple of kKeys.
  template <int kKeys>
  __device__ __forceinline__ RowBits<kKeys> of_row(int row, int key) const {
    RowBits<kKeys> found;
    const uint32_t* const from = bits + (row * static_cast<int>(kMaskBlockWords) + key / 32);
    if (bits == nullptr) {
#pragma unroll
      for (uint32_t& word : found.words) word = ~0u;
    } else if constexpr (kKeys == 128) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
      found.words[0] = x.x, found.words[1] = x.y, found.words[2] = x.z, found.words[3] = x.w;
    } else if constexpr (kKeys == 64) {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
      found.words[0] = x.x, found.words[1] = x.y;
    } else {
      found.words[0] = __ldg(from) >> (kKeys == 16 ? key % 32 : 0);
    }
    return found;
  }
  // Whether a row of the block sees a key of the block.
  __device__ __forceinline__ bool sees(int row, int key) const {
    return bits == nullptr || (__ldg(bits + row * static_cast<int>(kMaskBlockWords) + key / 32) >> key % 32 & 1);
  }
};

// What the forward makes of a hidden score and, where the bits of a block do not exist, of all its scores.
__device__ __forceinline__ float hidden_score(bool exist) { return exist ? -infinity() : not_a_number(); }
// The scores x[n][2 * r] and x[n][2 * r + 1] of one row become `hidden`, the hidden_score, where the row does not see
// the key by its bits `seen`, and everywhere if these do not exist.
template <int kKeys>
__device__ __forceinline__ void hide_row_by_bits(float (&x)[kKeys / 8][4], int r, const RowBits<kKeys>& seen,
                                                 bool exist, float hidden) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const uint32_t pair = (exist ? seen.words[n / 4] : 0) >> (2 * lane_in_quad());
    if (!(pair & (1u << n % 4 * 8))) x[n][2 * r] = hidden;
    if (!(pair & (2u << n % 4 * 8))) x[n][2 * r + 1] = hidden;
  }
}
// Hides scores of a lane's rows g and g + 8 of each row tile, whose bits it loads. row, key: of this lane's first row,
// and of the first of the 8 * N keys, within the block.
template <int kRowTiles, int N>
__device__ __forceinline__ void hide_keys_by_bits(float (&x)[kRowTiles][N][4], const PartialBlock& block, int row,
                                                  int key) {
  const float hidden = hidden_score(block.exists());
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      __syncwarp();  // keeps the compiler from loading the bits of so many rows at once that registers spill
      const RowBits<8 * N> seen = block.of_row<8 * N>(row + 16 * i + 8 * r, key);
      hide_row_by_bits<8 * N>(x[i], r, seen, block.exists(), hidden);
    }
  }
}

// Backward, whose scores are transposed: which of a lane's queries see its keys g and g + 8 of every key tile, as bits.
// Bit 8 n + odd of `queries`, in words of 32, is query 8 n + 2 t + odd of the 8 * N queries of the warp.
template <int kKeyTiles, int N>
struct SeenQueries {
  static constexpr int kWords = (N + 3) / 4;
  uint32_t queries[kKeyTiles][2][kWords];

  SeenQueries() = default;
  // The queries that limits(i, r) has, as Limits counted from the lane's first query: of key g (r = 0) or g + 8 of key
  // tile i.
  template <class LimitsOf>
  __device__ __forceinline__ explicit SeenQueries(const LimitsOf& limits) {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Limits rows = limits(i, r);
#pragma unroll
        for (int w = 0; w < kWords; ++w) queries[i][r][w] = below(rows.end - 32 * w) & ~below(rows.begin - 32 * w);
      }
    }
  }

  // Keeps those that see the key by the bits of a block. row, key: the warp's first query and first key, within the
  // block; the 16 * kKeyTiles keys lie in one word.
  __device__ __forceinline__ void keep(const PartialBlock& block, int row, int key) {
    static_assert(kKeyTiles <= 2, "the keys of a warp must lie in one word of bits");
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const RowBits<32> of_row = block.of_row<32>(row + 8 * n + 2 * lane_in_quad() + odd, key / 32 * 32);
        const uint32_t keys = of_row.words[0] >> (key % 32 + quad());
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (!(keys & (1u << (16 * i + 8 * r)))) queries[i][r][n / 4] &= ~(1u << (n % 4 * 8 + odd));
          }
        }
      }
    }
  }

  // query: counted from the lane's first one, 8 n + odd.
  __device__ __forceinline__ bool includes(int i, int r, int query) const {
    return queries[i][r][query / 32] >> query % 32 & 1;
  }

 private:
  // The bits below bit n.
  static __device__ __forceinline__ uint32_t below(int n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; }
};

// --- runs of entries, as the loading warps of the Hopper kernels read them ------------------------------------------

// Whether causal or a window hides pairs beside the BlockMask.
__device__ __forceinline__ bool is_bounded(const AttnParams& p) {
  return p.window_left != kUnbounded || p.window_right != kUnbounded;
}

// The entries of the blocks [first, end). All lanes of a warp call it together.
__device__ __forceinline__ BlockRun clipped(const BlockRun& run, int first, int end) {
  const int begin = run.first_from<32>(first);
  return {run.entries, begin, BlockRun{run.entries, begin, run.end}.first_from<32>(end)};
}

}  // namespace flashattn_ext
