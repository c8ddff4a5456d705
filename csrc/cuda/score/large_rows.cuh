// Rows whose log-sum-exp is too large for one word (rules/lse_words.h), in kernels that recompute weights of 16 bits as
// exp2(factor * x - lse).
//
// The rounding error of lse is one of the exponent of every weight of the row: at most 2^-15 below kOneWordBelow, which
// is less than the rounding of a weight to 16 bits. In a larger row the number that kernels read in place of lse is a
// mark. They find out whether a tile has a mark, which few tiles have, and subtract both words from the products of
// marked rows, in place. The mark is -0: the ordinary arithmetic, which follows, subtracts nothing more.
//
// In many large rows a single key has all the weight. Its dP - delta is then the rounding error of two sums, which dS
// would carry into products with large queries and keys. With dropout, rows of any size have that error, because `out`
// is the value times 1 / p_keep, rounded. Such a row, whose second word is 0, has a mark of its own: prepare leaves
// <dout, out> out of delta, the kernels take dP as 0, and its weight is exactly 1.
#pragma once

#include <climits>

#include "cuda/score/scores.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

constexpr float kOneWordBelow = 1024;

// +inf, of a row without keys, and NaN are not large.
__device__ __forceinline__ bool is_large(float lse) { return fabsf(lse) >= kOneWordBelow && fabsf(lse) < infinity(); }
// Whether one key, or the sink, has all the weight of a row with these words_of_backward.
__device__ __forceinline__ bool has_one_weight(const LseWords<float>& words) {
  return __float_as_int(words.log2_sum) == 0 && fabsf(words.top) < infinity();
}
// The words of a row for a backward. Where one key has all the weight of a small row, they say so only with dropout:
// without it the rounding error of dP - delta is harmless there, and a backward that is given lse alone has the same
// bits. kDrops: whether the kernel's calls may have dropout.
template <bool kDrops = true>
__device__ __forceinline__ LseWords<float> words_of_backward(const AttnParams& p, int64_t b, int64_t h, int64_t row) {
  LseWords<float> words = LseWords<float>::of(p, b, h, row);
  if (is_large(words.top)) return words;
  if (kDrops && p.has_dropout() && p.lse_words.data) {
    const LseWords<float> given = LseWords<float>::given(p, b, h, row);
    if (has_one_weight(given)) return given;
  }
  if (has_one_weight(words)) words.log2_sum = -0.f;
  return words;
}

// One word for a row, or a mark, from its log-sum-exp.
__device__ __forceinline__ float one_word(float lse) { return is_large(lse) ? -0.f : lse + 0.f; }  // +0 for -0
// The mark of a row with one weight: the number next to -0, which changes no exponent.
__device__ __forceinline__ float mark_of_one_weight() { return __int_as_float(INT_MIN + 1); }
__device__ __forceinline__ bool is_mark_of_one_weight(float lse) { return __float_as_int(lse) == INT_MIN + 1; }
__device__ __forceinline__ bool is_mark(float lse) { return __float_as_int(lse) <= INT_MIN + 1; }

// The two words of a row for kernels that always subtract the second one: a mark replaces the first word of rows that
// round products or have one weight. The mark of one weight is in the second word.
__device__ __forceinline__ float first_word(const LseWords<float>& words) {
  const bool marked = (rounds_products(words.top) && words.top < infinity()) || has_one_weight(words);
  return marked ? -0.f : words.top + 0.f;
}
__device__ __forceinline__ float second_word(const LseWords<float>& words) {
  return has_one_weight(words) ? mark_of_one_weight() : words.log2_sum + 0.f;  // +0 for -0
}

// Whether some of kRows rows have a mark. All lanes of a warp call it.
template <int kRows>
__device__ __forceinline__ bool has_mark(const float* lse) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < (kRows + 31) / 32; ++i) {
    const int row = i * 32 + lane();
    any = any || (row < kRows && is_mark(lse[row]));
  }
  return __any_sync(~0u, any) != 0;
}

// dP of rows with one weight becomes 0; transposed, as in subtract_words.
template <int kKeyTiles, int N>
__device__ __forceinline__ void clear_rows_of_one_weight(float (&dp)[kKeyTiles][N][4], const float* lse) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      if (!is_mark_of_one_weight(lse[8 * n + 2 * lane_in_quad() + odd])) continue;
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) dp[i][n][odd] = dp[i][n][2 + odd] = 0;
    }
  }
}

// Turns stored scores of a row into those whose products are the exponents of the weights. Products are rounded where
// the forward rounds them (kRoundsProducts in score.h). kTopAlone: the ordinary arithmetic subtracts the second
// word. kAnyRow: rows without a mark have an object, too, which leaves their scores as they are.
template <bool kTopAlone, bool kAnyRow = false>
struct SubtractedWords {
  float first, second;  // factors: one is 1
  float top, inverse, log2_sum;
  float most;  // the largest exponent that `of` returns; 0 unless kTopAlone or kAnyRow

