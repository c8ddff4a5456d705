// The arithmetic between the products of attention: `weigh` turns scores into weights, `differentiate` turns dP into
// dS. The kernels of both architectures hold tiles of scores in the same register layout, so both call these functions
// on the fragments of a lane. score.h says what a score is, mask.h which scores are visible, dropout.h which weights
// are kept.
//
// Accumulators have the layout of warp.cuh: a lane holds rows g and g + 8 and columns 2t and 2t + 1 of a 16x8
// tile, with g = lane / 4 and t = lane % 4. Rows are queries in the forward and keys in the backward.
#pragma once

#include "cuda/score/dropout.cuh"
#include "cuda/table/options.h"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// The weight of a stored score. offset: the maximum of its row, or the known log-sum-exp, in units of log2.
template <class Score>
__device__ __forceinline__ float weight_of(const Score& score, float x, float offset) {
  return ptx::ex2(fmaf(x, score.factor, -offset));
}

// In a forward: the logit of a stored score of row r, rounded once, and the offset of the row's weights from their
// maximum. general_score.cuh has other rules.
template <class Score>
__device__ __forceinline__ float logit_of(const Score& score, int, float x) {
  return __fmul_rn(x, score.factor);
}
template <class Score>
__device__ __forceinline__ float offset_of(const Score&, int, float max) {
  return max;
}
// The exponent of a logit's weight. Beside kRoundsProducts it is not a single sum with the product in it.
template <class Score>
__device__ __forceinline__ float exponent_of(const Score&, float logit, float max) {
  return __fsub_rn(logit, max);
}
// A stored score, with its bias narrowed if it has one.
template <class Score>
__device__ __forceinline__ float narrowed_score(const Score&, float x) {
  return x;
}
// Whether the products of a rule can have to be rounded before the offset is subtracted (kRoundsProducts in score.h),
// and whether those of a row with this largest logit have to be.
template <class Score>
__device__ __forceinline__ constexpr bool has_products(const Score&) {
  return true;
}
template <class Score>
__device__ __forceinline__ bool rounds_row(const Score& score, int r, float logit) {
  return is_large_product(offset_of(score, r, logit));
}

// dS of a stored score, from dP. weight: before dropout; dp: 0 where dropout has not kept the weight.
template <class Score>
__device__ __forceinline__ float gradient_of(const Score& score, float x, float weight, float dp, float delta) {
  return score.times_slope(weight * (dp - delta), x);
}

// Scores as A operands of steps of 16 columns, in 16 bits.
template <class T, int kSteps, int N>
__device__ __forceinline__ void pack_scores(uint32_t (&packed)[kSteps][4], const float (&x)[N][4]) {
  static_assert(N == 2 * kSteps);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const auto a = TensorCore<T>::from_accumulators(x, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[step][i] = a.x[i];
  }
}

// --- forward: the maximum of a row is not known yet ---------------------------------------------------------------

// Products become stored scores.
template <class Score, int kRowTiles, int N>
__device__ __forceinline__ void store_scores(float (&x)[kRowTiles][N][4], const Score& score) {
  if (!score.changes_products()) return;
  each_element<kRowTiles, N>([&](int i, int n, int e) { x[i][n][e] = score.stored(x[i][n][e]); });
}

// Masked scores become -inf. query_of(i, r): the query of row g (r = 0) or g + 8 of row tile i; key: of this lane's
// first score. kBefore, kAfter: which ends of the visible keys to check; each costs a comparison per score.
template <bool kBefore, bool kAfter, int kRowTiles, int N, class Mask, class QueryOf>
__device__ __forceinline__ void hide_keys_of(float (&x)[kRowTiles][N][4], const Mask& mask, const QueryOf& query_of,
                                             int key) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = query_of(i, r);
      const Limits seen = mask.keys_of(query, query + 1);
      const int begin = seen.begin - key, end = seen.end - key;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int column = n * 8 + odd;
          if ((kBefore && column < begin) || (kAfter && column >= end)) x[i][n][2 * r + odd] = -infinity();
        }
      }
    }
  }
}
// Hides keys from adjacent queries. row: of this lane's first score.
template <bool kBefore, bool kAfter, int kRowTiles, int N, class Mask>
__device__ __forceinline__ void hide_keys(float (&x)[kRowTiles][N][4], const Mask& mask, int row, int key) {
  hide_keys_of<kBefore, kAfter>(x, mask, [row](int i, int r) { return row + 16 * i + 8 * r; }, key);
}

