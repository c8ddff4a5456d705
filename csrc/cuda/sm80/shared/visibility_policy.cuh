// Policies of the sm_80 forward (forward.cuh) for visibility: over which tiles of keys a tile of queries walks, and
// which of their scores are masked. All members but those of Walk are static; every thread of a block calls them.
// Kernel: Forward or Jvp.
//   Mask                     causal and window
//   kSlots<kKeys>            of 16 bytes of shared memory (TileSlots), from slot 4 on
//   Walk                     a position among the key tiles, the last one first
//     tile(kernel)           the tile; below end() after the last one
//     is_empty(tile)         of the first: whether there is none, although causal and window leave some keys
//     advance(kernel)        moves to the next tile and returns it
//     step(kernel, n, row)   the Step of the tile n, for this warp's rows from `row` on, within the query tile
//   Step                     n: the tile; masked: by causal or window
//   start_head(...)          one thread, before a head's first tile
//   load_pairs(kernel, n)    with the copy of the values of tile n
//   hide(...)                masks scores beside causal and window
//   isolate(...), poison(...) keep values that are not finite out of rows that do not see them (isolation.cuh)
#pragma once

#include <type_traits>

#include "cuda/score/block_mask.cuh"
#include "cuda/score/intervals.cuh"
#include "cuda/score/isolation.cuh"

namespace flashattn_ext::sm80 {

// Causal and window alone: visible tiles are contiguous.
template <class Kernel>
struct ArithmeticVisibility {
  using Mask = UnplacedMask32;
  static constexpr bool kHasMask = false;
  template <int kKeys>
  static constexpr int kSlots = 0;

  struct Step {
    int n;
    bool masked;
  };
  struct Walk {
    int n, first;
    int first_full, end_full;  // tiles that need no mask

    __device__ Walk(const Kernel&, int last, int first, int first_full, int end_full)
        : n(last), first(first), first_full(first_full), end_full(end_full) {}
    static __device__ bool is_empty(int) { return false; }
    __device__ int end() const { return first; }
    __device__ int tile(const Kernel&) const { return n; }
    __device__ int advance(const Kernel&) { return --n; }
    __device__ Step step(const Kernel&, int n, int) const {
      const bool masked = n < first_full || n >= end_full;
      return {n, masked};
    }
  };

  static __device__ void start_head(const Kernel&, int, int, int, int) {}
  static __device__ void load_pairs(const Kernel&, int) {}
  template <class Scores>
  static __device__ void hide(const Kernel&, const Step&, Scores&) {}
  template <class T>
  static __device__ bool isolate(const Kernel&, const Step&, T*) {
    return false;
  }
  static __device__ void poison(Kernel&, int) {}
};

// A Mask or a BlockMask. The first warp finds the key tiles to visit and lists them in shared memory, up to kListed at
// a time. The intervals of a Mask, for each key of a tile, are copied with its values; the bits of a partial block are
// read where they lie.
template <class Kernel>
struct MaskVisibility {
  using Mask = Mask32;
  static constexpr bool kHasMask = true;
  static constexpr int kListed = 32;  // tiles: as many as KeyTileFinder finds at most
  template <int kKeys>
  static constexpr int kSlots = 2 + kListed + kKeys;

  struct KeyList {
    int count;  // number of tiles on the list
    int next;   // the tile to look at for the next list
    int first;  // the tile to end with
  };
  struct ListedTile {
    int n;
    // Rows that see all of its keys, as far as the mask is concerned. In a partial block of a BlockMask there are none:
    // `begin` is then the number of its bits.
    Limits seen_by_all;
    bool masked;  // by causal or window
  };
  struct OfMask {
    const int2* pairs;  // a Mask's intervals, from the head's first key on; null without one
    int bits;           // MaskBlock::bits of the tile that is computed, if it lies in a partial block
  };
  struct ListedKey {
    int2 seen_by;
    int is_isolated;
  };

  struct Step {
    int n;
    bool whole, all_whole;  // whether the mask hides no key of the tile from the warp's rows, and from the block's
    bool masked;
  };
  // The tile is read from the list again and again rather than kept in a register.
  struct Walk {
    int i = 0;  // index of the tile on the list

    __device__ __forceinline__ Walk(const Kernel& kernel, int last, int first, int, int) {
      list_tiles(kernel, last, first);
    }
    static __device__ __forceinline__ bool is_empty(int tile) { return tile < 0; }
    static __device__ __forceinline__ int end() { return 0; }
    __device__ __forceinline__ int tile(const Kernel& kernel) const { return listed_tile(kernel, i); }
    // After the end of the list there is another one.
    __device__ __forceinline__ int advance(const Kernel& kernel) {
      const auto [count, next, first] = *list(kernel);
      if (++i >= count && next >= first) {
        __syncthreads();
        i = 0;
        list_tiles(kernel, next, first);
      }
      return tile(kernel);
    }
    // The kernel has a barrier before it, and another one before the step's scores are masked.
    __device__ __forceinline__ Step step(const Kernel& kernel, int n, int row) const {
      if (threadIdx.x == 0) of_mask(kernel)->bits = listed(kernel, i)->seen_by_all.begin;
      return {n, is_whole(kernel, i, kernel.row0 + row, 16 * Kernel::kRowTiles),
              is_whole(kernel, i, kernel.row0, Kernel::kQueries), listed(kernel, i)->masked};
    }
  };

