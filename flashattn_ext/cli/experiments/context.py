"""What the experiments share: the device, its clock and ceilings, inputs, and the attentions that are
compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_ext

from ..bench_cases import BACKWARD_WORK, DTYPES
from ..bench_cuda import burst_ms, launches_for
from ..devices import synchronize
from ..timing import Timing, time_interleaved, wall_clock
from ..unfused import unfused_attention
from .result import Cell, Column, Result

FORWARD, BOTH = "forward", "forward+backward"
PASSES = (FORWARD, BOTH)
CUDA_ROUNDS, CUDA_QUICK_ROUNDS = 15, 3
CPU_SECONDS, CPU_QUICK_SECONDS = 2.0, 0.1  # per group of calls that take turns, and at least this many rounds:
CPU_ROUNDS, CPU_QUICK_ROUNDS = 5, 3


@dataclass
class Context:
    """One run of experiments. `track` shows how far along a sequence of steps is; `out` takes traces."""

    device: torch.device
    quick: bool
    out: Path | None = None
    track: Callable[[Iterable[Any]], Iterable[Any]] = iter
    _products: dict[tuple[str, int], tuple[Timing | None, str]] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def dtype(self) -> str:
        """The dtype of experiments that have one: half precision where it is the usual one."""
        return "fp32" if self.on_cpu else "fp16"

    def randn(self, *shape: int, dtype: str, requires_grad: bool = False) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPES[dtype], requires_grad=requires_grad)

    def time(
        self,
        calls: Mapping[str, Callable[[], object]],
        inputs: Sequence[Tensor],
        failures: dict[str, str],
        rounds: int | None = None,
    ) -> dict[str, Timing]:
        """Times calls that take turns, with new random numbers in `inputs` every round.

        What raises has its reason in `failures` and no timing. `rounds` is for long calls: so many, and no more.
        """

        def refresh() -> None:
            with torch.no_grad():
                for t in inputs:
                    t.normal_()
            synchronize(self.device)

        budget_s, least = 0.0, CUDA_QUICK_ROUNDS if self.quick else CUDA_ROUNDS
        if self.on_cpu:
            budget_s, least = (CPU_QUICK_SECONDS, CPU_QUICK_ROUNDS) if self.quick else (CPU_SECONDS, CPU_ROUNDS)
        if rounds is not None:
            budget_s, least = 0.0, rounds
        return time_interleaved(
            calls, budget_s=budget_s, min_rounds=least, clock=self._clock(), refresh=refresh, failures=failures
        )

    def _clock(self) -> Callable[[Callable[[], object]], float]:
        if self.device.type == "cuda":
            return event_clock
        return functools.partial(synchronized_clock, self.device)

    def time_matmul(self, dtype: str, n: int) -> tuple[Timing | None, str]:
        """torch.matmul of two n x n matrices, measured once per run; without a timing, why not."""
        if (dtype, n) not in self._products:
            a, b = (self.randn(n, n, dtype=dtype) for _ in range(2))
            failures: dict[str, str] = {}
            timings = self.time({"matmul": lambda: a @ b}, (a, b), failures)
            self._products[dtype, n] = (timings.get("matmul"), failures.get("matmul", ""))
        return self._products[dtype, n]

    def ceiling(self, dtype: str) -> float | None:
        """FLOP/s of the quickest torch.matmul so far, of the dtype or of fp32: CPUs may lack the former."""
        n = (512 if self.quick else 1024) if self.on_cpu else 8192
        dtypes = (dtype, "fp32")
        for name in dtypes:
            self.time_matmul(name, n)
        measured = ((n, timing) for (name, n), (timing, _) in self._products.items() if timing and name in dtypes)
        return max((2 * n**3 / timing.fastest_s for n, timing in measured), default=None)


def event_clock(call: Callable[[], object]) -> float:
    """Seconds of the GPU alone, between two events around a burst of calls as long as bench cuda's."""
    first_ms = burst_ms(call, 1)
    launches = launches_for(first_ms)
    return (burst_ms(call, launches) / launches if launches > 1 else first_ms) * 1e-3


