// Policies of the Hopper backward (backward.cuh, backward_wide.cuh) for dropout. All members are static. kept: the
// dropout mask of a step in shared memory (PackedScores::Kept), which a warpgroup draws together.
//   kDrops                   whether calls have dropout
//   key(p)                   of the generator
//   draw<Packing>(kept, ...)  for the warpgroup's keys from `key` on and the queries from row0 on
//   Drawn<Packing>, draw_part<Packing>(drawn, ...), publish<Packing>(kept, which, drawn)
//                            the same in two steps: a warp's part of the mask in registers, and from there to `kept`
//   drop<Packing>(...)        marks the weights that dropout does not keep. warp: of the warpgroup's four
//   kept<Packing>(weights, &space)
//                            the weights that dropout leaves, in `space` if they are others
#pragma once

#include "cuda/score/scores.cuh"

namespace flashattn_ext::sm90 {

struct NoBackwardDropout {
  static constexpr bool kDrops = false;

  static __device__ __forceinline__ PhiloxKey key(const AttnParams&) { return {}; }
  template <class Packing>
  using Drawn = Nothing;
  template <class Packing, class Masks>
  static __device__ __forceinline__ void draw(Masks&, int, const PhiloxKey&, const AttnParams&, int, int, int, int) {}
  template <class Packing>
  static __device__ __forceinline__ void draw_part(Nothing&, const PhiloxKey&, const AttnParams&, int, int, int, int) {}
  template <class Packing, class Masks>
  static __device__ __forceinline__ void publish(Masks&, int, const Nothing&) {}
  template <class Packing, class Masks>
  static __device__ __forceinline__ void drop(typename Packing::Packed&, Masks&, int, int) {}
  template <class Packing>
  static __device__ __forceinline__ auto& kept(typename Packing::Packed& weights, typename Packing::Packed*) {
    return weights;
  }
};

struct CounterBackwardDropout {
  static constexpr bool kDrops = true;

  static __device__ __forceinline__ PhiloxKey key(const AttnParams& p) { return Dropout(p, 0).key; }
  template <class Packing>
  using Drawn = typename Packing::Drawn;
  template <class Packing>
  static __device__ __forceinline__ void draw_part(Drawn<Packing>& drawn, const PhiloxKey& philox, const AttnParams& p,
                                                   int b, int h, int key, int row0) {
    Packing::draw(drawn, Dropout(philox, p, b), p.origin, h, key, row0);
  }
  template <class Packing, class Masks>
  static __device__ __forceinline__ void publish(Masks& kept, int which, const Drawn<Packing>& drawn) {
    Packing::publish(kept[which], drawn);
  }
  template <class Packing, class Masks>
  static __device__ __forceinline__ void draw(Masks& kept, int which, const PhiloxKey& philox, const AttnParams& p,
                                              int b, int h, int key, int row0) {
    Drawn<Packing> drawn;
    draw_part<Packing>(drawn, philox, p, b, h, key, row0);
    publish<Packing>(kept, which, drawn);
  }
  template <class Packing, class Masks>
  static __device__ __forceinline__ void drop(typename Packing::Packed& weights, Masks& kept, int which, int warp) {
    Packing::drop(weights, kept[which], warp);
  }
  template <class Packing>
  static __device__ __forceinline__ auto& kept(typename Packing::Packed& weights, typename Packing::Packed* space) {
    Packing::keep(*space, weights);
    return *space;
  }
};

}  // namespace flashattn_ext::sm90
