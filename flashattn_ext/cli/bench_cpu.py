"""`bench cpu`: forward and backward of this package beside PyTorch's flash and math backends; bench_cpu_options.py has the
table of softcap, biases and masks.

GFLOP/s counts the products of visible scores: 4 * B * H * Sq * Sk * D forward, half of it causal,
and 2.5 times that backward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_ext

from .._build import describe_cpu
from . import bench_cpu_options
from .bench_cases import BACKWARD_WORK, DTYPES, OURS
from .bench_cpu_options import FLASH, MATH
from .console import make_console, markdown_table, print_table, require
from .timing import time_interleaved

TORCH_BACKENDS = {FLASH: SDPBackend.FLASH_ATTENTION, MATH: SDPBackend.MATH}


@dataclass(frozen=True)
class Case:
    """One row of the table: self-attention over [B, H, S, D]."""

    dtype: str
    B: int
    S: int
    D: int
    causal: bool
    backward: bool
    H: int = 8

    @property
    def gflop(self) -> float:
        flop = 4 * self.B * self.H * self.S * self.S * self.D * (0.5 if self.causal else 1.0)
        return flop * (BACKWARD_WORK if self.backward else 1.0) * 1e-9


def cases(quick: bool) -> list[Case]:
    shapes = [(1, 256, 64), (2, 128, 64)] if quick else [(1, 2048, 64), (1, 2048, 128), (8, 128, 64)]
    return [
        Case(dtype, B, S, D, causal, backward)
        for dtype, (B, S, D), backward, causal in itertools.product(DTYPES, shapes, (False, True), (False, True))
    ]


def measure(*, quick: bool) -> dict[str, Any]:
    """Times every case. The result holds plain numbers only, ready for JSON."""
    track = functools.partial(
        require("rich.progress").track, description="measuring", console=make_console(), transient=True
    )
    budget_s, min_rounds = (0.05, 2) if quick else (3.0, 3)
    rows = [_measure_case(case, budget_s, min_rounds) for case in track(cases(quick))]
    options = bench_cpu_options.measure(quick, budget_s, min_rounds, track)
    return {
        "machine": describe_cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": flashattn_ext._C.cpu_isa(),
        "fma_peak_gflops": flashattn_ext._C.cpu_peak_gflops(torch.get_num_threads()),
        "rows": rows,
        "options": options,
    }


def _measure_case(case: Case, budget_s: float, min_rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (case.B, case.H, case.S, case.D)
    q, k, v = (torch.randn(shape, dtype=DTYPES[case.dtype], requires_grad=case.backward) for _ in range(3))
    attentions = {OURS: _ours, **{name: functools.partial(_torch, name) for name in TORCH_BACKENDS}}
    calls = {name: _call(attention, q, k, v, case) for name, attention in attentions.items()}
    timings = time_interleaved(calls, budget_s=budget_s, min_rounds=min_rounds)
    gflops = {name: case.gflop / timing.median_s for name, timing in timings.items()}
    return {
        **vars(case),
        "gflops": gflops,
        "spread": {name: timing.spread for name, timing in timings.items()},
        "rounds": timings[OURS].rounds,
        "ratio": gflops[OURS] / max(gflops[FLASH], gflops[MATH]),
    }


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flashattn_ext.forward(q, k, v, causal=causal, layout="bhsd")


def _torch(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(TORCH_BACKENDS[name]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _call(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, case: Case
) -> Callable[[], Tensor | Sequence[Tensor]]:
    """What is timed: the forward, or the backward alone through a graph that is kept."""
    if not case.backward:
        return lambda: attention(q, k, v, case.causal)
    out = attention(q, k, v, case.causal)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


HEADER = (
    "dtype",
    "B",
    "S",
    "D",
    "mask",
    "pass",
    "ours",
    "torch flash",
    "torch math",
    "ratio to best",
    "spread",
)


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the table, with the ratio to the better of PyTorch's two backends and the spread of
    our calls.
    """
    about = (
        f"GFLOP/s, H=8, {results['machine']}, {results['threads']} threads, {results['isa']}, torch {results['torch']}; "
        f"peak of fp32 multiply-adds {results['fma_peak_gflops']:.0f}"
    )
    cells = [_cells(row) for row in results["rows"]]
    if markdown:
        print(markdown_table(about, HEADER, cells), end="")
    else:
        slower = [row["ratio"] < 1 for row in results["rows"]]
        print_table(about, HEADER, cells, left=(0, 4, 5), marked=slower)
    bench_cpu_options.show(results["options"], markdown=markdown)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["dtype"],
        *(str(row[name]) for name in ("B", "S", "D")),
        "causal" if row["causal"] else "full",
        "backward" if row["backward"] else "forward",
        *(f"{row['gflops'][name]:.0f}" for name in (OURS, FLASH, MATH)),
        f"{row['ratio']:.2f}x",
        f"{row['spread'][OURS]:.0%}",
    ]