// The running maximum is kept while no logit exceeds it by more than this, in units of log2: then the accumulators need
// no rescaling, and weights are at most 2^8.
constexpr float kTolerance = 8;

// For kernels that do not use the sums of a tile's weights.
struct IgnoreSum {
  __device__ __forceinline__ void operator()(int, float) const {}
};

// The online softmax (Milakov and Gimelshein 2018) of rows g and g + 8 of a 16-row tile. kTellsLargest: it also tracks
// the largest logit, in a register that some kernels of sm80/ lack.
template <bool kTellsLargest = true>
struct OnlineSoftmax {
  // The running maximum that weights are relative to, in units of log2; -inf before the first logit. It may stay below
  // the largest logit (kTolerance), and starts at the sink.
  float max[2];
  float sum[2];         // sum of this lane's weights so far
  float largest_logit;  // so far, in units of log2: of row g in lanes with an even t, of row g + 8 in the others

  // A sink is a logit before the first key.
  __device__ __forceinline__ void start(float sink) {
    const float sinks[2] = {sink, sink};
    start(sinks);
  }
  // Starts rows of different heads.
  __device__ __forceinline__ void start(const float (&sinks)[2]) {
    if constexpr (kTellsLargest) largest_logit = -infinity();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = sinks[r];
      sum[r] = lane_in_quad() == 0 && sink_counts(sinks[r]) ? 1.f : 0.f;
    }
  }

  // The largest stored score of row r of the tile, and of this lane's part of it.
  template <int N>
  static __device__ __forceinline__ float largest(const float (&x)[N][4], int r) {
    return quad_max(largest_of_lane(x, r));
  }
  template <int N>
  static __device__ __forceinline__ float largest_of_lane(const float (&x)[N][4], int r) {
    float largest = x[0][2 * r];
#pragma unroll
    for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
    return largest;
  }

  // Stored scores become weights, exp(logit - max). Before that it calls rescale(shrink): the caller multiplies its
  // sums under the earlier maximum by shrink[r]. Last it calls take_sum(r, sum of this lane's weights).
  template <class Score, int N, class Rescale, class TakeSum = IgnoreSum>
  __device__ __forceinline__ void weigh(float (&x)[N][4], const Score& score, float tolerance, const Rescale& rescale,
                                        const TakeSum& take_sum = {}) {
    // Nothing but the maxima of the lane decides about the branch, and the first row is exchanged ahead of it: a branch
    // behind both exchanges would leave their latency exposed, 2 to 3 % of the time of a forward.
    const float first = largest_of_lane(x, 0), all_of_first = quad_max(first), second = largest_of_lane(x, 1);
    bool rounded[2] = {false, false};
    if (some_products_are_large(score, first, second)) {
      const float all[2] = {all_of_first, quad_max(second)};
      round_products(x, all, score, tolerance, rounded);
    }
    const float all[2] = {all_of_first, quad_max(second)};
    weigh(x, all, rounded, score, rescale, take_sum, tolerance);
  }
  // Weighs where other warps hold more scores of the rows. largest: over all warps.
  template <class Score, int N, class Rescale, class TakeSum = IgnoreSum>
  __device__ __forceinline__ void weigh(float (&x)[N][4], const float (&largest)[2], const Score& score,
                                        float tolerance, const Rescale& rescale, const TakeSum& take_sum = {}) {
    bool rounded[2] = {false, false};
    if (some_products_are_large(score, largest[0], largest[1])) {
      round_products(x, largest, score, tolerance, rounded);
    }
    weigh(x, largest, rounded, score, rescale, take_sum, tolerance);
  }

  // For kernels that started without the sink: counts it after the last key. weight: of a logit that is the maximum;
  // shrink: the factors for all sums of the caller.
  __device__ __forceinline__ void end(float sink, float weight, float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = max[r];
      max[r] = fmaxf(before, sink);
      const float offset = finite_max(max[r]);
      shrink[r] = ptx::ex2(before - offset);
      sum[r] *= shrink[r];
      if (lane_in_quad() == 0 && sink_counts(sink)) sum[r] += weight * ptx::ex2(sink - offset);
    }
  }

  // The sum of a row's weights; 0 if the row is fully masked.
  __device__ __forceinline__ float total(int r) const { return quad_sum(sum[r]); }
  // Stores lse, its words where they are wanted and, if the call has row_maxima, the largest logit of row r, to row
  // `at` of the tensors. All lanes of the row call it.
  __device__ __forceinline__ void store_statistics(const AttnParams& p, int b, int h, int64_t at, int r,
                                                   float total) const {
    if (lane_in_quad() == 0) store_lse(p, b, h, at, max[r], total);
    if constexpr (kTellsLargest) {
      if (lane_in_quad() == r && p.row_maxima.data) store_largest(p, b, h, at, largest_logit);
    }
  }
  // Stores both rows at once, of which row g is row `at`. exist: whether they are within the sequence.
  __device__ __forceinline__ void store_statistics(const AttnParams& p, int b, int h, int64_t at,
                                                   const float (&totals)[2], const bool (&exist)[2]) const {
    const bool second = lane_in_quad() % 2;
    if (lane_in_quad() > 1 || !(second ? exist[1] : exist[0])) return;
    at += second ? 8 : 0;
    store_lse(p, b, h, at, second ? max[1] : max[0], second ? totals[1] : totals[0]);
    if constexpr (kTellsLargest) {
      if (p.row_maxima.data) store_largest(p, b, h, at, largest_logit);
    }
  }

 private:
  // Whether round_products has rows in this warp. x, y: the largest scores of both rows, of the tile or of the lane.
  template <class Score>
  static __device__ __forceinline__ bool some_products_are_large(const Score& score, float x, float y) {
    if (!has_products(score)) return false;
    const bool large = rounds_row(score, 0, logit_of(score, 0, x)) | rounds_row(score, 1, logit_of(score, 1, y));
    return __any_sync(~0u, large) != 0;
  }
  // In rows whose largest product is large, stored scores become those whose products are the exponents of the weights,
  // from products that are rounded as the maximum is. Nothing is left to be subtracted from them.
  template <class Score, int N>
  __device__ __forceinline__ void round_products(float (&x)[N][4], const float (&largest)[2], const Score& score,
                                                 float tolerance, bool (&rounded)[2]) const {
    const float inverse = ptx::rcp_here(score.factor);  // finite: with a factor below 2^-112 no product is large
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float logit = logit_of(score, r, largest[r]);
      if (!rounds_row(score, r, logit)) continue;
      rounded[r] = true;
      const float top = finite_max(raised_max(r, logit, tolerance));
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score_of_key = x[n][2 * r + odd];
          score_of_key = exponent_of(score, logit_of(score, r, score_of_key), top) * inverse;
        }
      }
    }
  }
  // The rest of the public functions. rounded: which rows round_products has changed.
  template <class Score, int N, class Rescale, class TakeSum>
  __device__ __forceinline__ void weigh(float (&x)[N][4], const float (&largest)[2], const bool (&rounded)[2],
                                        const Score& score, const Rescale& rescale, const TakeSum& take_sum,
                                        float tolerance) {
    float logit[2], offset[2], shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      logit[r] = logit_of(score, r, largest[r]);
      shrink[r] = raise_max(r, logit[r], tolerance);
      offset[r] = rounded[r] ? 0.f : offset_of(score, r, finite_max(max[r]));
    }
    if constexpr (kTellsLargest) largest_logit = fmaxf(largest_logit, threadIdx.x % 2 ? logit[1] : logit[0]);
    rescale(shrink);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float part = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& weight = x[n][2 * r + odd];
          weight = weight_of(score, weight, offset[r]);
          part += weight;
        }
      }
      sum[r] = sum[r] * shrink[r] + part;
      take_sum(r, part);
    }
  }
  // The running maximum after a tile with this largest logit.
  __device__ __forceinline__ float raised_max(int r, float largest, float tolerance) const {
    const float before = max[r], now = fmaxf(before, largest);
    return now - before <= tolerance ? before : now;
  }
  // Returns the factor for all earlier sums.
  __device__ __forceinline__ float raise_max(int r, float largest, float tolerance) {
    const float before = max[r], now = fmaxf(before, largest);
    const bool stays = now - before <= tolerance;
    max[r] = stays ? before : now;
    return stays ? 1.f : ptx::ex2(before - finite_max(max[r]));
  }
};

