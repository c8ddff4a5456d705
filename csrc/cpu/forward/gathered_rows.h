// The keys and values of one tile: in place, or in an invariant call gathered from the pages of a KV cache.
#pragma once

#include "cpu/score/head_mask.h"
#include "cpu/vectors/convert.h"
#include "cpu/vectors/views.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In>
struct TileRows {
  const In *k, *v;
  int64_t k_stride, v_stride;  // elements from one key to the next
};

template <class In>
inline TileRows<In> rows_of_run(const AttnParams& p, const KeyRun& run, int64_t key_head) {
  return {row_of<const In>(p.k, run.entry, key_head, run.row), row_of<const In>(p.v, run.entry, key_head, run.row),
          p.k.row_stride, p.v.row_stride};
}

// Memory for the rows of a tile that lies in several pages.
template <class In>
class GatheredRows {
 public:
  // For tiles of at most `rows` rows. Takes no memory in calls that are not invariant.
  GatheredRows(const AttnParams& p, int64_t rows, ScratchCarver* carve)
      : k_(carve->take<In>(p.invariant ? rows * stride(p.head_dim) : 0)),
        v_(carve->take<In>(p.invariant ? rows * stride(p.head_dim_v) : 0)) {}

  TileRows<In> gather(const AttnParams& p, const KeyLocator& keys, IndexRange tile, int64_t key_head) const {
    const TileRows<In> to{k_, v_, stride(p.head_dim), stride(p.head_dim_v)};
    KeyRun run;
    for (int64_t j = tile.begin; j < tile.end; j += run.count) {
      run = keys.run(j, tile.end - j);
      const TileRows<In> from = rows_of_run<In>(p, run, key_head);
      copy(k_ + (j - tile.begin) * to.k_stride, to.k_stride, from.k, from.k_stride, run.count, p.head_dim);
      copy(v_ + (j - tile.begin) * to.v_stride, to.v_stride, from.v, from.v_stride, run.count, p.head_dim_v);
    }
    return to;
  }

 private:
  // Rows begin at multiples of 4 elements: products read pairs of 16-bit elements in place (pack.h), aligned to 4
  // bytes.
  static int64_t stride(int64_t columns) { return round_up(columns, 4); }
  static void copy(In* to, int64_t to_stride, const In* from, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, from + r * stride, columns * sizeof(In));
  }

  In *k_, *v_;
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
