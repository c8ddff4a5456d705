"""Masks that models use, one interval of rows for each key: time over density, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..bench_cases import BACKWARD_WORK
from ..bench_contestants import extras
from ..flex import FLEX
from ..patterns import PATTERNS
from ..timing import reported
from .figures import measured, quotient
from .harness import FORWARD, MIB, OURS, PASSES, SDPA, Context, Inputs, Sizes, attention_flop, divided, size_table
from .peak_memory import how_measured, peak_bytes
from .result import Plot, Result, cell

CAUSAL, VARLEN = "ours, causal", "ours, packed"
SIZES = size_table(
    gpu=dict(H=16, S=16384, D=128, dtype="bf16"),
    gpu_quick=dict(S=4096),
    cpu=dict(H=2, S=4096, D=64, dtype="fp32"),
    cpu_quick=dict(S=1024),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    flex_here = (FLEX,) if context.on_cuda else ()
    names = (OURS, CAUSAL, SDPA, VARLEN, *flex_here)
    shape = (1, sizes.H, sizes.S, sizes.D)
    for pattern, direction in context.steps(PATTERNS, PASSES):
        failures: dict[str, str] = {}
        calls: dict[str, Callable[[], object]] = {}
        inputs = Inputs.random(context.device, shape, sizes.dtype)
        for name in names:
            if name != VARLEN or PATTERNS[pattern].lengths:
                with reported(name, failures):
                    calls[name] = call_of(inputs, name, pattern, direction)
        times = context.measure(calls, inputs.all, failures)
        peaks: dict[str, int] = {}
        for name in (OURS, SDPA):
            with reported(f"memory of {name}", failures):
                peaks[name] = peak_bytes(context, make_call, sizes.S, sizes, name, pattern, direction)
        pairs = PATTERNS[pattern].visible_pairs(sizes.S)
        rate = times.rate(4.0 * pairs * sizes.H * sizes.D * (1 if direction == FORWARD else 1 + BACKWARD_WORK), OURS)
        causal = times.rate(attention_flop(*shape, causal=True, direction=direction), CAUSAL)
        result.add(
            cell("mask", pattern),
            cell("pass", direction),
            cell("visible", pairs / sizes.S**2, "%", ".1f", 100),
            *times.times(*names),
            cell("rate", rate, "TFLOP/s", ".3f", 1e-12),
            cell("of causal", divided(rate, causal), "%", ".0f", 100),
            cell("to SDPA", times.ratio(SDPA, OURS), "x", ".2f"),
            *(cell("to flex", times.ratio(name, OURS), "x", ".2f") for name in flex_here),
            *(cell(f"memory of {name}", peaks.get(name), "MiB", ".2f", 1 / MIB) for name in (OURS, SDPA)),
            times.remark(),
        )
    result.notes += [
        *(f"{name}: {pattern.about}" for name, pattern in PATTERNS.items()),
        f"S = {sizes.S}, one sequence of {sizes.H} heads. visible: of all scores; rate: of ours, on visible scores; of causal: relative to "
        f"that of a causal call of the same length; to SDPA: {SDPA} with the mask as a dense matrix; {VARLEN}: the packed call that "
        "computes the same, where there is one",
        f"memory: with the mask, which the call makes; {how_measured(context)}",
        f"{FLEX}: PyTorch's FlexAttention, compiled, on CUDA only; its block mask is built before timing",
    ]
    series = {
        f"{name}, {direction}": sorted(result.points("visible", name, pass_=direction))
        for name in (OURS, SDPA, *flex_here)
        for direction in PASSES
    }
    result.plot = Plot("line", "visible scores, %", "ms", series)


def found(result: Result) -> str:
    def relative(name: str) -> str:
        return quotient(*(measured(result, each, mask=name, pass_=FORWARD) for each in (SDPA, OURS)))

    return f"Time of PyTorch's own with a dense mask relative to ours, forward: {', '.join(f'{name} {relative(name)}' for name in PATTERNS)}."


def call_of(inputs: Inputs, name: str, pattern: str, direction: str) -> Callable[[], Tensor | Sequence[Tensor]]:
    """One attention with a mask: out, or with the backward (dq, dk, dv). The first call makes the mask."""
    case = inputs.case(PATTERNS[pattern].causal, direction, pattern=pattern)
    if name in (CAUSAL, VARLEN):
        return inputs.call_of(case.beside()["causal" if name == CAUSAL else "varlen"], OURS)
    return inputs.call_of(case, name)


def make_call(
    device: torch.device, S: int, sizes: Sizes, name: str, pattern: str, direction: str
) -> Callable[[], object]:
    """The call makes its mask each time."""
    call = call_of(Inputs.random(device, (1, sizes.H, S, sizes.D), sizes.dtype), name, pattern, direction)
    return lambda: (extras.cache_clear(), call())
