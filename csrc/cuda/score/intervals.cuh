// A Mask's intervals in the kernels: which key tiles a query tile sees, which rows see a key tile, and what a lane of a
// partial tile compares. rules/mask.h says what the intervals and their extremes are.
//
// The pairs and the extremes are the user's data and may hold anything. They are only compared, never used as an index:
// no row, key or tile outside the sequence results from them.
#pragma once

#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

constexpr int kMaskSuperKeys = static_cast<int>(kMaskGranule * kMaskSuper);

// The extremes of a call without a Mask.
__device__ __forceinline__ IntervalExtremes everything() { return {INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX}; }

__device__ __forceinline__ bool sees_some(const IntervalExtremes& keys, const Limits& rows) {
  return keys.any_first < rows.end && keys.any_last > rows.begin;
}
__device__ __forceinline__ bool sees_all(const IntervalExtremes& keys, const Limits& rows) {
  return keys.all_first <= rows.begin && keys.all_last >= rows.end;
}

// The extremes of the keys of one sequence, for `heads` query heads from h on together. Without a Mask all rows see all
// keys. Keys are counted from the first of the sequence.
struct KeyExtremes {
  const IntervalExtremes* granules;  // granules of the first of the Mask's heads; null: no Mask
  int64_t head_stride;
  int heads;              // heads of the Mask
  int supers;             // after how many granules the coarse level begins
  int key_start, length;  // the sequence's; key_start counts from the first key of granule 0

  __device__ __forceinline__ KeyExtremes(const AttnParams& p, int b, int h, int heads_q, int key_start, int length)
      : key_start(key_start), length(length) {
    granules = nullptr;
    if (!p.has_intervals() || heads_q == 0) return;
    granules = head_extremes(p, b, h);
    head_stride = p.intervals.extremes_head_stride;
    heads = static_cast<int>(mask_head(p, h + heads_q - 1) - mask_head(p, h)) + 1;
    supers = static_cast<int>(((p.is_varlen() ? p.total_k : p.seqlen_k) + kMaskGranule - 1) / kMaskGranule);
  }

  // The extremes of the granules that have any of the keys [begin, end). kLanes: 32 where all lanes of a warp call it
  // for the same keys and divide the loads, for keys of at most 32 granules.
  template <int kLanes = 1>
  __device__ __forceinline__ IntervalExtremes of_granules(int begin, int end) const {
    return granules == nullptr ? everything() : merged<kMaskGranule, kLanes>(0, begin, end);
  }
  // The extremes of the supers that have any of these keys.
  template <int kLanes = 1>
  __device__ __forceinline__ IntervalExtremes of_supers(int begin, int end) const {
    return granules == nullptr ? everything() : merged<kMaskSuperKeys, kLanes>(supers, begin, end);
  }
  // The extremes of both levels: rows that a super excludes see no key of its granules, even if the extremes of the
  // granules disagree.
  template <int kLanes = 1>
  __device__ __forceinline__ IntervalExtremes of_tile(int begin, int end) const {
    IntervalExtremes keys = of_granules<kLanes>(begin, end);
    const IntervalExtremes around = of_supers<kLanes>(begin, end);
    keys.any_first = max(keys.any_first, around.any_first);
    keys.any_last = min(keys.any_last, around.any_last);
    return keys;
  }

 private:
  template <int kKeys, int kLanes>
  __device__ __forceinline__ IntervalExtremes merged(int level, int begin, int end) const {
    IntervalExtremes all = IntervalExtremes::none();
    const int first = (key_start + begin) / kKeys, last = (key_start + end - 1) / kKeys;
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
      const int4* const row = reinterpret_cast<const int4*>(granules + head * head_stride + level);
      auto add = [&](int i) {
        const int4 x = __ldg(row + i);
        all.add({x.x, x.y, x.z, x.w});
      };
      if constexpr (kLanes == 1) {
        for (int i = first; i <= last; ++i) add(i);
      } else {
        add(min(first + static_cast<int>(threadIdx.x) % kLanes, last));  // surplus lanes repeat the last one
      }
    }
    if constexpr (kLanes > 1) {
      all = {__reduce_min_sync(~0u, all.any_first), __reduce_max_sync(~0u, all.any_last),
             __reduce_max_sync(~0u, all.all_first), __reduce_min_sync(~0u, all.all_last)};
    }
    return all;
  }
};

