"""The cost of the causal mask: unfused attention pays for it, a fused kernel skips fully masked tiles."""

from __future__ import annotations

from .harness import OURS, UNFUSED, Context, Sizes, size_table
from .result import PASSES, Result, cell, column_quotient, labels

FULL, CAUSAL = "full", "causal"
COST = "cost of the mask"
SIZES = size_table(
    gpu=dict(B=4, H=32, S=2048, D=64, dtype="fp16"), cpu=dict(B=1, H=4, dtype="fp32"), cpu_quick=dict(S=1024)
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    for direction, name in context.steps(PASSES, (OURS, UNFUSED)):
        inputs = context.inputs(sizes)
        calls = {mask: inputs.call(name, direction, causal=mask == CAUSAL) for mask in (FULL, CAUSAL)}
        times = context.measure(calls, inputs)
        slower = times.ratio(CAUSAL, FULL)
        result.add(
            *labels(pass_=direction, attention=name),
            *times.times(FULL, CAUSAL),
            cell(COST, slower and slower - 1, "%", "+.1f", 100),
            times.remark(),
        )
    free = f"it would be {(sizes.S + 1) / (2 * sizes.S) - 1:.1%} if hidden scores cost nothing"
    result.notes.append(f"{COST}: time of the causal call relative to the full one, minus one; {free}")


def compare(result: Result) -> None:
    for name, article in ((OURS, "1.075x forward"), (UNFUSED, "1.162x forward")):
        what = f"time with the causal mask relative to that without, {name}"
        result.compare(what, column_quotient(result, CAUSAL, FULL, attention=name), article)
