// Where the keys of one sequence are, in calls with and without a cache: a loader asks for runs of keys whose rows
// follow one another at the row stride of k and v, so that no kernel knows pages. Whatever block tables and lengths
// hold, a run is inside the tensors.
#pragma once

#include "mask.h"
#include "params.h"
#include "portable.h"
#include "seqlen.h"

namespace flashattn_ext {

// Keys that follow one another: in k and v [entries, rows, Hk, D] those of `count` rows of one entry.
struct KeyRun {
  int64_t entry;  // times batch_stride
  int64_t row;    // times row_stride
  int64_t count;
};

class KeyLocator {
 public:
  // Sequence b of a call without a cache.
  FLASHATTN_HOST_DEVICE KeyLocator(const AttnParams& p, int64_t b) {
    const Sequence keys = key_sequence(p, b);
    length = keys.length;
    first_row_ = keys.start;
    first_interval = keys.start;
    entry_ = b;  // times a batch stride of 0 in packed calls
  }

  // Sequence b of a call with a cache, with the keys that the call appends.
  FLASHATTN_HOST_DEVICE KeyLocator(const DecodeParams& p, int64_t b) {
    const KeyCache& cache = p.cache;
    const int64_t capacity = cache.entries > 0 ? cache.capacity() : 0;
    first_new_row = clamped(cached_rows(p, b), capacity);
    const int64_t end = clamped(first_new_row + cache.new_keys, capacity);
    first_row_ = cache.leftpad ? clamped(cache.leftpad[b], end) : 0;
    length = end - first_row_;
    new_keys = end - first_new_row;
    first_interval = p.mask_keys - length;
    last_entry_ = cache.entries - 1;
    if (cache.block_table) {
      pages_ = cache.block_table + b * cache.block_table_stride;
      page_size_ = static_cast<uint32_t>(cache.page_size);
    } else {
      entry_ = clamped(cache.batch_idx ? cache.batch_idx[b] : b, last_entry_);
    }
  }

  // The run that begins with a key of [0, length), with at most `limit` keys.
  FLASHATTN_HOST_DEVICE KeyRun run(int64_t key, int64_t limit) const { return run_of_row(first_row_ + key, limit); }

  // The same by the row in the room of the sequence, which counts from the first one of leftpad; below first_new_row +
  // new_keys.
  FLASHATTN_HOST_DEVICE KeyRun run_of_row(int64_t row, int64_t limit) const {
    if (!pages_) return {entry_, row, limit};
    // In 32 bits, which GPUs divide much faster than 64.
    const uint32_t page = static_cast<uint32_t>(row) / page_size_;
    const int64_t row_of_page = row - static_cast<int64_t>(page) * page_size_, left = page_size_ - row_of_page;
    return {clamped(pages_[page], last_entry_), row_of_page, left < limit ? left : limit};
  }

  int64_t length;             // keys of the sequence, new ones included
  int64_t first_new_row = 0;  // the row that the first new key is written to; also its rotary position
  int64_t new_keys = 0;       // as many of the new keys as the cache has room for
  // With a Mask, the interval of key j is number first_interval + j of its head; where that is negative, the Mask has
  // none for the key, and every row may see it.
  int64_t first_interval = 0;

 private:
  // `value` within [0, largest].
  FLASHATTN_HOST_DEVICE static int64_t clamped(int64_t value, int64_t largest) {
    return value < 0 ? 0 : value > largest ? largest : value;
  }
  FLASHATTN_HOST_DEVICE static int64_t cached_rows(const DecodeParams& p, int64_t b) {
    if (p.cu_seqlens_k) return static_cast<int64_t>(p.cu_seqlens_k[b + 1]) - p.cu_seqlens_k[b];
    return p.cache.seqlens ? p.cache.seqlens[b] : p.cache.seqlen;
  }

  int64_t first_row_;
  int64_t entry_ = 0;
  int64_t last_entry_ = 0;
  const int32_t* pages_ = nullptr;  // of this sequence
  uint32_t page_size_ = 0;
};

// The keys of part n of `splits` parts of the visible keys of some rows. Parts are whole multiples of `granule` keys
// but for the first and the last, and depend on nothing but the visible keys: the batch around a sequence cannot change
// the bits of its result. Parts at the end may be empty.
FLASHATTN_HOST_DEVICE IndexRange split_keys(IndexRange visible, int64_t granule, int64_t splits, int64_t n) {
  const int64_t start = visible.begin / granule * granule;
  const int64_t granules = (visible.end - start + granule - 1) / granule;
  const int64_t keys = (granules + splits - 1) / splits * granule;
  IndexRange part{start + n * keys, start + (n + 1) * keys};
  part.begin = part.begin < visible.begin ? visible.begin : part.begin;
  part.end = part.end < visible.end ? part.end : visible.end;
  if (part.begin > part.end) part.begin = part.end;
  return part;
}

}  // namespace flashattn_ext