// The addresses of the intervals of a sequence's keys, (first, last) pairs, for the query heads of one KV head. A Mask
// has one head for all of them, or one for each.
struct alignas(16) IntervalPairs {
  const int2* first;  // extrapolated to query head 0; null: no Mask
  int64_t stride;     // from one query head to the next

  IntervalPairs() = default;
  __device__ __forceinline__ IntervalPairs(const AttnParams& p, int b, int hk, int key_start) : first(nullptr) {
    if (!p.has_intervals()) return;
    const int64_t h = hk * p.group_size();
    stride = p.intervals.heads > p.heads_k ? p.intervals.head_stride : 0;
    first = reinterpret_cast<const int2*>(head_intervals(p, b, h, key_start)) - h * stride;
  }
  // The intervals of a query head, from the sequence's first key on; null without a Mask.
  __device__ __forceinline__ const int2* head(int h) const { return first == nullptr ? nullptr : first + h * stride; }
};

// --- forward: the key tiles of a query tile, the last one first -----------------------------------------------------

// Finds the tiles of kKeys keys that some of `rows` see. All lanes of a warp call it together; each of them checks
// one of 32 tiles.
template <int kKeys>
struct KeyTileFinder {
  KeyExtremes extremes;
  Limits rows;
  int first;  // the tile to end with

  // Looks at tile `next` and those below, until some are visible, and calls found(i, tile, extremes) for the i-th of
  // them, each in one lane. Returns how many: at most 32, and 0 when there are none left. Moves `next` to the tile to
  // look at in the next call.
  template <class Found>
  __device__ __forceinline__ int find(int* next, const Found& found) const {
    while (*next >= first) {
      if (extremes.granules != nullptr && *next - first >= 32) skip_supers(next);
      const int tile = *next - lane();
      *next -= 32;
      IntervalExtremes keys = IntervalExtremes::none();
      if (tile >= first) keys = extremes.of_granules(tile * kKeys, min((tile + 1) * kKeys, extremes.length));
      const bool visible = sees_some(keys, rows);
      const uint32_t all = __ballot_sync(~0u, visible);
      if (visible) found(__popc(all & ((1u << lane()) - 1)), tile, keys);
      if (all != 0) return __popc(all);
    }
    return 0;
  }

 private:
  // Moves `next` down to the first tile with keys of a super that is visible; below `first` when there is none.
  __device__ __forceinline__ void skip_supers(int* next) const {
    const int start = extremes.key_start, lowest = (start + first * kKeys) / kMaskSuperKeys;
    int top = (start + min((*next + 1) * kKeys, extremes.length) - 1) / kMaskSuperKeys;
    for (; top >= lowest; top -= 32) {
      const int super = top - lane(), begin = super * kMaskSuperKeys - start;
      const bool visible = super >= lowest && sees_some(extremes.of_supers(begin, begin + 1), rows);
      const uint32_t all = __ballot_sync(~0u, visible);
      if (all == 0) continue;
      *next = min(*next, ((top - __ffs(all) + 2) * kMaskSuperKeys - 1 - start) / kKeys);
      return;
    }
    *next = first - 1;
  }
};

// Scores become -inf where the query is outside the interval of the key. row: of this lane's first score. pairs(n): the
// intervals of the lane's two keys of score tile n, (first, last, first, last).
template <int kRowTiles, int N, class Pairs>
__device__ __forceinline__ void hide_keys_by_interval(float (&x)[kRowTiles][N][4], int row, const Pairs& pairs) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int4 seen = pairs(n);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = row + 16 * i + 8 * r;
        if (query < seen.x || query >= seen.y) x[i][n][2 * r] = -infinity();
        if (query < seen.z || query >= seen.w) x[i][n][2 * r + 1] = -infinity();
      }
    }
  }
}

// The query of a row, whether it exists, and the intervals of its head from key 0 on.
struct IntervalsOfRow {
  int query;
  bool exists;
  const int2* pairs;
};

// Hides keys from rows of different heads, whose intervals lie in global memory. keys: how many have intervals; first:
// this lane's first key. row_of(i, r): the IntervalsOfRow of row g (r = 0) or g + 8 of row tile i.
template <int kRowTiles, int N, class RowOf>
__device__ __forceinline__ void hide_keys_by_interval_of(float (&x)[kRowTiles][N][4], int keys, int first,
                                                         const RowOf& row_of) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const IntervalsOfRow row = row_of(i, r);
      if (!row.exists) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int key = first + n * 8 + odd;
          if (key < 0 || key >= keys) continue;
          const int2 seen_by = __ldg(row.pairs + key);
          if (row.query < seen_by.x || row.query >= seen_by.y) x[i][n][2 * r + odd] = -infinity();
        }
      }
    }
  }
}

