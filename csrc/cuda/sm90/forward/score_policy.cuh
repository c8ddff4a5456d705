// The score policies of the Hopper forward (forward.cuh): those of cuda/score/score_policy.cuh and two more. T: the
// element type; kKeys: of a step. Besides the functions that the other file lists, a policy here has:
//   Maps                      tensor maps of the call
//   kTileStages               of bias tiles in shared memory; 0: the producer loads none
//   kBatchesTogether          as in each_forward_work
//   skip(kernel)              the warpgroup skips a key tile
#pragma once

#include "cuda/score/score_policy.cuh"
#include "cuda/sm90/forward/forward_bias.cuh"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/ring.cuh"

namespace flashattn_ext::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v;
  CUtensorMap out;  // boxes of the rows of a warp
  bool has_out;     // whether the kernel stores `out` by TMA, and its rows are aligned
};
struct BiasedForwardMaps : ForwardMaps {
  CUtensorMap bias;
};

// A policy without bias tiles.
template <class Policy>
struct WithoutBiasTiles : Policy {
  using Maps = ForwardMaps;
  static constexpr int kTileStages = 0;
  static constexpr bool kBatchesTogether = false;

  static void set_bias_map(const AttnParams&, Maps*, int) {}
  template <class Kernel>
  __device__ __forceinline__ void skip(Kernel&) {}
};

// Products in fp8 (forward_operands.cuh), with the descales of DescaledScores. Weights are rounded to e4m3 later, whose
// largest number is 448: with 256 for the largest weight of a row, weights down to 2^-14 of it keep all bits.
struct Fp8ProductScores : DescaledScores<Float8> {
  static constexpr float kWeightScale = LargerWeights::kScale;

  // A factor of products that is not positive, and options of a score, are applied to each score.
  template <class Kernel, class Step, int kRowTiles, int N>
  __device__ __forceinline__ LargerWeights make_logits(const Kernel& kernel, float (&x)[kRowTiles][N][4], const Step&,
                                                       Nothing) {
    const GeneralScore score = kernel.score.times(of_products);
    if (!score.changes_products() && score.factor >= kSmallest<float>) return {score.factor};
    flashattn_ext::make_logits<Float8>(score, x);
    return {1};
  }
};

// Options of a score, ALiBi or a relative bias: there are no loads for single scores.
template <class T, int kKeys>
struct DistanceScores : CentredScores<1, DistanceBias<false, 1, kKeys / 8>> {
  using Rule = GeneralScore;
  using Bias = DistanceBias<false, 1, kKeys / 8>;

  template <class Kernel, class Step>
  __device__ __forceinline__ Bias begin(const Kernel& kernel, const Step& step) {
    return kernel.template bias<Bias>(step);
  }
  template <class Kernel, class Step>
  __device__ __forceinline__ DistanceLogit make_logits(const Kernel& kernel, float (&x)[1][kKeys / 8][4], const Step&,
                                                       const Bias& bias) {
    DistanceLogit logit;
    store_scores<T>(kernel.score, x);
    logit.factor = bias.add(x, kernel.score.factor, logit.row);
    return logit;
  }
};

// A 16-bit bias alone, whose tiles TMA brings (forward_bias.cuh).
template <class T, int kKeys>
struct BiasTileScores : UncentredScores {
  using Rule = GeneralScore;
  using Maps = BiasedForwardMaps;
  static constexpr int kTileStages = kBiasStages;
  static constexpr bool kBatchesTogether = true;  // they may read the same bias

  RingPosition<kBiasStages> at;

  static void set_bias_map(const AttnParams& p, Maps* maps, int queries) { maps->bias = bias_map(p, p.bias, queries); }
  template <class Kernel, class Step>
  __device__ __forceinline__ ScaledLogit make_logits(Kernel& kernel, float (&x)[1][kKeys / 8][4], const Step&,
                                                     Nothing) {
    ptx::barrier_wait(&kernel.shared.bias_full[at.stage], at.parity);
    add_bias_tile(x[0], kernel.shared.bias[at.stage], kernel.warp_row + g(), kernel.score.softmax_scale);
    release_tile(kernel);
    return {kLog2E<float>};
  }
  template <class Kernel>
  __device__ __forceinline__ void skip(Kernel& kernel) {
    ptx::barrier_wait(&kernel.shared.bias_full[at.stage], at.parity);
    release_tile(kernel);
  }

 private:
  template <class Kernel>
  __device__ __forceinline__ void release_tile(Kernel& kernel) {
    __syncwarp();
    release(kernel.shared.bias_empty[at.stage]);
    at.advance();
  }
};

// The producer's side: initialises the barriers, and loads the bias tile of a step, if there are tiles.
template <int kStages>
struct BiasTileLoader {
  RingPosition<kStages> at;

  template <class Kernel>
  static __device__ __forceinline__ void init(typename Kernel::Shared& shared) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&shared.bias_full[i], 1);
      ptx::barrier_init(&shared.bias_empty[i], Kernel::kWarps);
    }
  }
  template <class Shared, class Maps, class Work>
  __device__ __forceinline__ void load(Shared& shared, const Maps& maps, const Work& work, int key) {
    ptx::barrier_wait(&shared.bias_empty[at.stage], at.parity ^ 1);
    load_bias_tile(shared.bias[at.stage], shared.bias_full[at.stage], maps.bias, work.row0, key, work.h, work.b);
    at.advance();
  }
};
template <>
struct BiasTileLoader<0> {
  template <class Kernel>
  static __device__ __forceinline__ void init(typename Kernel::Shared&) {}
  template <class Shared, class Maps, class Work>
  __device__ __forceinline__ void load(Shared&, const Maps&, const Work&, int) {}
};

}  // namespace flashattn_ext::sm90
