// A BlockMask: any set of visible (row, key) pairs, as lists of blocks of 128 rows x 128 keys. This is the one
// description of its two tensors; flashattn_ext/block_lists.py makes them, and every backend reads them.
//
// With R blocks of rows and C blocks of keys, and N at least the number of blocks of any one head in which some pair is
// visible, the lists [B or 1, Hm, L] hold for each batch entry and head L int32 words:
//
//   word 0        N entries by rows: those of block row 0, then those of block row 1, and so on
//   word 2 N      N entries by keys: those of block key 0, and so on
//   word 4 N      R + 1 starts: the entries of block row r are [starts[r], starts[r + 1]) of the first list
//   then          C + 1 starts, of the second list in the same way
//   then          words without meaning, so that L and the first word of every head are multiples of 4
//
// An entry is two words: the block of keys (in the second list of rows), ascending within a row (key), and `bits`,
// which is kWholeBlock where every pair is visible, else the number of a block of `bits` [P, 128, 4]. Bit key % 32 of
// word key % 128 / 32 of row % 128 says whether the row sees the key. Several entries may have the same bits. Pairs
// past the last row or key are not described: whole blocks have them, and their bits have any value. Entries past the
// last start have no meaning.
//
// Both lists describe the same blocks. On the CPU block_mask_check.cpp checks that, and every number; on a device it
// cannot. Kernels there access no memory outside of their tensors whatever the lists hold, but a deterministic backward
// may wait forever for a block that only one of the lists has. A number of bits of P or more stands for more partial
// blocks than `max_partial` allowed.
#pragma once

#include "params.h"
#include "portable.h"

namespace flashattn_ext {

constexpr int64_t kMaskBlock = 128;                   // rows and keys of a block
constexpr int64_t kMaskBlockWords = kMaskBlock / 32;  // of the bits of one row
constexpr int32_t kWholeBlock = -1;

struct MaskBlock {
  int32_t block;
  int32_t bits;

  FLASHATTN_HOST_DEVICE bool is_whole() const { return bits == kWholeBlock; }
};

FLASHATTN_HOST_DEVICE int64_t mask_blocks(int64_t length) { return (length + kMaskBlock - 1) / kMaskBlock; }

// The words of the starts of one head, with those that align the next.
FLASHATTN_HOST_DEVICE int64_t mask_start_words(int64_t seqlen_q, int64_t seqlen_k) {
  return (mask_blocks(seqlen_q) + 1 + mask_blocks(seqlen_k) + 1 + 3) / 4 * 4;
}

// Adjacent entries of a list, in ascending order of their blocks.
struct MaskBlockRun {
  const MaskBlock* begin;
  const MaskBlock* end;

  // The first entry whose block is at least `block`; `end` if there is none.
  FLASHATTN_HOST_DEVICE const MaskBlock* first_from(int64_t block) const {
    const MaskBlock* first = begin;
    for (int64_t left = end - begin; left > 0;) {
      const int64_t half = left / 2;
      const bool is_below = first[half].block < block;
      first = is_below ? first + half + 1 : first;
      left = is_below ? left - half - 1 : half;
    }
    return first;
  }
};

// The lists of one query head of a batch entry.
struct MaskBlockLists {
  const MaskBlock *by_rows = nullptr, *by_keys = nullptr;
  const int32_t *row_starts = nullptr, *key_starts = nullptr;
  const uint32_t* bits = nullptr;

  FLASHATTN_HOST_DEVICE MaskBlockLists() {}  // inline, which a default one is not: one for each instruction set
  FLASHATTN_HOST_DEVICE MaskBlockLists(const AttnParams& p, int64_t b, int64_t h) {
    const BlockMaskView& v = p.blocks;
    const int64_t mask_head =
        static_cast<uint32_t>(h) / (static_cast<uint32_t>(p.heads_q) / static_cast<uint32_t>(v.heads));
    const int32_t* const words = v.lists + b * v.batch_stride + mask_head * v.head_stride;
    bits = v.bits;
    by_rows = reinterpret_cast<const MaskBlock*>(words);
    by_keys = by_rows + v.entries;
    row_starts = words + 4 * v.entries;
    key_starts = row_starts + mask_blocks(p.seqlen_q) + 1;
  }

  // The blocks of keys that a block of rows sees, and the blocks of rows that see a block of keys.
  FLASHATTN_HOST_DEVICE MaskBlockRun of_rows(int64_t block) const {
    return {by_rows + row_starts[block], by_rows + row_starts[block + 1]};
  }
  FLASHATTN_HOST_DEVICE MaskBlockRun of_keys(int64_t block) const {
    return {by_keys + key_starts[block], by_keys + key_starts[block + 1]};
  }
  // The bits of a partial block, [128][kMaskBlockWords].
  FLASHATTN_HOST_DEVICE const uint32_t* bits_of(MaskBlock block) const {
    return bits + static_cast<int64_t>(block.bits) * kMaskBlock * kMaskBlockWords;
  }
};

}  // namespace flashattn_ext