  static __device__ __forceinline__ void start_head(const Kernel& kernel, int b, int h, int hk, int key_start) {
    of_mask(kernel)->pairs = IntervalPairs(kernel.p, b, hk, key_start).head(h);
  }
  static __device__ __forceinline__ void load_pairs(const Kernel& kernel, int n) {
    const int key = n * Kernel::kKeys + threadIdx.x, length = kernel.length_k();
    const int2* const pairs = of_mask(kernel)->pairs;
    if (threadIdx.x < Kernel::kKeys && pairs != nullptr) {
      ptx::cp_async_8(&listed_key(kernel, threadIdx.x)->seen_by, pairs + min(key, length - 1), key < length);
    }
  }
  template <class Scores>
  static __device__ __forceinline__ void hide(const Kernel& kernel, const Step& step, Scores& scores) {
    if (step.whole) return;
    if (kernel.p.has_blocks()) {
      return hide_keys_by_bits(scores, partial_block(kernel), kernel.score_row() % kBlockSide,
                               place_in_block<Kernel::kKeys>(step.n));
    }
    hide_keys_by_interval(scores, kernel.score_row(), [&](int tile) {
      const int key = tile * 8 + 2 * lane_in_quad();
      const int2 even = listed_key(kernel, key)->seen_by, odd = listed_key(kernel, key + 1)->seen_by;
      return make_int4(even.x, even.y, odd.x, odd.y);
    });
  }

  // In a partially masked tile, rows of values that are not finite become zeros, and rows of `out` that see them become
  // NaN after the product. A ListedKey marks their keys, with a Mask by is_isolated; with a BlockMask it has the rows
  // that see the key, as the thread that finds it reads their bits: in the kernel's loop they would cost registers.
  template <class T>
  static __device__ __forceinline__ bool isolate(const Kernel& kernel, const Step& step, T* values) {
    return !step.all_whole &&
           isolate_rows<typename Kernel::ValueTile, Kernel::kKeys, Kernel::kThreads>(values, [&](int row, bool finite) {
             if (kernel.p.has_blocks()) {
               mark_rows(kernel, step.n, row, finite);
             } else {
               listed_key(kernel, row)->is_isolated = !finite;
             }
           });
  }
  static __device__ __forceinline__ void poison(Kernel& kernel, int n) {
    const bool in_blocks = kernel.p.has_blocks();
#pragma unroll 1
    for (int i = 0; i < Kernel::kKeys; ++i) {
      const ListedKey key = *listed_key(kernel, i);
      const uint32_t marked = marked_rows(kernel, i);
      if (in_blocks ? marked == 0 : !key.is_isolated) continue;
      const Limits rows = kernel.mask().rows_of(n * Kernel::kKeys + i, n * Kernel::kKeys + i + 1);
#pragma unroll
      for (int tile = 0; tile < Kernel::kRowTiles; ++tile) {
        bool sees[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = kernel.row0 + kernel.tile_row(tile) + quad() + 8 * r;
          sees[r] = row >= max(rows.begin, key.seen_by.x) && row < min(rows.end, key.seen_by.y);
          if (in_blocks) sees[r] = marked >> (16 * tile + 8 * r + quad()) & 1;
        }
        poison_rows(kernel.out[tile], sees);
      }
    }
  }

 private:
  static __device__ __forceinline__ auto* of_mask(const Kernel& kernel) { return kernel.slots.template at<OfMask>(4); }
  static __device__ __forceinline__ auto* list(const Kernel& kernel) { return kernel.slots.template at<KeyList>(5); }
  static __device__ __forceinline__ ListedTile* listed(const Kernel& kernel, int i) {
    return kernel.slots.template at<ListedTile>(6 + i);
  }
  static __device__ __forceinline__ ListedKey* listed_key(const Kernel& kernel, int i) {  // keys of the tile of values
    return kernel.slots.template at<ListedKey>(6 + kListed + i);
  }

