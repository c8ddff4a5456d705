// Policies of the sm_80 kernels for dropout. In the forward (forward.cuh) the generator of a head is in slot 1 of
// shared memory:
//   kDrops                   whether calls may have dropout
//   start_head(p, b, at)     one thread, before a head's first tile; at: that slot
//   drop<Core>(p, at, h, weights, row, key)
//                            zeroes the weights that dropout does not keep, of a row tile; h: the head, in shared
//                            memory; row, key: the first ones
//   keep_scale(p)            of the weights that are kept
// In the backward (backward.cuh) an object of Columns has a warp's transposed scores of kKeyTiles key tiles, the
// first of which begins at `key`, and of the queries from `row` on:
//   draw(n)                  for query tiles n and n + 1
//   keeps(i, n, e)           element e of one of them and of key tile i
#pragma once

#include "cuda/score/dropout.cuh"

namespace flashattn_ext::sm80 {

struct NoDropout {
  static constexpr bool kDrops = false;

  static __device__ void start_head(const AttnParams&, int, Dropout*) {}
  template <class Core, class Weights>
  static __device__ void drop(const AttnParams&, const Dropout*, const int&, Weights&, int, int) {}
  static __device__ float keep_scale(const AttnParams&) { return 1.f; }

  template <int kKeyTiles>
  struct Columns {
    __device__ Columns(const AttnParams&, int, int, int, int) {}
    __device__ __forceinline__ void draw(int) {}
    __device__ __forceinline__ bool keeps(int, int, int) const { return true; }
  };
};

// kIsOption: calls may have no dropout.
template <bool kIsOption>
struct DrawnDropout {
  static constexpr bool kDrops = true;
  static __device__ bool drops(const AttnParams& p) { return !kIsOption || p.has_dropout(); }

  static __device__ void start_head(const AttnParams& p, int b, Dropout* at) {
    if (drops(p)) *at = Dropout(p, b);
  }
  template <class Core, class Weights>
  static __device__ void drop(const AttnParams& p, const Dropout* at, const int& h, Weights& weights, int row,
                              int key) {
    if (drops(p)) at->template drop<Core>(weights, p.origin, h, row, key);
  }
  static __device__ float keep_scale(const AttnParams& p) {
    return 1 / static_cast<float>(keep_probability(p.dropout_threshold));
  }

  template <int kKeyTiles>
  struct Columns {
    const AttnParams& p;
    const Dropout dropout;
    const int h, key, row;
    Dropout::Column<kKeyTiles> kept;

    __device__ Columns(const AttnParams& p, int b, int h, int key, int row)
        : p(p), dropout(drops(p) ? Dropout(p, b) : Dropout()), h(h), key(key), row(row) {}
    __device__ __forceinline__ void draw(int n) {
      if (kIsOption) kept.keep_all();
      if (drops(p)) kept = dropout.transposed<kKeyTiles>(p.origin, h, key, row + n * 8);
    }
    __device__ __forceinline__ bool keeps(int i, int n, int e) const { return kept.keeps(i, n, e); }
  };
};
using CounterDropout = DrawnDropout<false>;
using OptionalDropout = DrawnDropout<true>;

}  // namespace flashattn_ext::sm80
