"""Masks that models use, one interval of rows for each key, and lists of blocks: time over density, memory."""

from __future__ import annotations

from ..bench_cases import FLEX
from ..block_patterns import BLOCK_PATTERNS
from ..options import PATTERNS
from .harness import OURS, OURS_CAUSAL, OURS_PACKED, SDPA, Context, Sizes, divided, memory_cell, size_table
from .result import FORWARD, PASSES, Plot, Result, cell, column_quotient, labels

# Patterns of all heads together: a dense mask for each head would not fit.
MEASURED = {**PATTERNS, **{name: pattern for name, pattern in BLOCK_PATTERNS.items() if pattern.heads == 1}}
SIZES = size_table(
    gpu=dict(B=1, H=16, S=16384, D=128, dtype="bf16"),
    gpu_quick=dict(S=4096),
    cpu=dict(H=2, S=4096, D=64, dtype="fp32"),
    cpu_quick=dict(S=1024),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    flex_here = (FLEX,) if context.on_cuda else ()
    names = (OURS, OURS_CAUSAL, SDPA, OURS_PACKED, *flex_here)
    for (name, pattern), direction in context.steps(MEASURED.items(), PASSES):
        inputs, options = context.inputs(sizes), {"causal": pattern.causal, "pattern": name}
        there = [each for each in names if each != OURS_PACKED or pattern.lengths]
        times = context.measure_attentions(inputs, there, direction, **options)
        memory = context.peaks((OURS, SDPA), times.failures, sizes, direction, **options)
        rate = times.rate(inputs.flop(direction, **options), OURS)
        causal = times.rate(inputs.flop(direction), OURS_CAUSAL)
        result.add(
            *labels(mask=name, pass_=direction),
            cell("visible", pattern.visible_pairs(sizes.S) / sizes.S**2, "%", ".1f", 100),
            *times.times(*names),
            cell("rate", rate, "TFLOP/s", ".3f", 1e-12),
            cell("of causal", divided(rate, causal), "%", ".0f", 100),
            cell("to SDPA", times.ratio(SDPA, OURS), "x", ".2f"),
            *(cell("to flex", times.ratio(FLEX, OURS), "x", ".2f") for _ in flex_here),
            *(memory_cell(f"memory of {each}", memory.get(each)) for each in (OURS, SDPA)),
            times.remark(),
        )
    result.notes += [
        *(f"{name}: {pattern.about}" for name, pattern in MEASURED.items()),
        f"S = {sizes.S}, one sequence of {sizes.H} heads. visible: of all scores; rate: of ours, on visible scores; of causal: relative to "
        f"that of a causal call of the same length; to SDPA: {SDPA} with the mask as a dense matrix; {OURS_PACKED}: the packed call that "
        "computes the same, where there is one",
        f"memory: with the mask, which the call makes; {context.memory_note}",
        f"{FLEX}: PyTorch's FlexAttention, compiled, on CUDA only; its block mask is built before timing",
    ]
    series = {
        f"{name}, {direction}": sorted(result.points("visible", name, pass_=direction))
        for name in (OURS, SDPA, *flex_here)
        for direction in PASSES
    }
    result.plot = Plot("line", "visible scores, %", "ms", series)


def compare(result: Result) -> None:
    for name in MEASURED:
        what = f"time of {SDPA} with a dense mask relative to ours, {name}, {FORWARD}"
        result.compare(what, column_quotient(result, SDPA, OURS, mask=name, pass_=FORWARD))
