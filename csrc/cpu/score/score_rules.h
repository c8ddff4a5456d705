// The rule (score.h) of calls with options of a score or biases, and its tanh.
#pragma once

// score.h is included here, after the instruction set is chosen, because its templates also compute with vectors.
#include "cpu/vectors/simd.h"
#include "rules/score.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// tanh of a vector, computed with an exp2 of the given accuracy.
template <class Real, class Accuracy>
struct Tanh {
  using S = Simd<Real>;
  using V = typename S::V;

  // tanh(x) = x + x^3 p(x^2) for x^2 below kSmall, with a relative error of 3e-9: minimax, fitted by reweighted least
  // squares at Chebyshev nodes.
  static constexpr float kSmall = 0.36f;
  static constexpr float kCoefficients[] = {-0.333332986f, 0.133319244f, -0.0537838265f, 0.0207959637f,
                                            -0.00589515036f};

  // is_large: the result is multiplied by more than kLargeCap.
  static V of(V x, [[maybe_unused]] bool is_large) {
    if constexpr (!std::is_same<Accuracy, Exp2Full>::value) {
      if (is_large) return Tanh<Real, Exp2Full>::of(x, is_large);
    }
    if constexpr (std::is_same<Real, double>::value) {
      for (int l = 0; l < S::kWidth; ++l) x[l] = std::tanh(x[l]);
      return x;
    } else {
      // 1 - 2 / (1 + exp(2x)) has a small absolute error everywhere, which is enough for 16-bit inputs up to kLargeCap.
      // It rounds to 1 from x = 10 on.
      const V power = S::template exp2<Accuracy>(S::min(S::set1(10.0f), x) * S::set1(2 * kLog2E<float>));
      const V sum = S::set1(1.0f) + power;
      if constexpr (std::is_same<Accuracy, Exp2Half>::value) {
        return S::fma(S::set1(-2.0f), S::reciprocal(sum), S::set1(1.0f));
      }
      const V large = S::set1(1.0f) - S::set1(2.0f) / sum;
      const V square = x * x;
      V p = S::set1(kCoefficients[4]);
      FLASHATTN_UNROLL(4)
      for (int k = 3; k >= 0; --k) p = S::fma(p, square, S::set1(kCoefficients[k]));
      return S::where_in_range(square, S::zero(), S::set1(kSmall), S::fma(x * square, p, x), large);
    }
  }
};

// The rule of a call with an option of a score, alibi_slopes, relative_bias or bias. Which of them are present is
// checked at run time: well-predicted branches cost less than further kernel instances.
template <class Real, class Accuracy>
using GeneralScore = ScoreRule<Real, Tanh<Real, Accuracy>>;

template <class Rule>
constexpr bool kIsGeneral = !Rule::kConstantSlope;

// The rule of the same call with softmax_scale times `factor`.
template <class Rule>
inline Rule scaled_rule(AttnParams p, double factor) {
  p.softmax_scale *= factor;
  return Rule::of(p);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
