"""csrc/rules/score.h, which every backend includes: logits, their order, and the derivative of the softcap."""

from __future__ import annotations

from pathlib import Path

from helpers import run_cpp

PROGRAM = r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include "backend/backend.h"
#include "rules/lse_words.h"

using namespace flashattn_ext;

static long checked = 0;

static void check(bool holds, const char* what, double scale) {
  ++checked;
  if (holds) return;
  std::printf("%s is wrong for softmax_scale %g\n", what, scale);
  std::exit(1);
}

template <class Score, class Real>
static void check_rule(double scale, bool ordered) {
  AttnParams p;
  p.softmax_scale = scale;
  const Score score = Score::of(p);
  const double tolerance = 4 * std::numeric_limits<Real>::epsilon();
  auto logit = [&](double product) { return score.factor * static_cast<double>(score.stored(Real(product))); };
  for (double product = -64; product <= 64; product += 0.5) {
    const double expected = scale * product * 1.4426950408889634;
    check(std::fabs(logit(product) - expected) <= tolerance * std::fabs(expected) + 1e-30, "the logit", scale);
    const Real x = score.stored(Real(product)), next = score.stored(Real(product + 0.5));
    if (ordered && scale != 0) check((next > x) == (scale > 0), "the order of stored scores", scale);
    const double slope = (logit(product + 0.5) - logit(product - 0.5)) / 1.4426950408889634;
    const double gradient = score.softmax_scale * static_cast<double>(score.times_slope(Real(1), x));
    check(std::fabs(slope - gradient) <= 64 * tolerance * std::fabs(scale) + 1e-30, "the slope", scale);
  }
  if (ordered) check(score.factor > 0, "the sign of the factor", scale);
  const Real masked = score.factor * -std::numeric_limits<Real>::infinity();
  check(!std::isnan(masked), "the factor times a masked score", scale);
  check(score.changes_products() == (score.stored(Real(1)) != Real(1)), "changes_products", scale);
}

struct HostTanh {
  static double of(double x, bool) { return std::tanh(x); }
};

// The rule of a call with softcap: its logits, their slope and its derivative, and products that lack a factor.
static void check_cap(double scale, double cap) {
  AttnParams p;
  p.softmax_scale = scale;
  p.softcap = cap;
  check(p.has_score_option(), "has_score_option", cap);
  const auto score = ScoreRule<double, HostTanh>::of(p);
  check(score.changes_products() && score.is_large == (cap > kLargeCap), "the kind of rule", cap);
  for (double product = -64; product <= 64; product += 0.5) {
    const double x = score.stored(product), s = scale * product, logit = cap * std::tanh(s / cap);
    check(std::fabs(score.factor * x * kLn2<double> - logit) <= 1e-12 * std::fabs(logit), "the capped logit", cap);
    check(std::fabs(x) <= score.bound() && std::fabs(score.factor * score.inverse - 1) < 1e-15, "the bound", cap);
    check(score.times(2).stored(product / 2) == x && score.times(2).factor == score.factor, "the factor", cap);
    const double tanh = std::tanh(s / cap), slope = 1 - tanh * tanh;
    check(std::fabs(score.times_slope(3.0, x) - 3 * slope) <= 1e-12, "the slope of the cap", cap);
    const double curved = score.slope(x, 3.0) * score.curvature(x), expected = -6 * tanh * slope / cap;
    check(std::fabs(curved - expected) <= 1e-12 * (1 + std::fabs(expected)), "the curvature of the cap", cap);
  }
  check(refuses_score_options(p, {"softcap"}, "other").empty(), "an option that a backend computes", cap);
  const std::string reason = refuses_score_options(p, {"another"}, "other");
  check(reason.find("softcap is not implemented by the other kernels") == 0, "the reason of a refusal", cap);
}