// --- backward: the rows that see a key tile -------------------------------------------------------------------------

// BasicMask and the intervals of a query head.
struct IntervalMask : Mask32 {
  const int2* pairs;  // IntervalPairs::head

  __device__ __forceinline__ IntervalMask(const Mask32& mask, const int2* pairs) : Mask32(mask), pairs(pairs) {}
};

__device__ __forceinline__ Limits rows_that_see(const IntervalMask& mask, int key) {
  Limits rows = rows_that_see(static_cast<const Mask32&>(mask), key);
  if (mask.pairs == nullptr || key >= mask.seqlen_k) return rows;
  const int2 seen = __ldg(mask.pairs + key);
  return {max(rows.begin, seen.x), max(min(rows.end, seen.y), 0)};
}

// Rows that see some key of a tile, within those that causal and window leave.
__device__ __forceinline__ Limits clipped(const Limits& rows, const IntervalExtremes& keys) {
  const int begin = max(rows.begin, keys.any_first), end = min(rows.end, keys.any_last);
  return {begin, max(begin, end)};
}
// Rows that see every key of a tile, within those of causal and window. An all_last at or beyond the sequence's end is
// no bound.
__device__ __forceinline__ Limits clipped_to_all(const Limits& rows, const IntervalExtremes& keys, int seqlen_q) {
  return {max(rows.begin, keys.all_first), keys.all_last >= seqlen_q ? rows.end : min(rows.end, keys.all_last)};
}

// For a deterministic call: a key tile that adds to dq earlier, and the rows that see it. tile: -1 when there is none.
struct EarlierKeyTile {
  int tile;
  Limits rows;

  __device__ __forceinline__ bool adds_to(const Limits& others) const {
    return rows.begin < rows.end && rows.begin < others.end && rows.end > others.begin;
  }
};

// The nearest key tile before tile n that adds to the dq of some of `rows`; if key tiles add in descending order, the
// nearest one after it. Whatever the extremes hold, a key tile adds to the query tiles that its clipped() rows are in,
// so that no thread block waits for a tile that never adds. All lanes of a warp call it together, and look at 32 tiles
// at a time.
template <int kKeys>
__device__ __forceinline__ EarlierKeyTile key_tile_before(const KeyExtremes& extremes, const Mask32& mask, int n,
                                                          const Limits& rows, bool descending = false) {
  const Limits keys = mask.keys_of(rows.begin, min(rows.end, mask.seqlen_q));
  const int step = descending ? 1 : -1, lane = static_cast<int>(threadIdx.x) % 32;
  const int count = descending ? (keys.end - 1) / kKeys - n : n - keys.begin / kKeys;  // tiles to look at
  for (int seen = 0; seen < count; seen += 32) {
    EarlierKeyTile earlier{n + step * (1 + seen + lane), {0, 0}};
    const int begin = earlier.tile * kKeys, end = min(begin + kKeys, mask.seqlen_k);
    if (seen + lane < count) {
      earlier.rows = clipped(mask.rows_of(begin, end), extremes.of_tile(begin, end));
    }
    const uint32_t found = __ballot_sync(~0u, earlier.adds_to(rows));
    if (found == 0) continue;
    const int nearest = __ffs(found) - 1;
    return {n + step * (1 + seen + nearest),
            {__shfl_sync(~0u, earlier.rows.begin, nearest), __shfl_sync(~0u, earlier.rows.end, nearest)}};
  }
  return {-1, {0, 0}};
}

// The number of that tile for one query tile of the walk of a key tile. nearest: the result for all rows of the walk
// together, which holds for most of its query tiles.
template <int kKeys>
__device__ __forceinline__ int key_tile_before(const KeyExtremes& extremes, const Mask32& mask,
                                               const EarlierKeyTile& nearest, const Limits& rows,
                                               bool descending = false) {
  if (nearest.tile < 0 || nearest.adds_to(rows)) return nearest.tile;
  return key_tile_before<kKeys>(extremes, mask, nearest.tile, rows, descending).tile;
}

}  // namespace flashattn_ext