  __device__ __forceinline__ SubtractedWords()
      : first(1), second(1), top(0), inverse(1), log2_sum(0), most(infinity()) {
    static_assert(kAnyRow);
  }
  // inverse: of the factor of scores.
  template <class Score>
  __device__ __forceinline__ SubtractedWords(const Score& score, float inverse, const LseWords<float>& words)
      : first(1), second(score.factor), top(words.top), inverse(inverse), log2_sum(words.log2_sum), most(0) {
    const bool one_weight = has_one_weight(words);
    if (one_weight || rounds_products(top)) first = score.factor, second = 1;
    if (kTopAlone) most = log2_sum, log2_sum = 0;
    // Weights are at most 1, so that this leaves 1 for the maximum, whose recomputed product may be below top, in sums
    // of another order. Other keys are further away.
    if (one_weight) most = 0, log2_sum = -fabsf(top) / (1 << 20);
  }
  // No weight is above 1, however far a kernel's products are from those of the forward: sums of 512 terms of 10^13 in
  // two orders can differ by more than any exponent.
  __device__ __forceinline__ float of(float x) const {
    const float exponent = fmaf(__fmul_rn(x, first), second, -top) - log2_sum;
    const float limit = kTopAlone || kAnyRow ? most : 0.f;
    return (exponent > limit ? limit : exponent) * inverse;
  }
};

// Products of marked rows become those whose logits are the exponents of the weights. They are transposed: rows are
// columns of accumulators. lse: of all rows, and words_of(i): the words of row i; both count from the first column.
// kRolled: in a loop over a copy of the products in local memory. Unrolled over registers these instructions, which few
// steps execute, lie in the mainloop and take room in the instruction cache: without them Hopper's backwards at
// D = 64 are 1 to 8 % faster. The kernels of sm80/ would spill other registers for the copy, and be 1 to 4 % slower.
template <bool kTopAlone = false, bool kRolled = false, class Score, int kKeyTiles, int N, class WordsOf>
__device__ __forceinline__ void subtract_words(float (&x)[kKeyTiles][N][4], const Score& score, const float* lse,
                                               const WordsOf& words_of) {
  const float inverse = ptx::rcp_here(score.factor);
  constexpr int kRows = 2 * N, kKeys = 2 * kKeyTiles;  // of a lane
  float rows[kRows][kKeys];
  unrolled<kRows, kKeys>([&](int n, int i) { rows[n][i] = x[i / 2][n / 2][i % 2 * 2 + n % 2]; });
#pragma unroll(kRolled ? 1 : kRows)
  for (int n = 0; n < kRows; ++n) {
    const int row = n / 2 * 8 + 2 * lane_in_quad() + n % 2;
    if (!is_mark(lse[row])) continue;
    const SubtractedWords<kTopAlone> words(score, inverse, words_of(row));
#pragma unroll
    for (float& score_of_key : rows[n]) score_of_key = words.of(narrowed_score(score, score_of_key));
  }
  unrolled<kRows, kKeys>([&](int n, int i) { x[i / 2][n / 2][i % 2 * 2 + n % 2] = rows[n][i]; });
}

// Subtracts the words from the products of a warp's part of a step, if a row has a mark. step: a KeyTileStep of
// ../sm80/.
template <bool kTopAlone, class Step, class Score, int kKeyTiles, int N>
__device__ __forceinline__ void subtract_words_of_marked(const Step& step, float (&x)[kKeyTiles][N][4],
                                                         const Score& score) {
  const float* const lse = step.lse + step.query;
  if (!has_mark<8 * N>(lse)) return;
  subtract_words<kTopAlone>(x, score, lse, step.workspace.words_of(step.p, step.b, step.h, step.row0 + step.query));
}

// dP of rows with one weight becomes 0. marks: the words of the rows that have the marks.
template <int kKeyTiles, int N>
__device__ __forceinline__ void clear_rows_of_marked(const float* marks, float (&dp)[kKeyTiles][N][4]) {
  if (has_mark<8 * N>(marks)) clear_rows_of_one_weight(dp, marks);
}

// Subtracts them from scores of which a lane has rows g and g + 8 of each row tile. words_of(i, r): of these rows.
template <class Score, int kRowTiles, int N, class WordsOf>
__device__ __forceinline__ void subtract_words_of_rows(float (&x)[kRowTiles][N][4], const Score& score,
                                                       const float (&lse)[kRowTiles][2], const WordsOf& words_of) {
  const float inverse = ptx::rcp_here(score.factor);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Without a branch for each row ptxas spills in cuda/sm90/derivatives/jvp.cuh.
      SubtractedWords<false, true> words(score, inverse, words_of(i, r));
      if (!is_mark(lse[i][r])) words = {};
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score_of_key = x[i][n][2 * r + odd];
          score_of_key = words.of(score_of_key);
        }
      }
    }
  }
}

}  // namespace flashattn_ext
