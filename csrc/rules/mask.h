// Which keys a query sees, and which queries a key is seen by: the one definition for every backend. A kernel asks it
//   which tiles to visit          keys_of, rows_of: everything outside of these ranges is masked
//   whether to compare positions  visibility, keys_of_all, rows_of_all: a fully visible tile needs no comparison
//   what a single row sees        keys_of(i, i + 1), or rows_of(j, j + 1) for a single key
//
// Causal is a window without keys on the right. Windows are aligned to the bottom right corner: query i is at the
// position of key i + Sk - Sq. In a call with an Origin that places its rows and keys in a larger call, query i is at
// the position of key i + origin.shift.
//
// First comes where a sequence is among packed rows; at the end, what a BlockMask's lists and bits are.
#pragma once

#include "params.h"

namespace flashattn_ext {

// Row range of one batch entry, for dense and varlen calls. It is clamped, so that invalid cu_seqlens cannot lead
// outside the tensors.
struct Sequence {
  int64_t start;   // index of the first row among the packed rows; 0 in a dense call, which has a batch stride
  int64_t length;  // number of rows
};

FLASHATTN_HOST_DEVICE Sequence clamped_sequence(int64_t start, int64_t end, int64_t total) {
  start = start < 0 ? 0 : (start > total ? total : start);
  end = end < start ? start : (end > total ? total : end);
  return {start, end - start};
}

FLASHATTN_HOST_DEVICE Sequence packed_sequence(const int32_t* cu_seqlens, int64_t total, int64_t b) {
  return clamped_sequence(cu_seqlens[b], cu_seqlens[b + 1], total);
}

FLASHATTN_HOST_DEVICE Sequence query_sequence(const AttnParams& p, int64_t b) {
  return p.cu_seqlens_q ? packed_sequence(p.cu_seqlens_q, p.total_q, b) : Sequence{0, p.seqlen_q};
}

FLASHATTN_HOST_DEVICE Sequence key_sequence(const AttnParams& p, int64_t b) {
  return p.cu_seqlens_k ? packed_sequence(p.cu_seqlens_k, p.total_k, b) : Sequence{0, p.seqlen_k};
}

template <class Index>
struct BasicIndexRange {
  Index begin;
  Index end;  // exclusive; never below begin
};

// How much of a pair of tiles is visible.
enum class Visibility { kNone, kSome, kAll };

// The position of query 0 among the keys, where an origin may give another than the sequences' lengths.
template <class Index, bool kPlaced>
struct FirstPosition {
  Index first_row_position;
};
template <class Index>
struct FirstPosition<Index, false> {};

// The mask of one sequence. Index: int64_t, or int32_t to save registers where sequences are shorter than 2^30.
// kPlaced: whether an origin may place the rows; kernels without a spare register for it run only calls without an
// origin.
template <class Index, bool kPlaced = true>
struct BasicMask : FirstPosition<Index, kPlaced> {
  using Range = BasicIndexRange<Index>;
  static constexpr Index kUnbounded = -1;

  Index seqlen_q;
  Index seqlen_k;
  Index window_left;
  Index window_right;

  FLASHATTN_HOST_DEVICE BasicMask(const AttnParams& p, int64_t seqlen_q, int64_t seqlen_k)
      : seqlen_q(static_cast<Index>(seqlen_q)),
        seqlen_k(static_cast<Index>(seqlen_k)),
        window_left(bounded(p.window_left)),
        window_right(bounded(p.window_right)) {
    if constexpr (kPlaced) {
      this->first_row_position =
          static_cast<Index>(p.origin.shift) +
          (static_cast<Index>(p.origin.length_mask) & (static_cast<Index>(seqlen_k) - static_cast<Index>(seqlen_q)));
    }
  }

  // A window side longer than every sequence counts as unbounded, so that it cannot overflow Index.
  FLASHATTN_HOST_DEVICE static Index bounded(int64_t window) {
    constexpr int64_t kLongest = int64_t{1} << (8 * sizeof(Index) - 2);
    return window >= kLongest ? kUnbounded : static_cast<Index>(window);
  }

  // The position of query 0 among the keys. It is negative where there are more queries than keys, and may be after the
  // last key where the origin places rows.
  FLASHATTN_HOST_DEVICE Index first_position() const {
    if constexpr (kPlaced) return this->first_row_position;
    return seqlen_k - seqlen_q;
  }

  FLASHATTN_HOST_DEVICE static Range clamped(Index begin, Index end, Index length) {
    begin = begin < 0 ? 0 : (begin > length ? length : begin);
    end = end > length ? length : end;
    return {begin, end < begin ? begin : end};
  }

  // Keys that at least one query of [row_begin, row_end) sees. For a single row these are exactly the keys that it
  // sees.
  FLASHATTN_HOST_DEVICE Range keys_of(Index row_begin, Index row_end) const {
    const Index shift = first_position();
    const Index begin = window_left == kUnbounded ? 0 : row_begin + shift - window_left;
    const Index end = window_right == kUnbounded ? seqlen_k : row_end + shift + window_right;
    return clamped(begin, end, seqlen_k);
  }

