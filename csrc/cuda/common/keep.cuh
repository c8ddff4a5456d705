// Dropout in accumulator tiles: which of a lane's scores are kept (../../dropout.h has the mapping).
#pragma once

#include "../../dropout.h"
#include "../../params.h"
#include "../ptx/math.cuh"

namespace flashattn_ext {

struct Dropout {
  PhiloxKey key;
  uint32_t threshold;
  uint32_t batch;

  Dropout() = default;
  __device__ __forceinline__ Dropout(const AttnParams& p, int64_t b)
      : key(philox_key(static_cast<uint64_t>(p.rng_state[0]), static_cast<uint64_t>(p.rng_state[1]))),
        threshold(static_cast<uint32_t>(p.dropout_threshold)),
        batch(static_cast<uint32_t>(b)) {}

  __device__ __forceinline__ bool keeps(uint32_t word, int byte) const {
    return __byte_perm(word, 0, 0x4440 + byte) < threshold;
  }

  // For a 16-row tile of scores from query `row` (a multiple of 16) and key `column` (a multiple of 64), packed as A
  // operands of steps of 16 keys: the sign of byte i of signs[step][odd] is set when register i keeps element `odd`.
  template <int kSteps>
  __device__ __forceinline__ void packed_signs(uint32_t (&signs)[kSteps][2], int64_t head, int row, int column) const {
    static_assert(kSteps % 4 == 0, "whole calls of the generator");
    constexpr uint32_t kBytes = 0x01010101u, kSigns = 0x80u * kBytes;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t below = (threshold & 0x7F) * kBytes, small = threshold < 128 ? ~0u : 0u;
#pragma unroll
    for (int step = 0; step < kSteps; step += 4) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const PhiloxWords words = philox(key, batch, column / 64 + step / 4,
                                         static_cast<uint32_t>(head * 64 + g * 8 + 2 * t + odd), row / 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Four comparisons of bytes: the lower seven bits by subtraction, the eighth by hand.
          const uint32_t x = words.word[i], reaches = (x | kSigns) - below;
          signs[step + i][odd] = ~((x & reaches) | (small & (x | reaches)));
        }
      }
    }
  }
  template <int kSteps>
  static __device__ __forceinline__ void drop_packed(uint32_t (&weights)[kSteps][4],
                                                     const uint32_t (&signs)[kSteps][2]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] &= ptx::permute_bytes(signs[step][0], signs[step][1], 0xCC88 + 0x1111 * i);
      }
    }
  }

  // A 16-row tile of scores [query][key] from query `row` (a multiple of 16) and key `column` (a multiple of 16).
  template <int N>
  __device__ __forceinline__ void drop(float (&scores)[N][4], int64_t head, int row, int column) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < N; tile += 8) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const PhiloxWords words = philox(key, batch, (column + tile * 8) / 64,
                                         static_cast<uint32_t>(head * 64 + g * 8 + 2 * t + odd), row / 16);
#pragma unroll
        for (int n = tile; n < (tile + 8 < N ? tile + 8 : N); ++n) {
          // Fewer than 64 columns are the first or the second half of the four words.
          const uint32_t word = N < 8 && column % 64 ? words.word[2 + n / 2 % 2] : words.word[n / 2 % 4];
          const int byte = n % 2 * 2;
          if (!keeps(word, byte)) scores[n][odd] = 0;
          if (!keeps(word, byte + 1)) scores[n][odd + 2] = 0;
        }
      }
    }
  }

  // Bit 4 * n + e: keep element e of tile n, for a 16-row tile of scores [key][query] from key `row` (a multiple of 16)
  // and query `column` (a multiple of 16).
  template <int N>
  __device__ __forceinline__ uint32_t transposed_bits(int64_t head, int row, int column) const {
    static_assert(N % 2 == 0 && N <= 8, "one word of bits");
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, block = row / 16 % 4;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const PhiloxWords words = philox(key, batch, row / 64, static_cast<uint32_t>(head * 64 + (2 * t + odd) * 8 + g),
                                         (column + n * 8) / 16);
        const uint32_t word =
            block < 2 ? (block == 0 ? words.word[0] : words.word[1]) : (block == 2 ? words.word[2] : words.word[3]);
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          const int element = 4 * (n + byte % 2) + odd + 2 * (byte / 2);
          bits |= static_cast<uint32_t>(keeps(word, byte)) << element;
        }
      }
    }
    return bits;
  }
};

}  // namespace flashattn_ext
