// Biases that depend on the distance of a score alone, ALiBi and a relative bias, in accumulator tiles: the terms added
// to the scores that a lane holds, in units of log2 (rules/bias.h has the definition).
#pragma once

#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"
#include "rules/bias.h"

namespace flashattn_ext {

// The positions of a lane's scores in a warp's tile. Rows of accumulators are queries in the forward, and keys in the
// backward, whose scores are transposed. Element e of row tile i and column tile n is at a compile-time offset from the
// lane's first score.
template <bool kTransposed>
struct ScorePositions {
  int row, key;       // query and key of the lane's first score
  int distance;       // distance of that score: key - position of the query
  int tile_distance;  // distance of the first score of the warp's tile

  // row0, key0: of the first score of the warp's tile. Mask: Mask32 or UnplacedMask32.
  template <class Mask>
  __device__ __forceinline__ ScorePositions(const Mask& mask, int row0, int key0) {
    row = row0 + (kTransposed ? 2 * lane_in_quad() : quad());
    key = key0 + (kTransposed ? quad() : 2 * lane_in_quad());
    tile_distance = key0 - row0 - mask.first_position();
    distance = tile_distance + (key - key0) - (row - row0);
  }
  static __device__ __forceinline__ constexpr int rows_on(int i, int n, int e) {
    return kTransposed ? 8 * n + e % 2 : 16 * i + 8 * (e / 2);
  }
  static __device__ __forceinline__ constexpr int keys_on(int i, int n, int e) {
    return kTransposed ? 16 * i + 8 * (e / 2) : 8 * n + e % 2;
  }
  static __device__ __forceinline__ constexpr int distance_on(int i, int n, int e) {
    return keys_on(i, n, e) - rows_on(i, n, e);
  }
};

// How the distances of a tile compare with the reach of a relative bias.
enum class Reached { kNone, kBelow, kAbove, kSome };  // kNone: there is no relative bias

// rows, keys: extent of the tile. kBelow, kAbove: all distances are clamped, to the same end.
__device__ __forceinline__ Reached reached(bool exists, int reach, int tile_distance, int rows, int keys) {
  if (!exists) return Reached::kNone;
  if (tile_distance + (keys - 1) <= -reach) return Reached::kBelow;
  return tile_distance - (rows - 1) >= reach ? Reached::kAbove : Reached::kSome;
}

// A logit plus a bias. A bias of -inf masks the score, even if the score is NaN.
__device__ __forceinline__ float add_bias(float logit, float bias) {
  return bias == -infinity() ? -infinity() : logit + bias;
}

// The slope of a row, in units of log2, and the distance of the lane's first score in it.
struct SlopeOfRow {
  float slope;
  int distance;
};

// Subtracts ALiBi from logits whose rows may be of different heads. row_of(i, r): the SlopeOfRow of
// row g (r = 0) or g + 8 of row tile i.
template <int kRowTiles, int N, class RowOf>
__device__ __forceinline__ void add_slopes_of(float (&logits)[kRowTiles][N][4], const RowOf& row_of) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SlopeOfRow row = row_of(i, r);
      unrolled<N, 2>([&](int n, int odd) {
        logits[i][n][2 * r + odd] -= row.slope * fabsf(static_cast<float>(row.distance + n * 8 + odd));
      });
    }
  }
}

// The slope and the relative bias of one head, for one tile of a warp: kRowTiles row tiles and kColumnTiles column
// tiles of accumulators.
template <bool kTransposed, int kRowTiles, int kColumnTiles>
struct DistanceBias {
  static constexpr bool kHasElements = false;  // there is no bias of any shape
  static constexpr int kRows = kTransposed ? 8 * kColumnTiles : 16 * kRowTiles;
  static constexpr int kKeys = kTransposed ? 16 * kRowTiles : 8 * kColumnTiles;

  ScorePositions<kTransposed> place;
  HeadBias<float> head;
  bool has_slopes;
  bool is_invariant;  // the bits of a bias must not depend on the tile that its score is in
  int reach;          // reach of the relative bias, limited to 2^30, which no distance reaches
  Reached range;
  float end;  // the relative bias of the whole tile where it is clamped, in units of log2

