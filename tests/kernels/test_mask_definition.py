"""csrc/rules/mask.h, which every backend includes, answers as the rule of a causal or windowed mask does, pair by pair."""

from __future__ import annotations

from pathlib import Path

from helpers import run_cpp

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include "rules/mask.h"

using namespace flashattn_ext;

static long checked = 0;

static void check(bool holds, const char* what) {
  ++checked;
  if (holds) return;
  std::printf("%s is wrong\n", what);
  std::exit(1);
}

template <class Index>
static void check_mask(const AttnParams& p, int rows, int keys) {
  const BasicMask<Index> mask(p, rows, keys);
  auto sees = [&](int i, int j) {
    if (i >= rows || j >= keys) return false;
    const int distance = j - (i + keys - rows);
    return (p.window_left < 0 || -distance <= p.window_left) && (p.window_right < 0 || distance <= p.window_right);
  };
  for (int i0 = 0; i0 < rows; ++i0) for (int i1 = i0 + 1; i1 <= rows; ++i1)
  for (int j0 = 0; j0 < keys; ++j0) for (int j1 = j0 + 1; j1 <= keys + 1; ++j1) {
    int visible = 0;
    for (int i = i0; i < i1; ++i) for (int j = j0; j < j1; ++j) visible += sees(i, j);
    const Visibility expected = visible == 0                         ? Visibility::kNone
                                : visible == (i1 - i0) * (j1 - j0) ? Visibility::kAll
                                                                   : Visibility::kSome;
    check(mask.visibility(i0, i1, j0, j1) == expected, "visibility");
  }
  auto within = [](auto range, int x) { return range.begin <= x && x < range.end; };
  for (int i0 = 0; i0 < rows; ++i0) for (int i1 = i0 + 1; i1 <= rows; ++i1) for (int j = 0; j < keys; ++j) {
    int seen = 0;
    for (int i = i0; i < i1; ++i) seen += sees(i, j);
    check(within(mask.keys_of(i0, i1), j) == (seen > 0), "keys_of");
    check(within(mask.keys_of_all(i0, i1), j) == (seen == i1 - i0), "keys_of_all");
  }
  for (int j0 = 0; j0 < keys; ++j0) for (int j1 = j0 + 1; j1 <= keys + 1; ++j1) for (int i = 0; i < rows; ++i) {
    int seen = 0;
    for (int j = j0; j < j1; ++j) seen += sees(i, j);
    if (j1 <= keys) check(within(mask.rows_of(j0, j1), i) == (seen > 0), "rows_of");
    check(within(mask.rows_of_all(j0, j1), i) == (seen == j1 - j0), "rows_of_all");
  }
}

int main() {
  const int64_t windows[] = {-1, 0, 1, 3, int64_t{1} << 40};
  for (int rows : {1, 2, 5, 8}) for (int keys : {1, 3, 5, 9}) for (int64_t left : windows) for (int64_t right : windows) {
    AttnParams p;
    p.window_left = left;
    p.window_right = right;
    check_mask<int64_t>(p, rows, keys);
    check_mask<int32_t>(p, rows, keys);
  }
  std::printf("%ld answers\n", checked);
}
"""


def test_ranges_and_visibility_agree_with_every_pair(tmp_path: Path) -> None:
    result = run_cpp(PROGRAM, tmp_path)
    assert result.returncode == 0, result.stdout
    assert int(result.stdout.split()[0]) > 100_000