// Without an option the general rule stores products, and its factor has the sign of the scale.
static void check_no_option(double scale) {
  AttnParams p;
  p.softmax_scale = scale;
  check(!p.has_score_option() && refuses_score_options(p, {}, "other").empty(), "a call without options", scale);
  const auto score = ScoreRule<double, HostTanh>::of(p), half = score.times(0.5);
  check(!score.changes_products() && score.stored(3.0) == 3 && score.times_slope(3.0, 7.0) == 3, "no option", scale);
  check(score.factor == ScoreRule<double, PlainProducts<false>>::of(p).factor, "the factor without options", scale);
  check(half.factor == score.factor / 2 && half.stored(3.0) == 3, "the factor of products", scale);
}

// Biases and sinks in units of log2: finite where they are finite, in order, and back to what they were.
template <class Real>
static void check_units() {
  const Real largest = kLargest<Real>, limit = 1 / std::numeric_limits<Real>::min();
  Real before = -kInfinite<Real>;
  for (Real natural : {-largest, -largest / 2, Real(-1.5) * limit, -limit, Real(-1e9), Real(-1), Real(0), Real(1e-3),
                       Real(88), Real(1e9), limit, Real(1.5) * limit, largest / 2, largest}) {
    const Real units = in_log2_units(natural), back = in_natural_units(units);
    check(units > before && units < largest, "the order of biases in units of log2", natural);
    check(std::fabs(back - natural) <= 4 * std::numeric_limits<Real>::epsilon() * std::fabs(natural), "the inverse",
          natural);
    if (std::fabs(natural) <= limit) check(units == natural * kLog2E<Real>, "a bias that is not narrowed", natural);
    check(sink_maximum(natural) == units, "the maximum of a sink", natural);
    check(std::fabs(row_lse(units, Real(0)) - natural) <= std::fabs(back - natural), "lse", natural);
    before = units;
  }
  for (Real infinite : {kInfinite<Real>, -kInfinite<Real>}) {
    check(in_log2_units(infinite) == infinite && in_natural_units(infinite) == infinite, "infinity", infinite);
  }
  const Real nan = std::numeric_limits<Real>::quiet_NaN();
  check(std::isnan(in_log2_units(nan)) && std::isnan(in_natural_units(nan)), "NaN", 0);
  // The words of rows: without keys, under a sink of +inf, and where many keys have a bias of -1e9.
  using Words = LseWords<Real>;
  check(std::exp2(Real(100) - Words::of_lse(-kInfinite<Real>).top) == 0, "a row without keys", 0);
  check(Words::of_lse(kInfinite<Real>).sink_log2_weight(kInfinite<Real>) == 0, "a sink of +inf", 0);
  check(std::exp2(Real(100) - Words::of_row(kLargest<Real>, Real(8)).sum()) == 0, "keys beside a sink of +inf", 0);
  const Words many = Words::of_row(in_log2_units(Real(-1e9)), Real(8));
  check(many.sink_log2_weight(Real(-1e9)) == -8, "one of 256 weights", 0);
}

int main() {
  check_units<float>();
  check_units<double>();
  for (double scale : {0.125, -0.125, 1.0, -1.0, 0.0, -0.0, 3.7, -0.0883883476, 1e-20}) {
    check_rule<ScoreRule<float, PlainProducts<true>>, float>(scale, true);
    check_rule<ScoreRule<float, PlainProducts<false>>, float>(scale, false);
    check_rule<ScoreRule<double, PlainProducts<true>>, double>(scale, true);
    check_rule<ScoreRule<double, PlainProducts<false>>, double>(scale, false);
    check_no_option(scale);
    for (double cap : {1e-3, 0.5, 30.0, 1000.0, 1001.0, 1e9}) check_cap(scale, cap);
  }
  std::printf("%ld answers\n", checked);
}
"""


def test_scores_logits_and_slopes_belong_together(tmp_path: Path) -> None:
    result = run_cpp(PROGRAM, tmp_path)
    assert result.returncode == 0, result.stdout
    assert int(result.stdout.split()[0]) > 10_000
