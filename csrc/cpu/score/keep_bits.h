// The dropout mask of a tile, as bits.
#pragma once

#include "cpu/vectors/tiles.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The key of the call's dropout mask; without dropout one that nothing reads.
inline PhiloxKey philox_key_of(const AttnParams& p) { return p.has_dropout() ? philox_key(p) : PhiloxKey{0, 0}; }

// Keep bits of a tile: bits[key * groups + group], bit l for query 16 * group + l. See dropout.h for the mapping; eight
// generators (one for each row modulo 8) run side by side so that the compiler can vectorise them.
FLASHATTN_SHARED inline void fill_keep_bits(uint16_t* bits, int64_t groups, PhiloxKey philox_key, const AttnParams& p,
                                            int64_t b, int64_t h, int64_t first_row, int64_t rows, int64_t first_key,
                                            int64_t keys) {
  const int32_t threshold = p.dropout_threshold;
  const int64_t batch = b + p.origin.batch, head = h + p.origin.head, row0 = first_row + p.origin.row,
                key0 = first_key + p.origin.key;
  if (row0 % kWordLanes || key0 % 64) {  // only for an unaligned origin
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t i = 0; i < groups * kWordLanes; ++i) {
        uint16_t& word = bits[j * groups + i / kWordLanes];
        if (i % kWordLanes == 0) word = 0;
        const bool keeps = i < rows && dropout_keep(philox_key, threshold, batch, head, row0 + i, key0 + j);
        word |= static_cast<uint16_t>(keeps << i % kWordLanes);
      }
    }
    return;
  }
  for (int64_t group = 0; group < ceil_div(rows, kWordLanes); ++group) {
    for (int64_t chunk = 0; chunk < keys; chunk += 64) {
      for (int64_t column = 0; column < 8; ++column) {
        PhiloxWords words[8];
        for (int64_t r = 0; r < 8; ++r) {
          words[r] = dropout_words(philox_key, batch, head, row0 + group * kWordLanes + r, key0 + chunk + column);
        }
        for (int64_t j = column; j < 64 && chunk + j < keys; j += 8) {
          uint32_t word = 0;
          for (int64_t r = 0; r < 8; ++r) {
            const uint32_t low = dropout_byte(words[r], 0, j), high = dropout_byte(words[r], 8, j);
            word |= static_cast<uint32_t>(static_cast<int32_t>(low) < threshold) << r;
            word |= static_cast<uint32_t>(static_cast<int32_t>(high) < threshold) << (r + 8);
          }
          bits[(chunk + j) * groups + group] = static_cast<uint16_t>(word);
        }
      }
    }
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
