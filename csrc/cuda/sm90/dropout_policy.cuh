// Policies of the Hopper forward (forward.cuh, forward_large.cuh) for dropout. A policy is a member of the consumer's
// object, and may hold registers there; all lanes of a warp call its functions, and its branches are warp-uniform:
//   Generator                 the generator of a thread; start_tile(p, b) before the key tiles of a query tile
//   draw_under_products(...)  while products are in flight: the compiler interleaves the generator with their issue,
//                             which costs less than drawing afterwards
//   draw_after_weights(...)   when the scores have become weights
//   apply(weights)            zeroes what the last draw does not keep
#pragma once

#include "../common/dropout.cuh"
#include "../common/warp.cuh"

namespace flashattn_ext::sm90 {

// Nothing is drawn or dropped. kSteps: of 16 keys.
template <int kSteps>
struct NoDropout {
  struct Generator {
    __device__ __forceinline__ explicit Generator(const AttnParams&) {}
    __device__ __forceinline__ void start_tile(const AttnParams&, int) {}
  };
  __device__ __forceinline__ void draw_under_products(const AttnParams&, const Generator&, int, int, int) {}
  __device__ __forceinline__ void draw_after_weights(const AttnParams&, const Generator&, int, int, int) {}
  __device__ __forceinline__ void apply(const AttnParams&, uint32_t (&)[kSteps][4]) const {}
};

// Draws two registers of signs for each step (Dropout::packed_signs). kIsOption: calls may have no dropout, and the
// signs are drawn late, when the registers of a bias are free.
template <int kSteps, bool kIsOption>
struct DrawnDropout {
  static __device__ __forceinline__ bool drops(const AttnParams& p) { return !kIsOption || p.has_dropout(); }

  struct Generator {
    Dropout dropout;

    __device__ __forceinline__ explicit Generator(const AttnParams& p) : dropout(drops(p) ? Dropout(p, 0) : Dropout()) {
      dropout.key = {uniform(dropout.key.low), uniform(dropout.key.high)};
    }
    __device__ __forceinline__ void start_tile(const AttnParams& p, int b) { dropout.batch = Dropout::batch_of(p, b); }
  };

  uint32_t signs[kSteps][2];

  __device__ __forceinline__ void draw_under_products(const AttnParams& p, const Generator& generator, int h, int row,
                                                      int key) {
    if (!kIsOption) draw(p, generator, h, row, key);
  }
  __device__ __forceinline__ void draw_after_weights(const AttnParams& p, const Generator& generator, int h, int row,
                                                     int key) {
    if (kIsOption) draw(p, generator, h, row, key);
  }
  __device__ __forceinline__ void apply(const AttnParams& p, uint32_t (&weights)[kSteps][4]) const {
    if (drops(p)) Dropout::drop_packed(weights, signs);
  }

 private:
  // For the 16 queries from `row` on and the keys from `key` on.
  __device__ __forceinline__ void draw(const AttnParams& p, const Generator& generator, int h, int row, int key) {
    if (!drops(p)) return;
    generator.dropout.packed_signs(signs, p.origin, h, row, key);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) asm volatile("" : "+r"(signs[step][0]), "+r"(signs[step][1]));
  }
};
template <int kSteps>
using CounterDropout = DrawnDropout<kSteps, false>;
template <int kSteps>
using OptionalDropout = DrawnDropout<kSteps, true>;

}  // namespace flashattn_ext::sm90