  template <class Mask>
  __device__ __forceinline__ DistanceBias(const AttnParams& p, int b, int h, const Mask& mask, int row0, int key0)
      : place(mask, row0, key0),
        head(HeadBias<float>::of(p, b, h)),
        has_slopes(p.alibi_slopes),
        is_invariant(p.invariant) {
    constexpr int64_t kLongest = 1 << 30;
    reach = static_cast<int>(head.reach < kLongest ? head.reach : kLongest);
    range = reached(head.relative != nullptr, reach, place.tile_distance, kRows, kKeys);
    range = uniform_range();
    end = 0;
    if (range == Reached::kBelow || range == Reached::kAbove) {
      end = in_log2_units(head.relative[entry(place.tile_distance)]);
    }
    head.slope *= kLog2E<float>;
  }

  // The range as a warp-uniform value. Shuffles in branches that may diverge compile to function calls, across which
  // ptxas serialises wgmma.
  __device__ __forceinline__ Reached uniform_range() const {
    return static_cast<Reached>(uniform(static_cast<int>(range)));
  }
  // Whether no distance of the tile reaches an end of the relative bias.
  __device__ __forceinline__ bool is_inside() const {
    return uniform(static_cast<int>(place.tile_distance - (kRows - 1) > -reach &&
                                    place.tile_distance + (kKeys - 1) < reach)) != 0;
  }
  // Whether all distances of the tile have the same sign.
  __device__ __forceinline__ bool is_one_sided() const {
    return uniform(
               static_cast<int>(place.tile_distance + (kKeys - 1) <= 0 || place.tile_distance - (kRows - 1) >= 0)) != 0;
  }
  __device__ __forceinline__ bool has_any() const { return has_slopes || head.relative; }
  // Whether there is nothing to add in this tile.
  __device__ __forceinline__ bool is_absent() const { return !has_slopes && range == Reached::kNone; }
  // The entry of the relative bias for a distance.
  __device__ __forceinline__ int entry(int distance) const { return min(max(distance, -reach), reach); }

  // Adds the biases to the logits of column tiles [n0, n0 + kCount). All branches are warp-uniform.
  template <int kCount>
  __device__ __forceinline__ void add_columns(float (&logits)[kRowTiles][kCount][4], int n0) const {
    if (has_slopes) {
      const float first = static_cast<float>(place.distance);
      each_element<kRowTiles, kCount>([&](int i, int n, int e) {
        const float on = static_cast<float>(place.distance_on(i, n0 + n, e));
        logits[i][n][e] -= fabsf(first + on) * head.slope;
      });
    }
    if (range == Reached::kSome) {
      each_element<kRowTiles, kCount>([&](int i, int n, int e) {
        const float bias = head.relative[entry(place.distance + place.distance_on(i, n0 + n, e))];
        logits[i][n][e] = add_bias(logits[i][n][e],
                                   __fmul_rn(narrowed_beyond(kNarrowsFrom<float>, bias), kLog2E<float>));  // as `end`
      });
    } else if (range != Reached::kNone) {
      each_element<kRowTiles, kCount>([&](int i, int n, int e) { logits[i][n][e] = add_bias(logits[i][n][e], end); });
    }
  }

  // Adds the terms to scores x whose logits are scale * x. Returns the scale for which scale * x are the logits
  // afterwards.
  __device__ __forceinline__ float add(float (&x)[kRowTiles][kColumnTiles][4], float scale) const {
    return add_all<false>(x, scale, nullptr);
  }
  // Adds the terms to logits in units of log2.
  __device__ __forceinline__ void add_to_logits(float (&logits)[kRowTiles][kColumnTiles][4]) const {
    const float scale = add(logits, 1.f);
    if (scale == 1) return;
    each_element<kRowTiles, kColumnTiles>([&](int i, int n, int e) {  // they are in natural units
      logits[i][n][e] = __fmul_rn(narrowed_beyond(kNarrowsFrom<float>, logits[i][n][e]), scale);
    });
  }
  // Adds the terms of a tile that is not transposed. Those that all logits of a row share are left to the caller, in
  // rows[i].
  __device__ __forceinline__ float add(float (&x)[kRowTiles][kColumnTiles][4], float scale,
                                       float (&rows)[2 * kRowTiles]) const {
    static_assert(!kTransposed);
#pragma unroll
    for (float& row : rows) row = 0;
    return add_all<true>(x, scale, rows);
  }

