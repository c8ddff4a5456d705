// A Mask in the kernels of whole heads: which queries see which of 16 or 32 keys, by the intervals of the keys
// (rules/mask.h), and how rows that are not finite are kept out of results that do not see them (score/isolation.cuh).
#pragma once

#include <climits>

#include "cuda/score/intervals.cuh"
#include "cuda/score/isolation.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm80/whole_heads/head_rows.cuh"
#include "cuda/sm80/whole_heads/plan.h"

namespace flashattn_ext::sm80 {

// Whether the row of a tile that the vector `own` is in is finite. Kernels call it in for_own_vectors, where adjacent
// lanes have the vectors of a row.
template <class Tile>
__device__ __forceinline__ bool has_finite_row(const uint4& own) {
  constexpr int kVectors = Tile::kColumns / Tile::kVector;
  static_assert(kVectors < 32);
  FiniteCheck<typename Tile::Element> check;
  check.add(own);
  const uint32_t failing = __ballot_sync(~0u, check.fails());
  return (failing >> lane() / kVectors * kVectors & ((1u << kVectors) - 1)) == 0;
}

// Zeroes the vectors of rows that are not finite among those of a tile of `rows` rows that this thread has copied, and
// calls each(row, column) for each of them.
template <class Tile, class Each>
__device__ __forceinline__ void zero_unfinite_rows(typename Tile::Element* tile, int rows, const Each& each) {
  for_own_vectors<Tile>(block_team(), rows, [&](int row, int column) {
    uint4& own = *reinterpret_cast<uint4*>(tile + Tile::offset(row, column));
    if (has_finite_row<Tile>(own)) return;
    own = make_uint4(0, 0, 0, 0);
    each(row, column);
  });
}

// --- forward ---------------------------------------------------------------------------------------------------------

// Which of a warp's 16 rows see which of 32 keys: a lane has one of the keys, and bit r of `rows` is row r.
struct SeenRows {
  static constexpr int kKeys = 32;
  uint32_t rows;

  // pairs: IntervalPairs::head; row, key: the first ones; keys_left: how many keys exist from `key` on.
  __device__ __forceinline__ SeenRows(const int2* pairs, int row, int key, int keys_left) {
    const int2 seen_by = __ldg(pairs + key + min(lane(), keys_left - 1));
    const int begin = min(max(seen_by.x, row), row + kRowStep) - row,
              end = min(max(seen_by.y, row), row + kRowStep) - row;
    rows = begin < end ? (1u << end) - (1u << begin) : 0;
  }
  // Whether no row sees any of the keys. All lanes of a warp call the functions.
  __device__ __forceinline__ bool is_none() const { return __all_sync(~0u, rows == 0) != 0; }
  // Hides the keys from the rows that do not see them.
  template <int N>
  __device__ __forceinline__ void hide(float (&x)[1][N][4]) const {
    static_assert(8 * N == kKeys);
    if (__all_sync(~0u, rows == (1u << kRowStep) - 1)) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const uint32_t seen = __shfl_sync(~0u, rows, 8 * n + 2 * lane_in_quad() + odd) >> quad();
        if (!(seen & 1)) x[0][n][odd] = -infinity();
        if (!(seen & 1 << 8)) x[0][n][2 + odd] = -infinity();
      }
    }
  }
};

// The keys in shared memory whose values were not finite, as bits behind them.
struct IsolatedKeys {
  static constexpr int kWords = kMarkBytes / 4;
  uint32_t words[kWords];

  // One thread, before a barrier.
  __device__ __forceinline__ void start() {
#pragma unroll
    for (uint32_t& word : words) word = 0;
  }
  // Zeroes the values that are not finite among those that this thread has copied, and notes their keys.
  template <class Tile, class T = typename Tile::Element>
  __device__ __forceinline__ void isolate(T* values, int rows) {
    zero_unfinite_rows<Tile>(values, rows, [&](int row, int column) {
      if (column == 0) atomicOr(words + row / 32, 1u << row % 32);
    });
  }
  // Rows g and g + 8 of `out`, the first of which is `row`, become NaN where they see such a key. first: the key of the
  // first row of `values`.
  template <int N>
  __device__ __forceinline__ void poison(float (&out)[N][4], const IntervalMask& mask, int row, int first) const {
#pragma unroll 1
    for (int i = 0; i < kWords; ++i) {
#pragma unroll 1
      for (uint32_t left = words[i]; left != 0; left &= left - 1) {
        const Limits seen_by = rows_that_see(mask, first + 32 * i + __ffs(static_cast<int>(left)) - 1);
        const bool sees[2] = {row >= seen_by.begin && row < seen_by.end,
                              row + 8 >= seen_by.begin && row + 8 < seen_by.end};
        poison_rows(out, sees);
      }
    }
  }
};

// --- backward --------------------------------------------------------------------------------------------------------

// Which queries see the 16 keys of a warp.
struct SeenQueriesOfKeys {
  SeenBy<1> of_lane;  // rows of the sequence that see each of the lane's two keys
  Limits some;        // rows that see some key of the warp

  // key: the warp's first. Without a Mask the kernel's walk over queries has the bounds already.
  __device__ __forceinline__ SeenQueriesOfKeys(const IntervalMask& mask, int key)
      : of_lane(mask, 0, key + quad()), some{INT_MIN, INT_MAX} {
    if (mask.pairs == nullptr) return;
    const Limits(&own)[2] = of_lane.limits[0];
    const bool exist[2] = {own[0].begin < own[0].end, own[1].begin < own[1].end};
    some.begin = __reduce_min_sync(~0u, min(exist[0] ? own[0].begin : INT_MAX, exist[1] ? own[1].begin : INT_MAX));
    some.end = __reduce_max_sync(~0u, max(exist[0] ? own[0].end : INT_MIN, exist[1] ? own[1].end : INT_MIN));
  }
  __device__ __forceinline__ bool sees_some(int row, int rows) const {
    return some.begin < row + rows && some.end > row;
  }
  // The rows, counted from `row` on.
  __device__ __forceinline__ SeenBy<1> from(int row) const {
    SeenBy<1> seen_by = of_lane;
#pragma unroll
    for (Limits& rows : seen_by.limits[0]) rows.begin -= row, rows.end -= row;
    return seen_by;
  }
};

}  // namespace flashattn_ext::sm80
