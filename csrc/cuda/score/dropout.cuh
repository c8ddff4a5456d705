// Dropout in accumulator tiles: which of a lane's scores are kept (rules/dropout.h has the mapping).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/tile/warp.cuh"
#include "params.h"
#include "rules/dropout.h"

namespace flashattn_ext {

// Heads, rows and columns are indices of the call. The generator's counter adds `origin`, whose row is a multiple of 16
// and whose key is a multiple of 64.
struct Dropout {
  PhiloxKey key;
  uint32_t last;   // in every byte: the largest random byte that keeps a score
  uint32_t batch;  // counted from the origin

  Dropout() = default;
  __device__ __forceinline__ Dropout(const AttnParams& p, int64_t b) : Dropout(philox_key(p), p, b) {}
  __device__ __forceinline__ Dropout(const PhiloxKey& key, const AttnParams& p, int64_t b)
      : key(key), last(static_cast<uint32_t>(p.dropout_threshold - 1) * 0x01010101u), batch(batch_of(p, b)) {}

  static __device__ __forceinline__ uint32_t batch_of(const AttnParams& p, int64_t b) {
    return static_cast<uint32_t>(b + p.origin.batch);
  }

  __device__ __forceinline__ PhiloxWords words(const Origin& origin, int64_t head, int row, int column, int row_of_8,
                                               int column_of_8) const {
    // If the key were not opaque, the compiler would keep the keys of all rounds in registers.
    const PhiloxKey first{static_cast<uint32_t>(ptx::opaque(key.low)), static_cast<uint32_t>(ptx::opaque(key.high))};
    return philox(first, batch, column_call(origin, column),
                  head_lanes(origin, head) + static_cast<uint32_t>(row_of_8 * 8 + column_of_8), row_call(origin, row));
  }

  // In the top bit of every byte: whether that byte of `word` is at most the byte of `last`. The low seven bits decide
  // where the top bits agree.
  __device__ __forceinline__ uint32_t kept(uint32_t word) const {
    constexpr uint32_t kTop = 0x80808080u;
    const uint32_t low_bits = (last | kTop) - (word & ~kTop);
    constexpr int kLast = 0xF0, kWord = 0xCC, kLow = 0xAA;
    // One instruction; the compiler makes two of the expression.
    return ptx::of_bits<(kLast & ~kWord) | (~(kLast ^ kWord) & kLow)>(last, word, low_bits);
  }