 private:
  template <bool kLeavesRows>
  __device__ __forceinline__ float add_all(float (&x)[kRowTiles][kColumnTiles][4], float scale, float* rows) const {
    if (has_slopes) {
      add_slopes<kLeavesRows>(x, scale, rows);
      scale = 1;
    }
    if (range == Reached::kSome) {
      const bool inside = uniform(static_cast<int>(place.tile_distance - (kRows - 1) >= -reach &&
                                                   place.tile_distance + (kKeys - 1) <= reach)) != 0;
      scale *= kLn2<float>;  // entries are added as they are, in natural units
      inside ? add_relative<true>(x, scale) : add_relative<false>(x, scale);
      scale = kLog2E<float>;
    } else if (range != Reached::kNone) {
      if (kLeavesRows && scale > 0) {
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) rows[i] += end;
      } else {
        each_element<kRowTiles, kColumnTiles>([&](int i, int n, int e) { x[i][n][e] = fmaf(x[i][n][e], scale, end); });
        scale = 1;
      }
      if (uniform(static_cast<int>(end == -infinity())) != 0) {
        each_element<kRowTiles, kColumnTiles>([&](int i, int n, int e) { x[i][n][e] = -infinity(); });
      }
    }
    return scale;
  }

  // Where all distances of a tile have the same sign, the bias is linear in them. kLeavesRows: the term of the row is
  // not added, but left to the caller.
  template <bool kLeavesRows>
  __device__ __forceinline__ void add_slopes(float (&x)[kRowTiles][kColumnTiles][4], float scale, float* rows) const {
    const float first = static_cast<float>(place.distance);
    // Only general kernels, to which no terms of a row are left, run invariant calls.
    if ((kTransposed || kLeavesRows || !is_invariant) && is_one_sided()) {
      const bool before = place.tile_distance + (kKeys - 1) <= 0;
      const float rise = before ? head.slope : -head.slope;
      // The caller takes the maximum of a row over lanes, so the term left to it must be the same in all lanes of the
      // row: it excludes the lane's first key.
      const float key_of_lane = kLeavesRows ? static_cast<float>(2 * lane_in_quad()) : 0.f;
      const float first_of_row = rise * (first - key_of_lane), own_keys = rise * key_of_lane;
      each_element<kRowTiles, kColumnTiles>([&](int i, int n, int e) {
        const float key = static_cast<float>(place.keys_on(i, n, e));
        const float row = static_cast<float>(-place.rows_on(i, n, e));
        // One of the two is the same for all columns of accumulators and is computed once.
        const float own = fmaf(kTransposed ? key : row, rise, first_of_row), column = kTransposed ? row : key;
        x[i][n][e] = fmaf(x[i][n][e], scale, fmaf(column, rise, kLeavesRows ? own_keys : own));
        if (kLeavesRows) rows[2 * i + e / 2] = own;
      });
    } else {
      each_element<kRowTiles, kColumnTiles>([&](int i, int n, int e) {
        const float on = static_cast<float>(place.distance_on(i, n, e));
        x[i][n][e] = fmaf(x[i][n][e], scale, fabsf(first + on) * -head.slope);
      });
    }
  }

  // kInside: no distance is clamped. 8x8 tiles of scores on the same diagonal have the same entries: a column tile
  // reads two entries, for even and odd columns, and reuses the entries of the previous column tile for the rows
  // further down.
  template <bool kInside>
  __device__ __forceinline__ void add_relative(float (&x)[kRowTiles][kColumnTiles][4], float scale) const {
    constexpr int kBands = 2 * kRowTiles;
    float recent[kBands][2];  // for rows 8 * k
    float lowest = 0;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int k = kBands - 1; k >= 0; --k) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (n == 0 || k == 0) {
            recent[k][odd] = relative<kInside>(place.distance_on(k / 2, n, k % 2 * 2 + odd));
            lowest = fminf(lowest, recent[k][odd]);
          } else {
            recent[k][odd] = recent[k - 1][odd];
          }
          float& logit = x[k / 2][n][k % 2 * 2 + odd];
          logit = fmaf(logit, scale, recent[k][odd]);
        }
      }
    }
    // An entry of -inf masks the score, even if the score is NaN.
    if (!__any_sync(~0u, lowest == -infinity())) return;
    each_element<kRowTiles, kColumnTiles>([&](int i, int n, int e) {
      if (relative<kInside>(place.distance_on(i, n, e)) == -infinity()) x[i][n][e] = -infinity();
    });
  }
  // The entry for the distance of the lane's first score plus `on`.
  template <bool kInside>
  __device__ __forceinline__ float relative(int on) const {
    return kInside ? (head.relative + place.distance)[on] : head.relative[entry(place.distance + on)];
  }
};

}  // namespace flashattn_ext