  // With a BlockMask: the rows of the query tile that see a key, as 128 bits, in place of the ListedKey.
  static __device__ __forceinline__ uint32_t* rows_of_key(const Kernel& kernel, int key) {
    return reinterpret_cast<uint32_t*>(listed_key(kernel, key));
  }
  static __device__ __forceinline__ void mark_rows(const Kernel& kernel, int n, int key, bool finite) {
    const int first = kernel.row0 % kBlockSide, key_in_block = place_in_block<Kernel::kKeys>(n) + key;
    const Limits rows = kernel.mask().rows_of(n * Kernel::kKeys + key, n * Kernel::kKeys + key + 1);
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      uint32_t seen = 0;
#pragma unroll 1
      for (int row = 32 * word; row < min(32 * word + 32, finite ? 0 : Kernel::kQueries); ++row) {
        const bool sees = kernel.row0 + row >= rows.begin && kernel.row0 + row < rows.end &&
                          partial_block(kernel).sees(first + row, key_in_block);
        seen |= static_cast<uint32_t>(sees) << row % 32;
      }
      rows_of_key(kernel, key)[word] = seen;
    }
  }
  // Returns which rows of this warp see the key and become NaN: bit i is row i of its row tiles.
  static __device__ __forceinline__ uint32_t marked_rows(const Kernel& kernel, int key) {
    static_assert(Kernel::kRowTiles <= 2 && Kernel::kQueries <= kBlockSide);
    const int first = kernel.tile_row(0);
    return rows_of_key(kernel, key)[first / 32] >> first % 32;
  }

  // Lists key tiles from `next` down to `first`.
  static __device__ __forceinline__ void list_tiles(const Kernel& kernel, int next, int first) {
    constexpr int kKeys = Kernel::kKeys;
    if (threadIdx.x < 32) {
      const int b = kernel.slots.head()->b, h = kernel.slots.head()->h;
      const int key_start = static_cast<int>(key_sequence(kernel.p, b).start);
      const Limits rows = kernel.tile_rows(), full = kernel.mask().keys_of_all(rows.begin, rows.end);
      const auto add = [&](int i, int n, const Limits& seen_by_all) {
        *listed(kernel, i) = {n, seen_by_all, n * kKeys < full.begin || (n + 1) * kKeys > full.end};
      };
      int count;
      if (kernel.p.has_blocks()) {
        count =
            find_blocks(HeadBlocks(kernel.p, b, h).of_rows(block_of<Kernel::kQueries>(kernel.row0 / Kernel::kQueries)),
                        &next, first, add);
      } else {
        const KeyTileFinder<kKeys> finder{KeyExtremes(kernel.p, b, h, 1, key_start, kernel.length_k()), rows, first};
        count = finder.find(
            &next, [&](int i, int n, const IntervalExtremes& keys) { add(i, n, {keys.all_first, keys.all_last}); });
      }
      if (threadIdx.x == 0) *list(kernel) = {count, next, first};
    }
    __syncthreads();
  }
  // As KeyTileFinder::find, in a run of entries.
  template <class Found>
  static __device__ __forceinline__ int find_blocks(const BlockRun& run, int* next, int first, const Found& found) {
    constexpr int kTiles = kTilesOfBlock<Kernel::kKeys>;
    const int last = block_of<Kernel::kKeys>(*next);
    const bool searches = run.begin < run.end && run.at(run.end - 1).block > last;
    const int entry = (searches ? run.first_from<32>(last + 1) : run.end) - 1 - lane() / kTiles;
    const MaskBlock block = entry < run.begin ? MaskBlock{-1, 0} : run.at(entry);
    const int n = block.block * kTiles + kTiles - 1 - lane() % kTiles;
    const bool visible = n >= first && n <= *next;  // whatever is in the list
    const uint32_t all = __ballot_sync(~0u, visible);
    const Limits everything{INT32_MIN, INT32_MAX};
    if (visible) {
      found(__popc(all & ((1u << lane()) - 1)), n, block.is_whole() ? everything : Limits{block.bits, INT32_MIN});
    }
    *next = all == 0 ? first - 1 : __shfl_sync(~0u, n, 31 - __clz(all)) - 1;
    return __popc(all);
  }
  static __device__ __forceinline__ PartialBlock partial_block(const Kernel& kernel) {
    return PartialBlock(kernel.p, of_mask(kernel)->bits);
  }
  // The i-th key tile on the list; -1 after the last one.
  static __device__ __forceinline__ int listed_tile(const Kernel& kernel, int i) {
    return i < list(kernel)->count ? listed(kernel, i)->n : -1;
  }
  // Whether `count` rows from `row` on see all keys of the i-th tile on the list.
  static __device__ __forceinline__ bool is_whole(const Kernel& kernel, int i, int row, int count) {
    const Limits rows = listed(kernel, i)->seen_by_all;
    return rows.begin <= row && rows.end >= min(row + count, kernel.length_q());
  }
};

template <class Kernel, bool kHasMask>
using VisibilityOf = std::conditional_t<kHasMask, MaskVisibility<Kernel>, ArithmeticVisibility<Kernel>>;

}  // namespace flashattn_ext::sm80