def synchronized_clock(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of a call and of the work that it leaves in the device's queue."""

    def call_and_wait() -> None:
        call()
        synchronize(device)

    return wall_clock(call_and_wait)


# Attention over [B, H, S, D]


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flashattn_ext.forward(q, k, v, causal=causal, layout="bhsd")


def unfused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return unfused_attention(q, k, v, causal=causal)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


OURS, UNFUSED, SDPA = "ours", "unfused", "torch SDPA"
ATTENTIONS = {OURS: ours, UNFUSED: unfused, SDPA: sdpa}


@dataclass(frozen=True)
class Shape:
    """The sizes of a call of attention over [B, H, S, D]."""

    B: int
    H: int
    S: int
    D: int
    dtype: str


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output, all [B, H, S, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, context: Context, shape: Sequence[int], dtype: str) -> Inputs:
        return cls(*(context.randn(*shape, dtype=dtype, requires_grad=leaf) for leaf in (True, True, True, False)))

    @property
    def all(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.dout)

    def call(self, name: str, direction: str, causal: bool) -> Callable[[], Tensor | Sequence[Tensor]]:
        """One attention of ATTENTIONS: out, or with the backward (dq, dk, dv)."""
        leaves, attention = (self.q, self.k, self.v), ATTENTIONS[name]

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(*leaves, causal)

        def both() -> Sequence[Tensor]:
            return torch.autograd.grad(attention(*leaves, causal), leaves, self.dout)

        return forward if direction == FORWARD else both


def attention_flop(B: int, H: int, S: int, D: int, *, causal: bool, direction: str) -> float:
    """Products of visible scores, counted as `bench` does."""
    flop = 4.0 * B * H * S * S * D * (0.5 if causal else 1.0)
    return flop if direction == FORWARD else flop * (1 + BACKWARD_WORK)


# Cells and notes


def time_columns(names: Iterable[str], unit: str = "ms") -> list[Column]:
    """Two columns for each name: the median, and the distance between the quickest and the slowest call."""
    pairs = ((Column(name, unit, ".3f"), Column(f"{name} spread", "%", ".0f")) for name in names)
    return [column for pair in pairs for column in pair]


def time_cells(timings: Mapping[str, Timing], names: Iterable[str], unit_s: float = 1e-3) -> list[Cell]:
    """The cells of time_columns(); None for what was not measured."""
    cells: list[Cell] = []
    for name in names:
        timing = timings.get(name)
        cells += [timing.median_s / unit_s, timing.spread * 100] if timing else [None, None]
    return cells


def ratio(timings: Mapping[str, Timing], slower: str, faster: str) -> float | None:
    if slower not in timings or faster not in timings:
        return None
    return timings[slower].median_s / timings[faster].median_s


def per_second(work: float, timings: Mapping[str, Timing], name: str) -> float | None:
    return work / timings[name].median_s if name in timings else None


def share(part: float | None, whole: float | None) -> float | None:
    """In percent; None where one of them was not measured."""
    return None if part is None or whole is None else 100 * part / whole


def scaled(number: float | None, unit: float) -> float | None:
    return None if number is None else number / unit


def remark(failures: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in failures.items())


CEILING_NOTE = "of matmul: share of the rate of the quickest torch.matmul of this run in this dtype, or in fp32 where that is faster"


def size_notes(sizes: Any, gpu_sizes: Any) -> list[str]:
    """What was measured, and what a GPU measures where that is something else."""

    def text(value: Any) -> str:
        if value is None:
            return "as many as fit"
        if isinstance(value, tuple):
            return " ".join("x".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)
        return str(value)

    def of(sizes: Any) -> str:
        return ", ".join(f"{name} = {text(value)}" for name, value in asdict(sizes).items())

    if sizes == gpu_sizes:
        return [f"sizes: {of(sizes)}"]
    return [f"sizes, scaled down for this run: {of(sizes)}", f"sizes of a whole run on a GPU: {of(gpu_sizes)}"]


NOT_MEASURED = "not measured here"


def number(value: Cell, form: str, unit: str = "") -> str:
    """For comparisons."""
    return format(value, form) + unit if isinstance(value, (int, float)) else NOT_MEASURED


def of_passes(result: Result, column: str, form: str, unit: str, **where: Cell) -> str:
    """For comparisons: the value of each pass."""
    values = {direction: result.value(column, **{"pass": direction}, **where) for direction in PASSES}
    if all(value is None for value in values.values()):
        return NOT_MEASURED
    return ", ".join(f"{number(value, form, unit)} {direction}" for direction, value in values.items())
