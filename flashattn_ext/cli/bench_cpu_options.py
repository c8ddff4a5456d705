"""The second table of `bench cpu`: softcap, biases and masks, beside our own call without them and PyTorch's with a dense one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import bench_cases
from .bench_cases import CAUSAL, FA2, OURS, PLAIN, Case
from .bench_contestants import inputs, kernel_of, timed_call
from .console import markdown_table, print_table
from .patterns import PATTERNS
from .score_options import SCORE_OPTIONS
from .timing import reported, time_interleaved

FLASH, MATH = "torch flash", "torch math"
NAMES = {OURS: OURS, FA2: FLASH, bench_cases.MATH: MATH}  # of bench_contestants -> of the tables of `bench cpu`
HEADER = ("option", "S", "D", "pass", *NAMES.values(), "to plain or causal", "ratio to best", "spread")


def cases(quick: bool) -> list[Case]:
    S, D, H = 256 if quick else 2048, 64, 8
    options = [Case(1, H, H, S, D, score != "bias", "fp32", score=score) for score in SCORE_OPTIONS]
    options += [Case(1, H, H, S, D, of.causal, "fp32", pattern=name) for name, of in PATTERNS.items()]
    return [Case(**{**vars(case), "backward": backward}) for case in options for backward in (False, True)]


def measure(
    quick: bool, budget_s: float, min_rounds: int, track: Callable[[Iterable[Case]], Iterable[Case]]
) -> list[dict[str, Any]]:
    return [_measure_case(case, budget_s, min_rounds) for case in track(cases(quick))]


def _measure_case(case: Case, budget_s: float, min_rounds: int) -> dict[str, Any]:
    """One row: GFLOP/s on visible scores. What cannot run has its reason in `failures`."""
    failures: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    tensors = inputs(case, "cpu")
    without = {name: other for name, other in case.beside().items() if name in (PLAIN, CAUSAL)}
    asked = {**{name: (case, name) for name in NAMES}, **{name: (other, OURS) for name, other in without.items()}}
    for name, (timed, contestant) in asked.items():
        with reported(name, failures):
            calls[name] = _in_its_kernel(contestant, _prepared(timed, contestant, tensors))
    timings = time_interleaved(calls, budget_s=budget_s, min_rounds=min_rounds, failures=failures)
    gflops = {name: of.flop / timings[name].median_s * 1e-9 for name, (of, _) in asked.items() if name in timings}
    peers = [gflops[name] for name in (FA2, bench_cases.MATH) if name in gflops]
    beside = next((gflops[name] for name in without if name in gflops), None)
    ours = gflops.get(OURS)
    return {
        **{name: getattr(case, name) for name in ("S", "D", "backward", "score", "pattern", "causal")},
        "option": case.mask,
        "gflops": {shown: gflops.get(name) for name, shown in NAMES.items()},
        "to_plain": None if ours is None or beside is None else ours / beside,
        "ratio": None if ours is None or not peers else ours / max(peers),
        "spread": timings[OURS].spread if OURS in timings else None,
        "failures": failures,
    }


def _prepared(case: Case, name: str, tensors: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    with kernel_of(name):  # a backward runs the kernel that its forward has chosen
        return timed_call(case, name, *tensors)


def _in_its_kernel(name: str, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with kernel_of(name):
            return call()

    return run


def show(rows: list[dict[str, Any]], *, markdown: bool) -> None:
    title = "GFLOP/s on visible scores, fp32, H=8; PyTorch's own get a dense bias or mask; beside our own call without the option"
    lines = [_cells(row) for row in rows]
    if markdown:
        print("\n" + markdown_table(title, HEADER, lines), end="")
    else:
        print_table(title, HEADER, lines, left=(0, 3), marked=[(row["ratio"] or 1) < 1 for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    def cell(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else format(value, form) + unit

    return [
        row["option"],
        str(row["S"]),
        str(row["D"]),
        "backward" if row["backward"] else "forward",
        *(cell(rate, ".0f") for rate in row["gflops"].values()),
        cell(row["to_plain"], ".2f", "x"),
        cell(row["ratio"], ".2f", "x"),
        cell(row["spread"], ".0%"),
    ]
