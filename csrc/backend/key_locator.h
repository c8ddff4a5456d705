// Locates the keys of one sequence, with and without a KV cache. A loader gets runs of keys whose rows are row_stride
// apart in k and v, so that kernels need not know pages. Every run is inside the tensors, even for invalid block tables
// and lengths.
#pragma once

#include "params.h"
#include "rules/mask.h"

namespace flashattn_ext {

// A run of adjacent keys: `count` rows of one entry of k and v [entries, rows, Hk, D].
struct KeyRun {
  int64_t entry;  // index along batch_stride
  int64_t row;    // index along row_stride
  int64_t count;
};

class KeyLocator {
 public:
  // Sequence b of a call without a KV cache.
  FLASHATTN_HOST_DEVICE KeyLocator(const AttnParams& p, int64_t b) {
    const Sequence keys = key_sequence(p, b);
    length = keys.length;
    first_row_ = keys.start;
    first_interval = keys.start;
    entry_ = b;  // without effect in varlen calls, whose batch stride is 0
  }

  // Sequence b of a decoding call, including the keys that the call appends.
  FLASHATTN_HOST_DEVICE KeyLocator(const DecodeParams& p, int64_t b) {
    const KeyCache& cache = p.cache;
    if (cache.is_packed) {
      const Sequence keys = key_sequence(p, b);
      first_new_row = length = keys.length;
      packed_start_ = keys.start;
      return;
    }
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

  // The run that begins with `key` in [0, length), at most `limit` keys.
  FLASHATTN_HOST_DEVICE KeyRun run(int64_t key, int64_t limit) const { return run_of_row(first_row_ + key, limit); }

  // The run that begins with cache row `row`: the row within the cached sequence, counted with the leftpad rows.
  // `row` is less than first_new_row + new_keys.
  FLASHATTN_HOST_DEVICE KeyRun run_of_row(int64_t row, int64_t limit) const {
    if (!pages_) return {entry_, packed_start_ + row, limit};
    // 32-bit division is much faster than 64-bit division on GPUs.
    return run_in_page(static_cast<uint32_t>(row) / page_size_, row, limit);
  }

  // run_of_row(row, limit) without a division. reciprocal: reciprocal_of_pages(). row < 2^31, so that the product with
  // it is at most one more than the quotient.
  FLASHATTN_HOST_DEVICE KeyRun run_of_row(int64_t row, int64_t limit, uint32_t reciprocal) const {
    if (!pages_) return {entry_, packed_start_ + row, limit};
    const uint32_t page = static_cast<uint32_t>(static_cast<uint64_t>(row) * reciprocal >> 32);
    return run_in_page(page * page_size_ > static_cast<uint32_t>(row) ? page - 1 : page, row, limit);
  }
  // The smallest integer that is at least 2^32 / page size; 0 without pages.
  FLASHATTN_HOST_DEVICE uint32_t reciprocal_of_pages() const { return pages_ ? 0xFFFFFFFFu / page_size_ + 1 : 0; }

  int64_t length;             // keys of the sequence, including the new ones
  int64_t first_new_row = 0;  // the row that the first new key is written to; also its rotary position
  int64_t new_keys = 0;       // new keys, clamped to the room in the cache
  // With a Mask, the interval of key j is number first_interval + j of its head; if that is negative, the Mask has no
  // interval for the key and hides it from no row.
  int64_t first_interval = 0;

 private:
  // `value` clamped to [0, largest].
  FLASHATTN_HOST_DEVICE static int64_t clamped(int64_t value, int64_t largest) {
    return value < 0 ? 0 : value > largest ? largest : value;
  }
  FLASHATTN_HOST_DEVICE static int64_t cached_rows(const DecodeParams& p, int64_t b) {
    if (p.cu_seqlens_k) return static_cast<int64_t>(p.cu_seqlens_k[b + 1]) - p.cu_seqlens_k[b];
    return p.cache.seqlens ? p.cache.seqlens[b] : p.cache.seqlen;
  }

  FLASHATTN_HOST_DEVICE KeyRun run_in_page(uint32_t page, int64_t row, int64_t limit) const {
    const int64_t row_of_page = row - static_cast<int64_t>(page) * page_size_, left = page_size_ - row_of_page;
    return {clamped(pages_[page], last_entry_), row_of_page, left < limit ? left : limit};
  }

  int64_t first_row_ = 0;
  int64_t packed_start_ = 0;  // cache.is_packed only: first row of the sequence in the packed keys
  int64_t entry_ = 0;
  int64_t last_entry_ = 0;
  const int32_t* pages_ = nullptr;  // block table of this sequence
  uint32_t page_size_ = 0;
};

// The keys of split n of `splits` (split-KV). visible: the keys that are visible to the rows of a tile. Splits begin
// and end at multiples of `granule` keys, except at the ends of `visible`, and depend only on the visible keys, so that
// the result of a sequence does not depend on the rest of its batch. The last splits may be empty.
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
