// The arithmetic between the products of the backward, for calls with options of a score, ALiBi or a relative bias: the
// counterpart of PackedScores (cuda/score/scores.cuh). The options of a call are runtime values. Each is a separate
// in-place pass over a lane's scores, behind a warp-uniform branch.
#pragma once

#include "cuda/score/general_score.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/stages/bias_gradient.cuh"

namespace flashattn_ext::sm90 {

template <class T, int kQueries>
struct PackedDistanceScores {
  using Packing = PackedScores<T, kQueries, false>;
  using Core = TensorCore<T>;
  using Scores = typename Packing::Scores;
  using Packed = typename Packing::Packed;
  using Bias = DistanceBias<true, 1, kQueries / 8>;
  struct Centres {
    const float (*rows)[kQueries];  // in shared memory, kCentres times
    __device__ __forceinline__ float2 pair(Centre which, int n) const {
      return *reinterpret_cast<const float2*>(&rows[which][8 * n + 2 * t()]);
    }
  };
  using BiasGradient = TileBiasGradient<Bias, T, 1, kQueries / 8, RelativeGradient::kInAnyOrder, Centres>;

  // Turns products into weights and overwrites `scores`. slopes: with an option of a score, the factors for the
  // gradients of logits. has_marks: whether lse has marks of rows; subtract_words(rule) handles these before the
  // weights are computed. Other arguments as in PackedScores.
  template <class SubtractWords, class MaskOf>
  static __device__ __forceinline__ void weigh(Packed& weights, Packed& slopes, Scores& scores,
                                               const GeneralScore& score, const Bias& bias,
                                               const float (&lse)[kQueries], bool has_marks,
                                               const SubtractWords& subtract_words, bool masked, const MaskOf& mask,
                                               int row0, int key) {
    if (score.changes_products()) {
      // An option of a score alone, the usual case, has one pass: the arithmetic of one score hides the latency of
      // another one's tanh.
      if (!masked && !has_marks && bias.is_absent()) return store_and_weigh(weights, slopes, scores, score, lse);
      store(slopes, scores, score);
    }
    const float scale = bias.add(reinterpret_cast<float (&)[1][kQueries / 8][4]>(scores), score.factor);
    const ScaledLogit rule{scale};
    const auto prepare = [&] {
      subtract_words(rule);
      return mask();
    };
    Packing::weigh(weights, scores, rule, lse, masked || has_marks, prepare, row0, key);
  }

  // Turns dP into dS and sums the gradients of biases. rare, prepare: as in PackedScores; rare also if the bias may
  // hide a score.
  template <class Prepare>
  static __device__ __forceinline__ void differentiate(Scores& dscores, const Packed& weights, const Packed& slopes,
                                                       const GeneralScore& score, BiasGradient& bias_gradient,
                                                       const float (&delta)[kQueries], bool rare,
                                                       const Prepare& prepare) {
    Packing::differentiate(dscores, weights, ScaledLogit{}, delta, rare, prepare);
    bias_gradient.add_all(reinterpret_cast<const float (&)[1][kQueries / 8][4]>(dscores));
    if (score.changes_products()) multiply(dscores, slopes);
  }

 private:
  template <class Body>
  static __device__ __forceinline__ void each_pair(const Body& body) {
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) body(n, r, n / 2, n % 2 * 2 + r);
    }
  }
  static __device__ __forceinline__ void store(Packed& slopes, Scores& scores, const GeneralScore& score) {
    each_pair([&](int n, int r, int step, int i) { slopes[step][i] = store_pair(&scores[n][2 * r], score); });
  }
  static __device__ __forceinline__ void store_and_weigh(Packed& weights, Packed& slopes, Scores& scores,
                                                         const GeneralScore& score, const float (&lse)[kQueries]) {
    const ScaledLogit rule{score.factor};
    each_pair([&](int n, int r, int step, int i) {
      const float2 row_lse = *reinterpret_cast<const float2*>(&lse[n * 8 + 2 * t()]);
      float* const pair = &scores[n][2 * r];
      slopes[step][i] = store_pair(pair, score);
      weights[step][i] = Core::pack(weight_of(rule, pair[0], row_lse.x), weight_of(rule, pair[1], row_lse.y));
    });
  }
  // Turns two products into stored scores; returns their slopes.
  static __device__ __forceinline__ uint32_t store_pair(float* pair, const GeneralScore& score) {
    const float even = store_score<T>(score, &pair[0]), odd = store_score<T>(score, &pair[1]);
    return Core::pack(even, odd);
  }
  static __device__ __forceinline__ void multiply(Scores& dscores, const Packed& slopes) {
    each_pair([&](int n, int r, int step, int i) {
      const float2 slope = Core::unpack(slopes[step][i]);
      dscores[n][2 * r] *= slope.x;
      dscores[n][2 * r + 1] *= slope.y;
    });
  }
};

}  // namespace flashattn_ext::sm90
