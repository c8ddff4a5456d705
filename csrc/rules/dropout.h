// The dropout mask: a pure function of (seed, offset, batch, head, query, key, dropout_p), the same bits on every
// backend.
//
// Generator: Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call
// serves the 16 scores {i, i + 8} x {j, j + 8} of four adjacent 16-key blocks, which one thread of a tensor-core tile
// holds in its fragment. docs/dropout.md states the mapping in words.
#pragma once

#include "params.h"

namespace flashattn_ext {

struct PhiloxKey {
  uint32_t low;
  uint32_t high;
};

struct PhiloxWords {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

// SplitMix64's finaliser over seed and offset.
FLASHATTN_HOST_DEVICE PhiloxKey philox_key(uint64_t seed, uint64_t offset) {
  uint64_t x = seed ^ (offset * 0x9E3779B97F4A7C15ull);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

FLASHATTN_HOST_DEVICE PhiloxKey philox_key(const AttnParams& p) {
  return philox_key(static_cast<uint64_t>(p.rng_state[0]), static_cast<uint64_t>(p.rng_state[1]));
}

FLASHATTN_HOST_DEVICE PhiloxWords philox(PhiloxKey key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * c0;
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * c2;
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key.low;
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key.high;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    c0 = next0;
    c2 = next2;
    key.low += kPhiloxWeyl0;
    key.high += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// Words of the generator call that serves score (i, j): they depend only on i / 16, i % 8, j / 64 and j % 8.
FLASHATTN_HOST_DEVICE PhiloxWords dropout_words(PhiloxKey key, int64_t batch, int64_t head, int64_t i, int64_t j) {
  return philox(key, static_cast<uint32_t>(batch), static_cast<uint32_t>(j / 64),
                static_cast<uint32_t>(head * 64 + (i % 8) * 8 + j % 8), static_cast<uint32_t>(i / 16));
}

FLASHATTN_HOST_DEVICE uint32_t dropout_byte(const PhiloxWords& words, int64_t i, int64_t j) {
  const uint32_t shift = 8u * static_cast<uint32_t>((i / 8) % 2 + 2 * ((j / 8) % 2));
  return (words.word[(j / 16) % 4] >> shift) & 0xFFu;
}

// A score is kept when its byte is below the threshold: the realised keep probability is threshold / 256.
#if !defined(FLASHATTN_NO_DOUBLE)
FLASHATTN_HOST_DEVICE int32_t dropout_threshold(double dropout_p) {
  const int32_t threshold = static_cast<int32_t>(256.0 * (1.0 - dropout_p) + 0.5);
  return threshold < 1 ? 1 : (threshold > 256 ? 256 : threshold);
}

FLASHATTN_HOST_DEVICE double keep_probability(int32_t threshold) { return threshold / 256.0; }
#endif

FLASHATTN_HOST_DEVICE bool dropout_keep(PhiloxKey key, int32_t threshold, int64_t batch, int64_t head, int64_t i,
                                        int64_t j) {
  return static_cast<int32_t>(dropout_byte(dropout_words(key, batch, head, i, j), i, j)) < threshold;
}

}  // namespace flashattn_ext
