// Policies of the Hopper forward (forward.cuh, forward_large.cuh) for dropout. A policy is a member of the consumer's
// object, and may hold registers there; all lanes of a warp call its functions, and its branches are warp-uniform:
//   Generator          the generator of a thread; start_tile(p, b) before the key tiles of a query tile
//   draw(...)          which weights to keep, of the 16 queries from `row` on and the keys from `key` on
//   drop(p, weights)   zeroes what the last draw does not keep
//   pack_early(operands, scores), pack(operands, weights, p, scores)
//                      pack scores that have become weights, and drop. A policy may do most of it in pack_early, which
//                      is called when the registers of `weights` are still in use.
#pragma once

#include "cuda/score/dropout.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// Nothing is drawn or dropped. kSteps: of 16 keys.
template <int kSteps>
struct NoDropout {
  using Weights = uint32_t[kSteps][4];

  struct Generator {
    __device__ __forceinline__ explicit Generator(const AttnParams&) {}
    __device__ __forceinline__ void start_tile(const AttnParams&, int) {}
  };
  __device__ __forceinline__ void draw(const AttnParams&, const Generator&, int, int, int) {}
  __device__ __forceinline__ void drop(const AttnParams&, Weights&) const {}
  template <class Operands, class Scores>
  __device__ __forceinline__ void pack_early(const Operands&, const Scores&) {}
  template <class Operands, class Scores>
  __device__ __forceinline__ void pack(const Operands& operands, Weights& weights, const AttnParams&,
                                       const Scores& scores) const {
    operands.pack(weights, scores);
  }
};

// Draws two registers of signs for each step (Dropout::packed_signs). kIsOption: calls may have no dropout.
template <int kSteps, bool kIsOption>
struct DrawnDropout : NoDropout<kSteps> {
  using typename NoDropout<kSteps>::Weights;

  struct Generator {
    Dropout dropout;

    __device__ __forceinline__ explicit Generator(const AttnParams& p) : dropout(drops(p) ? Dropout(p, 0) : Dropout()) {
      dropout.key = {uniform(dropout.key.low), uniform(dropout.key.high)};
    }
    __device__ __forceinline__ void start_tile(const AttnParams& p, int b) { dropout.batch = Dropout::batch_of(p, b); }
  };

  uint32_t signs[kSteps][2];

  __device__ __forceinline__ void draw(const AttnParams& p, const Generator& generator, int h, int row, int key) {
    if (!drops(p)) return;
    generator.dropout.packed_signs(signs, p.origin, h, row, key);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) asm volatile("" : "+r"(signs[step][0]), "+r"(signs[step][1]));
  }
  __device__ __forceinline__ void drop(const AttnParams& p, Weights& weights) const {
    if (drops(p)) Dropout::drop_packed(weights, signs);
  }
  template <class Operands, class Scores>
  __device__ __forceinline__ void pack(const Operands& operands, Weights& weights, const AttnParams& p,
                                       const Scores& scores) const {
    operands.pack(weights, scores);
    drop(p, weights);
  }

 private:
  static __device__ __forceinline__ bool drops(const AttnParams& p) { return !kIsOption || p.has_dropout(); }
};
template <int kSteps>
using OptionalDropout = DrawnDropout<kSteps, true>;

// All but one instruction of packing and dropping is done early. The compiler interleaves it, and the generator, with
// the exponentials, which leave most issue slots of a warp free; drawn under the products, the bits would delay them.
template <int kSteps>
struct CounterDropout : DrawnDropout<kSteps, false> {
  using typename NoDropout<kSteps>::Weights;

  Weights packed, masks;

  template <class Operands, class Scores>
  __device__ __forceinline__ void pack_early(const Operands& operands, const Scores& scores) {
    operands.pack(packed, scores);
    Dropout::masks(masks, this->signs);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(packed[step][i]), "+r"(masks[step][i]));
    }
  }
  template <class Operands, class Scores>
  __device__ __forceinline__ void pack(const Operands&, Weights& weights, const AttnParams&, const Scores&) const {
    unrolled<kSteps, 4>([&](int step, int i) { weights[step][i] = packed[step][i] & masks[step][i]; });
  }
};

}  // namespace flashattn_ext::sm90
