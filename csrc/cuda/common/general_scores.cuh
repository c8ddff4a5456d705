// What scores.cuh does, for calls with softcap or biases. The rule is found out at run time, by branches that all lanes
// take alike, and logits are stored: in units of log2, with their biases.
#pragma once

#include "bias.cuh"
#include "bias_gradient.cuh"
#include "scores.cuh"

namespace flashattn_ext {

// Backward: as weigh_and_differentiate in scores.cuh, with all scores masked. `drops`: whether the call has dropout.
// A weight of 0 has no gradient, also when something else is not finite: the score may be hidden by its bias.
template <class T, int kKeyTiles, int N, class BiasGradient, class Keep>
__device__ __forceinline__ void weigh_and_differentiate(float (&weights)[kKeyTiles][N][4],
                                                        float (&dscores)[kKeyTiles][N][4], const GeneralScore& score,
                                                        const TileBias<T, true, kKeyTiles, N>& bias,
                                                        BiasGradient& bias_gradient, const float* lse,
                                                        const float* delta, const SeenBy<kKeyTiles>& seen_by,
                                                        bool drops, const Keep& keep) {
  constexpr int kTogether = 2;  // query tiles
#pragma unroll
  for (int first = 0; first < N; first += kTogether) {
    float own[kKeyTiles][kTogether][4], logits[kKeyTiles][kTogether][4], gradient[kKeyTiles][kTogether][4];
    auto each = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) body(i, n, e);
        }
      }
    };
    each([&](int i, int n, int e) { own[i][n][e] = weights[i][first + n][e]; });
    score.make_logits<T>(own);
    each([&](int i, int n, int e) { logits[i][n][e] = own[i][n][e]; });
    bias.add_columns(logits, first);
    Dropout::Column<kKeyTiles> kept;
    kept.keep_all();
    if (drops) kept = keep(first);
    each([&](int i, int n, int e) {
      const int query = (first + n) * 8 + e % 2;
      const bool seen = seen_by.includes(i, e / 2, query), keeps = kept.keeps(i, n, e);
      const float weight = seen ? ptx::ex2(logits[i][n][e] - lse[query]) : 0.f;
      const float dp = keeps ? dscores[i][first + n][e] : 0.f;
      weights[i][first + n][e] = keeps ? weight : 0.f;
      gradient[i][n][e] = weight == 0 ? 0.f : weight * (dp - delta[query]);
    });
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      bias_gradient.add([&](int i, int e) { return gradient[i][n][e]; }, first + n);
    }
    score.apply_slope<T>(gradient, own);
    each([&](int i, int n, int e) { dscores[i][first + n][e] = gradient[i][n][e]; });
  }
  bias_gradient.finish();
}

// As PackedScores in scores.cuh. Logits are not kept for the slope, but found again from the packed weights.
template <class T, int kQueries, Kind kKind>
struct GeneralPackedScores {
  using Packing = PackedScores<T, kQueries, kKind>;
  using Core = TensorCore<T>;
  using Scores = typename Packing::Scores;
  using Packed = typename Packing::Packed;
  using Bias = std::conditional_t<kKind == Kind::kGeneral, TileBias<T, true, 1, kQueries / 8>,
                                  DistanceBias<true, 1, kQueries / 8>>;
  using BiasGradient =
      TileBiasGradient<Bias, T, 1, kQueries / 8,
                       kKind == Kind::kGeneral ? RelativeGradient::kNone : RelativeGradient::kInAnyOrder>;
  static constexpr int kTogether = 2;  // query tiles

  template <bool kMasked, class Between>
  static __device__ __forceinline__ void weigh(Packed& weights, const Scores& products, const GeneralScore& score,
                                               const Bias& bias, const float (&lse)[kQueries], const SeenBy<1>& seen_by,
                                               const Between& between) {
#pragma unroll
    for (int first = 0; first < kQueries / 8; first += kTogether) {
      float logits[1][kTogether][4];
      each([&](int n, int e) { logits[0][n][e] = products[first + n][e]; });
      score.make_logits<T>(logits);
      bias.add_columns(logits, first);
      each([&](int n, int e) {
        float& x = logits[0][n][e];
        x = ptx::ex2(x - lse[query(first + n, e)]);
        if (kMasked && !seen_by.includes(0, e / 2, (first + n) * 8 + e % 2)) x = 0;
      });
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          weights[(first + n) / 2][(first + n) % 2 * 2 + r] = Core::pack(logits[0][n][2 * r], logits[0][n][2 * r + 1]);
        }
        between(first + n);
      }
    }
  }

  // dP becomes dS. A weight of 0 has no gradient.
  static __device__ __forceinline__ void differentiate(Scores& dscores, const Packed& weights,
                                                       const GeneralScore& score, const Bias& bias,
                                                       BiasGradient& bias_gradient, const float (&lse)[kQueries],
                                                       const float (&delta)[kQueries]) {
#pragma unroll
    for (int first = 0; first < kQueries / 8; first += kTogether) {
      float gradient[1][kTogether][4], size[kTogether][4];  // size: of the weight, before dropout
      each([&](int n, int e) {
        const float2 pair = Core::unpack(weights[(first + n) / 2][(first + n) % 2 * 2 + e / 2]);
        const float weight = e % 2 ? pair.y : pair.x;
        const float dp = Packing::kDropout && !(weight >= 0) ? 0.f : dscores[first + n][e];
        size[n][e] = fabsf(weight);
        gradient[0][n][e] = weight == 0 ? 0.f : size[n][e] * (dp - delta[query(first + n, e)]);
      });
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        bias_gradient.add([&](int, int e) { return gradient[0][n][e]; }, first + n);
      }
      if (score.is_capped) {
        float logits[1][kTogether][4] = {};  // without bias, which is subtracted
        bias.add_columns(logits, first);
        each(
            [&](int n, int e) { logits[0][n][e] = ptx::lg2(size[n][e]) + lse[query(first + n, e)] - logits[0][n][e]; });
        score.apply_slope<T>(gradient, logits);
      }
      each([&](int n, int e) { dscores[first + n][e] = gradient[0][n][e]; });
    }
    bias_gradient.finish();
  }

 private:
  // The query of a lane's element e of query tile n.
  static __device__ __forceinline__ int query(int n, int e) { return n * 8 + 2 * (threadIdx.x % 4) + e % 2; }
  template <class Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(n, e);
    }
  }
};

}  // namespace flashattn_ext