  // For scores of 16 queries from `row` (a multiple of 16) on and keys from `column` (a multiple of 64) on, packed as A
  // operands of steps of 16 keys: the sign of byte i of signs[step][odd] is set when register i keeps element `odd`.
  template <int kSteps>
  __device__ __forceinline__ void packed_signs(uint32_t (&signs)[kSteps][2], const Origin& origin, int64_t head,
                                               int row, int column) const {
    static_assert(kSteps % 4 == 0, "whole calls of the generator");
#pragma unroll
    for (int step = 0; step < kSteps; step += 4) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const PhiloxWords words =
            philox(key, batch, column_call(origin, column) + step / 4,
                   head_lanes(origin, head) + static_cast<uint32_t>(quad() * 8 + 2 * lane_in_quad() + odd),
                   row_call(origin, row));
#pragma unroll
        for (int i = 0; i < 4; ++i) signs[step + i][odd] = kept(words.word[i]);
      }
    }
  }
  // All bits of the kept elements of those registers, from their signs.
  template <int kSteps>
  static __device__ __forceinline__ void masks(uint32_t (&masks)[kSteps][4], const uint32_t (&signs)[kSteps][2]) {
    unrolled<kSteps, 4>([&](int step, int i) {
      masks[step][i] = ptx::permute_bytes(signs[step][0], signs[step][1], 0xCC88 + 0x1111 * i);
    });
  }
  template <int kSteps>
  static __device__ __forceinline__ void drop_packed(uint32_t (&weights)[kSteps][4],
                                                     const uint32_t (&signs)[kSteps][2]) {
    uint32_t kept[kSteps][4];
    masks(kept, signs);
    unrolled<kSteps, 4>([&](int step, int i) { weights[step][i] &= kept[step][i]; });
  }

  // Zeroes dropped weights of 16 queries from `row` on and keys from `column` on, both multiples of 16.
  template <class Core, int kSteps>
  __device__ __forceinline__ void drop(typename Core::A (&weights)[kSteps], const Origin& origin, int64_t head, int row,
                                       int column) const {
    constexpr int kBlocks = kSteps * Core::kK / 16;  // blocks of 16 keys
#pragma unroll
    for (int first = 0; first < kBlocks; first += 4) {
      const PhiloxWords even = words(origin, head, row, column + first * 16, quad(), 2 * lane_in_quad());
      const PhiloxWords odd = words(origin, head, row, column + first * 16, quad(), 2 * lane_in_quad() + 1);
#pragma unroll
      for (int block = first; block < (first + 4 < kBlocks ? first + 4 : kBlocks); ++block) {
        // Fewer than 64 columns are the first or the second half of the four words.
        const bool second_half = kBlocks < 4 && column % 64;
        Core::mask(weights, block, kept(second_half ? even.word[2 + block % 2] : even.word[block % 4]),
                   kept(second_half ? odd.word[2 + block % 2] : odd.word[block % 4]));
      }
    }
  }

  // For transposed scores of 64 keys from `key` on, 16 in each of four warps, and 16 queries from `query` on
  // (multiples of 64 and 16). One call of the generator serves all four warps, so a warp draws for the others too. Warp
  // w keeps element e of query tile n when bit 7 + 8 * (n + 2 * (e / 2)) of the result is set after shifting it to the
  // left by w, and for odd queries (e % 2) by another 4.
  __device__ __forceinline__ uint32_t transposed_warps(const Origin& origin, int64_t head, int key, int query) const {
    const PhiloxWords even = words(origin, head, query, key, 2 * lane_in_quad(), quad()),
                      odd = words(origin, head, query, key, 2 * lane_in_quad() + 1, quad());
    uint32_t bits = 0;
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      bits |= (kept(even.word[warp]) & 0x80808080u) >> warp | (kept(odd.word[warp]) & 0x80808080u) >> (4 + warp);
    }
    return bits;
  }

  // For transposed scores [key][query]: what a lane keeps of kTiles 16-key tiles and 16 queries. When kTiles is a
  // power of two, the tiles are within 64 keys, which one call of the generator serves.
  template <int kTiles>
  struct Column {
    uint32_t even[kTiles], odd[kTiles];

    __device__ __forceinline__ void keep_all() {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) even[i] = odd[i] = ~0u;
    }
    // Element e of the 16x8 accumulator tile n of key tile i.
    __device__ __forceinline__ bool keeps(int i, int n, int e) const {
      return (e % 2 ? odd[i] : even[i]) & 0x80u << 8 * (n % 2 + 2 * (e / 2));
    }
  };

  template <int kTiles>
  __device__ __forceinline__ Column<kTiles> transposed(const Origin& origin, int64_t head, int key, int query) const {
    static_assert(kTiles <= 4);
    Column<kTiles> column;
    PhiloxWords even, odd;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i == 0 || kTiles == 3) {
        even = words(origin, head, query, key + 16 * i, 2 * lane_in_quad(), quad());
        odd = words(origin, head, query, key + 16 * i, 2 * lane_in_quad() + 1, quad());
      }
      const int block = (key / 16 + i) % 4;
      column.even[i] = kept(select(even, block));
      column.odd[i] = kept(select(odd, block));
    }
    return column;
  }

 private:
  // Parts of the counter (rules/dropout.h).
  static __device__ __forceinline__ uint32_t column_call(const Origin& origin, int column) {
    return (static_cast<uint32_t>(column) + static_cast<uint32_t>(origin.key)) / 64;
  }
  static __device__ __forceinline__ uint32_t row_call(const Origin& origin, int row) {
    return (static_cast<uint32_t>(row) + static_cast<uint32_t>(origin.row)) / 16;
  }
  static __device__ __forceinline__ uint32_t head_lanes(const Origin& origin, int64_t head) {
    return (static_cast<uint32_t>(head) + static_cast<uint32_t>(origin.head)) * 64;
  }
  static __device__ __forceinline__ uint32_t select(const PhiloxWords& words, int i) {
    return i < 2 ? (i == 0 ? words.word[0] : words.word[1]) : (i == 2 ? words.word[2] : words.word[3]);
  }
};

}  // namespace flashattn_ext
