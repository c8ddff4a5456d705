// Pointers to the rows of keys and values that decoding reads in place, and copies of them where products cannot.
#pragma once

#include "cpu/vectors/convert.h"
#include "cpu/vectors/fp8.h"
#include "cpu/vectors/views.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The rows of at most kMost adjacent keys, for the first KV head of a work item.
template <class In, int64_t kMost>
struct CacheRows {
  // Finds the rows of the keys [begin, end). Products read whole groups of `group` keys: the last row stands for the
  // missing ones.
  void find(const AttnParams& p, const KeyLocator& keys, int64_t head, int64_t begin, int64_t end, int64_t group) {
    key0 = begin;
    count = greater<int64_t>(lesser(kMost, end - begin), 0);
    KeyRun run;
    for (int64_t j = 0; j < count; j += run.count) {
      run = keys.run(key0 + j, count - j);
      const In* const k_row = row_of<const In>(p.k, run.entry, head, run.row);
      const In* const v_row = row_of<const In>(p.v, run.entry, head, run.row);
      for (int64_t n = 0; n < run.count; ++n) {
        k[j + n] = k_row + n * p.k.row_stride;
        v[j + n] = v_row + n * p.v.row_stride;
      }
    }
    for (int64_t j = count; j < round_up(count, group); ++j) {
      k[j] = k[count - 1];
      v[j] = v[count - 1];
    }
  }

  int64_t key0 = 0, count = 0;
  const In* k[kMost];
  const In* v[kMost];
};

// Pointers to kRows rows of one head, in place or, if head_dim is no multiple of the vector width or rows are fp8, to
// copies with zeros after head_dim. Only the first `count` rows are keys. `pointers` is the storage of the result.
template <int64_t kRows, class In>
inline const Widened<In>* const* rows_of_head(const In* const* rows, int64_t offset, int64_t count, int64_t head_dim,
                                              int64_t columns, Widened<In>* staging, const Widened<In>** pointers) {
  if constexpr (!kIsFloat8<In>) {
    for (int64_t j = 0; j < kRows; ++j) pointers[j] = rows[j] + offset;
    if (head_dim == columns) return pointers;
  }
  for (int64_t j = 0; j < kRows; ++j) {
    Widened<In>* const row = staging + j * columns;
    if (j < count) {
      copy_row(row, rows[j] + offset, head_dim);
      if (head_dim < columns)
        std::memset(static_cast<void*>(row + head_dim), 0, (columns - head_dim) * sizeof(Widened<In>));
    }
    pointers[j] = row;
  }
  return pointers;
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
