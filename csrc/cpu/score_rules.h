// The rule (score.h) of calls with a softcap or with biases, and the tanh that it takes.
#pragma once

// score.h is compiled for one instruction set, because its arithmetic is also that of vectors.
#include "../score.h"
#include "simd.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// tanh of a vector, from a power of two of the given accuracy.
template <class Real, class Accuracy>
struct Tanh {
  using S = Simd<Real>;
  using V = typename S::V;

  // tanh(x) = x + x^3 p(x^2) for x^2 below kSmall, with a relative error of 3e-9: minimax, fitted by reweighted least
  // squares at Chebyshev nodes.
  static constexpr float kSmall = 0.36f;
  static constexpr float kCoefficients[] = {-0.333332986f, 0.133319244f, -0.0537838265f, 0.0207959637f,
                                            -0.00589515036f};

  static V of(V x) {
    if constexpr (std::is_same<Real, double>::value) {
      for (int l = 0; l < S::kWidth; ++l) x[l] = std::tanh(x[l]);
      return x;
    } else {
      // 1 - 2 / (1 + exp(2x)) has a small absolute error everywhere: enough for 16-bit inputs. From 10 on it is 1.
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

// The rule of a call with any of softcap, alibi_slopes, relative_bias and bias. Which of them there are is known at run
// time: a branch that always goes the same way costs less than kernels of their own.
template <class Real, class Accuracy>
struct GeneralScore {
  explicit GeneralScore(const AttnParams& p)
      : capped(p.softcap > 0), plain(Plain::of(p)), cap(Capped::of(p)), factor(capped ? cap.factor : plain.factor) {}

  template <class V>
  V stored(V product) const {
    return capped ? cap.stored(product) : product;
  }
  template <class V>
  V times_slope(V gradient, V x) const {
    return capped ? cap.times_slope(gradient, x) : gradient;
  }

 private:
  using Plain = PlainScore<Real, false>;
  using Capped = CappedScore<Real, Tanh<Real, Accuracy>>;

 public:
  bool capped;
  Plain plain;
  Capped cap;
  Real factor;
};

template <class Rule>
constexpr bool kIsGeneral = false;
template <class Real, class Accuracy>
constexpr bool kIsGeneral<GeneralScore<Real, Accuracy>> = true;

template <class Rule>
inline Rule make_rule(const AttnParams& p) {
  if constexpr (kIsGeneral<Rule>)
    return Rule(p);
  else
    return Rule::of(p);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
