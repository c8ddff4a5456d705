// Policies of the Hopper forward (forward.cuh) for scores: how products become the logits of the softmax, and what is
// summed up for the gradients of biases. A policy is a member of the consumer's object, and may hold registers there;
// all lanes of a warp call its functions, and its branches are warp-uniform. T: the element type; kKeys: of a step.
//   Rule                      the kernel's argument
//   Maps                      tensor maps of the call
//   kTileStages               of bias tiles in shared memory; 0: the producer loads none
//   kBatchesTogether          as in each_forward_work
//   start_tile()              before the tiles of keys of a tile of queries
//   begin(kernel, work, n)    while the product of key tile n runs; its result goes to make_logits
//   make_logits(...)          products become stored scores; returns the rule for OnlineSoftmax::weigh
//   skip(kernel)              the warpgroup skips a key tile
//   add_centres(...)          after the scores have become weights. sums: of this lane's weights of each row
//   write_centres(...)        with the output of row r
#pragma once

#include <type_traits>

#include "../common/bias_centres.cuh"
#include "../common/general_scores.cuh"
#include "../common/ring.cuh"
#include "../common/scores.cuh"
#include "forward_bias.cuh"

namespace flashattn_ext::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v;
};
struct BiasedForwardMaps : ForwardMaps {
  CUtensorMap bias;
};

// What most policies do not need.
template <class T, int kKeys>
struct ScoresAlone {
  using Maps = ForwardMaps;
  static constexpr int kTileStages = 0;
  static constexpr bool kBatchesTogether = false;

  static void set_bias_map(const AttnParams&, Maps*, int) {}
  __device__ __forceinline__ void start_tile() {}
  template <class Kernel, class Work>
  __device__ __forceinline__ Nothing begin(const Kernel&, const Work&, int) {
    return {};
  }
  template <class Kernel>
  __device__ __forceinline__ void skip(Kernel&) {}
  template <class Kernel, class Work>
  __device__ __forceinline__ void add_centres(const Kernel&, const Work&, int, const float (&)[2]) {}
  __device__ __forceinline__ void write_centres(const AttnParams&, int, int, int64_t, int, float, bool) const {}
};

// No option of a score.
template <class T, int kKeys>
struct PlainScores : ScoresAlone<T, kKeys> {
  using Rule = PlainScore<float, true>;

  template <class Kernel, class Work>
  __device__ __forceinline__ const Rule& make_logits(Kernel& kernel, const Work&, int, Nothing) {
    store_scores(kernel.score_tile(), kernel.score);
    return stored_rule(kernel.score);
  }
};

// The centres of rows (bias_centres.cuh). Bias: DistanceBias or TileBias.
template <class T, int kKeys, class Bias>
struct CentredScores : ScoresAlone<T, kKeys> {
  CentreSums centres;

  template <class Kernel, class Work>
  static __device__ __forceinline__ Bias bias(const Kernel& kernel, const Work& work, int n) {
    return Bias(kernel.p, work.b, work.h, work.mask(kernel.p), work.row0 + kernel.warp_row, n * kKeys);
  }
  __device__ __forceinline__ void start_tile() { centres.start(); }
  template <class Kernel, class Work>
  __device__ __forceinline__ void add_centres(const Kernel& kernel, const Work& work, int n, const float (&sums)[2]) {
    if (kernel.p.centres.data) centres.add(bias(kernel, work, n), 0, kernel.scores, sums, kernel.shrink);
  }
  __device__ __forceinline__ void write_centres(const AttnParams& p, int b, int h, int64_t at, int r, float sum,
                                                bool exists) const {
    if (p.centres.data) centres.write(row_pointer<float>(p.centres, b, h, at), r, sum, exists);
  }
};

// Softcap, ALiBi or a relative bias: there are no loads for single scores.
template <class T, int kKeys>
struct DistanceScores : CentredScores<T, kKeys, DistanceBias<false, 1, kKeys / 8>> {
  using Rule = GeneralScore;
  using Bias = DistanceBias<false, 1, kKeys / 8>;

  template <class Kernel, class Work>
  __device__ __forceinline__ Bias begin(const Kernel& kernel, const Work& work, int n) {
    return this->bias(kernel, work, n);
  }
  template <class Kernel, class Work>
  __device__ __forceinline__ DistanceLogit make_logits(Kernel& kernel, const Work&, int, const Bias& bias) {
    DistanceLogit logit;
    kernel.score.template store<T>(kernel.score_tile());
    logit.factor = bias.add(kernel.score_tile(), kernel.score.factor, logit.row);
    return logit;
  }
};

// A 16-bit bias alone, whose tiles TMA brings (forward_bias.cuh).
template <class T, int kKeys>
struct BiasTileScores : ScoresAlone<T, kKeys> {
  using Rule = GeneralScore;
  using Maps = BiasedForwardMaps;
  static constexpr int kTileStages = kBiasStages;
  static constexpr bool kBatchesTogether = true;  // they may read the same bias

  RingPosition<kBiasStages> at;

  static void set_bias_map(const AttnParams& p, Maps* maps, int queries) { maps->bias = bias_map(p, p.bias, queries); }
  template <class Kernel, class Work>
  __device__ __forceinline__ ScaledLogit make_logits(Kernel& kernel, const Work&, int, Nothing) {
    ptx::barrier_wait(&kernel.shared.bias_full[at.stage], at.parity);
    add_bias_tile(kernel.scores, kernel.shared.bias[at.stage], kernel.warp_row + kernel.g(),
                  kernel.score.softmax_scale);
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

// Every option, found out at run time. Biases of single scores are loaded ahead of the wait for the product; the rest
// is recomputed rather than kept in registers.
template <class T, int kKeys>
struct GeneralScores : CentredScores<T, kKeys, TileBias<T, false, 1, kKeys / 8>> {
  using Rule = GeneralScore;

  typename TileBias<T, false, 1, kKeys / 8>::Ahead ahead;

  template <class Kernel, class Work>
  __device__ __forceinline__ Nothing begin(const Kernel& kernel, const Work& work, int n) {
    this->bias(kernel, work, n).load_ahead(ahead);
    return {};
  }
  template <class Kernel, class Work>
  __device__ __forceinline__ StoredLogit make_logits(Kernel& kernel, const Work& work, int n, Nothing) {
    kernel.score.template make_logits<T>(kernel.score_tile());
    this->bias(kernel, work, n).add(kernel.score_tile(), ahead);
    return {};
  }
};

// The producer's side: loads the bias tile of a step, if there are tiles.
template <int kStages>
struct BiasTileLoader {
  RingPosition<kStages> at;

  template <class Shared, class Maps, class Work>
  __device__ __forceinline__ void load(Shared& shared, const Maps& maps, const Work& work, int key) {
    ptx::barrier_wait(&shared.bias_empty[at.stage], at.parity ^ 1);
    load_bias_tile(shared.bias[at.stage], shared.bias_full[at.stage], maps.bias, work.row0, key, work.h, work.b);
    at.advance();
  }
};
template <>
struct BiasTileLoader<0> {
  template <class Shared, class Maps, class Work>
  __device__ __forceinline__ void load(Shared&, const Maps&, const Work&, int) {}
};

}  // namespace flashattn_ext::sm90