  // Queries that see at least one key of [key_begin, key_end).
  FLASHATTN_HOST_DEVICE Range rows_of(Index key_begin, Index key_end) const {
    const Index shift = first_position();
    const Index begin = window_right == kUnbounded ? 0 : key_begin - shift - window_right;
    const Index end = window_left == kUnbounded ? seqlen_q : key_end - shift + window_left;
    return clamped(begin, end, seqlen_q);
  }

  // Keys that every query of [row_begin, row_end) sees.
  FLASHATTN_HOST_DEVICE Range keys_of_all(Index row_begin, Index row_end) const {
    const Index shift = first_position();
    const Index begin = window_left == kUnbounded ? 0 : row_end - 1 + shift - window_left;
    const Index end = window_right == kUnbounded ? seqlen_k : row_begin + 1 + shift + window_right;
    return clamped(begin, end, seqlen_k);
  }

  // Queries that see every key of [key_begin, key_end).
  FLASHATTN_HOST_DEVICE Range rows_of_all(Index key_begin, Index key_end) const {
    const Index shift = first_position();
    const Index begin = window_right == kUnbounded ? 0 : key_end - 1 - shift - window_right;
    const Index end = window_left == kUnbounded ? seqlen_q : key_begin + 1 - shift + window_left;
    return key_end <= seqlen_k ? clamped(begin, end, seqlen_q) : Range{0, 0};
  }

  // How much of the queries [row_begin, row_end) against the keys [key_begin, key_end) is visible.
  FLASHATTN_HOST_DEVICE Visibility visibility(Index row_begin, Index row_end, Index key_begin, Index key_end) const {
    const Range every = keys_of_all(row_begin, row_end);
    if (every.begin <= key_begin && key_end <= every.end) return Visibility::kAll;
    const Range some = keys_of(row_begin, row_end);
    return some.begin < key_end && key_begin < some.end ? Visibility::kSome : Visibility::kNone;
  }
};

// --- a Mask's intervals --------------------------------------------------------------------------------------------
//
// With a Mask a row sees a key if both the key's interval and BasicMask contain the row. The extremes of the
// intervals of its keys decide whether a tile is fully masked, fully visible or partial.

constexpr int64_t kMaskGranule = 16;  // keys per extreme of the fine level
constexpr int64_t kMaskSuper = 64;    // granules per extreme of the coarse level

// The intervals of several keys in four numbers: only rows in [any_first, any_last) see any of the keys, and rows in
// [all_first, all_last) see all of them. Either may be empty, with the end at or below the begin.
// IntervalView::extremes has this layout.
struct IntervalExtremes {
  int32_t any_first, any_last;
  int32_t all_first, all_last;

  // The neutral element of add().
  FLASHATTN_HOST_DEVICE static IntervalExtremes none() { return {INT32_MAX, 0, 0, INT32_MAX}; }
  FLASHATTN_HOST_DEVICE void add(const IntervalExtremes& other) {
    if (other.any_first < any_first) any_first = other.any_first;
    if (other.any_last > any_last) any_last = other.any_last;
    if (other.all_first > all_first) all_first = other.all_first;
    if (other.all_last < all_last) all_last = other.all_last;
  }
  FLASHATTN_HOST_DEVICE Visibility visibility(int64_t row_begin, int64_t row_end) const {
    if (any_first >= row_end || any_last <= row_begin) return Visibility::kNone;
    return all_first <= row_begin && row_end <= all_last ? Visibility::kAll : Visibility::kSome;
  }
};

// The head of the Mask that query head h reads. 32-bit division is much faster than 64-bit division on GPUs.
FLASHATTN_HOST_DEVICE int64_t mask_head(const AttnParams& p, int64_t h) {
  return static_cast<uint32_t>(h) / (static_cast<uint32_t>(p.heads_q) / static_cast<uint32_t>(p.intervals.heads));
}
// The (first, last) pairs of one sequence for a query head, from the first key on. key_start: index of the first key
// among the packed rows, 0 in a dense call.
FLASHATTN_HOST_DEVICE const int32_t* head_intervals(const AttnParams& p, int64_t b, int64_t h, int64_t key_start) {
  const IntervalView& v = p.intervals;
  return v.data + 2 * (b * v.batch_stride + mask_head(p, h) * v.head_stride + key_start);
}
// The extremes of a query head, from granule 0 of its batch entry or of the packed keys on. Granules at the ends of a
// packed sequence may include keys of adjacent sequences, which is conservative: a tile may then be classified as
// partial although it is fully masked or fully visible.
FLASHATTN_HOST_DEVICE const IntervalExtremes* head_extremes(const AttnParams& p, int64_t b, int64_t h) {
  const IntervalView& v = p.intervals;
  return reinterpret_cast<const IntervalExtremes*>(v.extremes) + b * v.extremes_batch_stride +
         mask_head(p, h) * v.extremes_head_stride;
}

using Mask = BasicMask<int64_t>;
using IndexRange = BasicIndexRange<int64_t>;

// --- BlockMask -----------------------------------------------------------------------------------------------------
//
// Any set of visible (row, key) pairs, as lists of blocks of 128 rows x 128 keys. This is the one description of its
// two tensors; flashattn_ext/block_lists.py makes them, and every backend reads them.
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

constexpr int64_t kMaskBlock = 128;                   // rows and keys of a block
constexpr int64_t kMaskBlockWords = kMaskBlock / 32;  // words of the bits of one row
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
