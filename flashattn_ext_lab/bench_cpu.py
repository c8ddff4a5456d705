"""`bench cpu`: forward and backward of this package compared with PyTorch's flash and math backends; a second table has softcap,
biases and masks, compared with our own call without them and PyTorch's with a dense bias or mask. bench_cases.py counts the FLOP.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch

import flashattn_ext

from . import bench_cuda
from .bench_cases import CAUSAL, FA2, MATH, OURS, PLAIN, VARLEN, Case
from .console import fields, parts, print_rows, track
from .devices import describe_machine
from .options import PATTERNS, SCORE_OPTIONS

NAMES = (OURS, FA2, MATH)
H = 8


def measure(*, quick: bool) -> dict[str, Any]:
    """Times every case. The result contains plain numbers only, ready for JSON."""
    ways, S = (False, True), 256 if quick else 2048
    shapes = [(1, 256, 64), (2, 128, 64)] if quick else [(1, 2048, 64), (1, 2048, 128), (8, 128, 64)]
    plain = [
        Case(B, H, H, length, D, causal, dtype, backward=backward)
        for dtype, (B, length, D), backward, causal in itertools.product(("fp32", "bf16", "fp16"), shapes, ways, ways)
    ]
    options = [Case(1, H, H, S, 64, score != "bias", "fp32", score=score) for score in SCORE_OPTIONS]
    options += [Case(1, H, H, S, 64, of.causal, "fp32", pattern=name) for name, of in PATTERNS.items()]
    options = [replace(case, backward=backward) for case in options for backward in ways]
    options += [
        Case(1, H, H, S, D, True, dtype, invariant=True) for D in (64, 128) for dtype in ("fp32", "bf16", "fp16")
    ]
    measured = functools.partial(bench_cuda.measure_case, names=NAMES, quick=quick, device="cpu")
    return {
        **describe_machine(torch.device("cpu")),
        "fma_peak_gflops": flashattn_ext._C.cpu_peak_gflops(torch.get_num_threads()),
        "rows": list(map(measured, track(plain))),
        "options": list(map(measured, track(options))),
    }


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the tables, with the ratio to the better of PyTorch's two backends and the spread of our calls."""
    about = (
        f"GFLOP/s, H={H}, {results['machine']}, {results['threads']} threads, {results['isa']}, torch {results['torch']}, "
        f"whose flash backend is {FA2}; peak of fp32 multiply-adds {results['fma_peak_gflops']:.0f}"
    )
    options = "GFLOP/s on visible scores, fp32; PyTorch's own get a dense bias or mask"
    tables = [
        (about, results["rows"], {"dtype": "dtype", "B": "B", "S": "S", "D": "D", "mask": "option"}, ()),
        (options, results["options"], {"option": "option", "S": "S", "D": "D"}, (PLAIN, CAUSAL, VARLEN)),
    ]
    for title, rows, of_case, costs in tables:
        columns = {
            **fields({**of_case, "pass": "direction"}),
            **parts("tflops", NAMES, ".0f", scale=1e3),
            **{name: bench_cuda.RATIOS[name] for name in (*(f"to {cost}" for cost in costs), "to best", "spread")},
        }
        print_rows(title, columns, rows, markdown=markdown, marked=map(bench_cuda.is_slower, rows))