// Multiplies accumulators of rows g and g + 8; skipped if all factors of the warp are 1.
template <int N>
__device__ __forceinline__ void rescale(float (&x)[N][4], const float (&shrink)[2]) {
  if (!__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) return;
  unrolled<N, 4>([&](int n, int e) { x[n][e] *= shrink[e / 2]; });
}

// --- backward: the log-sum-exp of a row is known; scores are transposed, rows are keys ------------------------------

// The queries that see each of a lane's keys, counted from the lane's first query. row, key: of the lane's first score.
template <int kKeyTiles>
struct SeenBy {
  Limits limits[kKeyTiles][2];

  SeenBy() = default;
  // Visible: Mask32, or IntervalMask (intervals.cuh).
  template <class Visible>
  __device__ __forceinline__ SeenBy(const Visible& mask, int row, int key) {
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      Limits& rows = limits[i / 2][i % 2];
      rows = rows_that_see(mask, key + 8 * i);
      rows.begin -= row;
      rows.end -= row;
    }
  }
  // Row r (g or g + 8) of key tile i.
  __device__ __forceinline__ bool includes(int i, int r, int query) const {
    return query >= limits[i][r].begin && query < limits[i][r].end;
  }
};

// Products become weights with dropout applied, and dP becomes dS. lse, in units of log2, and delta: from the lane's
// first query on; an lse of +inf makes weights of 0. With kTwoWords lse is the first word of the log-sum-exp, and
// log2_sum the second one. Seen: SeenBy, or SeenQueries (block_mask.cuh). Dropping: a policy of dropout
// (cuda/sm80/shared/dropout_policy.cuh).
template <bool kMasked, bool kTwoWords, class Score, int kKeyTiles, int N, class Seen, class Dropping>
__device__ __forceinline__ void weigh_and_differentiate(float (&weights)[kKeyTiles][N][4],
                                                        float (&dscores)[kKeyTiles][N][4], const Score& score,
                                                        const float* lse, const float* log2_sum, const float* delta,
                                                        const Seen& seen_by, Dropping& dropping) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (n % 2 == 0) dropping.draw(n);
    const float2 row_lse = *reinterpret_cast<const float2*>(lse + n * 8);
    float2 row_rest{};
    if constexpr (kTwoWords) row_rest = *reinterpret_cast<const float2*>(log2_sum + n * 8);
    const float2 row_delta = *reinterpret_cast<const float2*>(delta + n * 8);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int odd = e % 2;
        const float x = score.stored(weights[i][n][e]);
        float exponent = fmaf(x, score.factor, -(odd ? row_lse.y : row_lse.x));
        if constexpr (kTwoWords) exponent -= odd ? row_rest.y : row_rest.x;
        const float weight = ptx::ex2(exponent);
        const bool keeps = dropping.keeps(i, n, e);
        weights[i][n][e] = keeps ? weight : 0.f;
        const float dp = keeps ? dscores[i][n][e] : 0.f;
        dscores[i][n][e] = gradient_of(score, x, weight, dp, odd ? row_delta.y : row_delta.x);
        // A masked score has no gradient, even if dP is not finite.
        if (kMasked && !seen_by.includes(i, e / 2, n * 8 + odd)) weights[i][n][e] = dscores[i][n][e] = 0;
      }
    }
  }
}

}  // namespace flashattn_ext
