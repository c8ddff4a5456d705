"""Time over sequence length: unfused attention moves S x S matrices, a fused kernel does not."""

from __future__ import annotations

from .harness import MATMUL_NOTE, OURS, SDPA, UNFUSED, Context, Sizes, size_table
from .result import PASSES, Plot, Result, cell, column_quotient, labels

NAMES = (OURS, UNFUSED, SDPA)
SIZES = size_table(
    gpu=dict(B=4, H=32, S=(512, 1024, 2048, 4096, 8192), D=64, dtype="fp16"),
    gpu_quick=dict(S=(512, 1024, 2048)),
    cpu=dict(B=1, H=4, S=(512, 1024, 2048, 4096), dtype="fp32"),
    cpu_quick=dict(S=(256, 512, 1024)),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    rates: dict[str, list[tuple[int, float]]] = {f"{name}, {direction}": [] for name in NAMES for direction in PASSES}
    for direction, S in context.steps(PASSES, sizes.S):
        inputs = context.inputs(sizes, S=S)
        times, flop = context.measure_attentions(inputs, NAMES, direction), inputs.flop(direction)
        result.add(
            *labels(pass_=direction, S=S),
            *times.times(*NAMES),
            cell("to unfused", times.ratio(UNFUSED, OURS), "x", ".2f"),
            cell("to SDPA", times.ratio(SDPA, OURS), "x", ".2f"),
            *context.rate_cells(times.rate(flop, OURS), sizes.dtype),
            times.remark(),
        )
        for name in times.timings:
            rates[f"{name}, {direction}"].append((S, times.rate(flop, name) * 1e-12))
    result.notes.append(f"to unfused, to SDPA: how many times faster ours is; {MATMUL_NOTE}")
    result.plot = Plot("line", "S", "TFLOP/s", rates, log="x")


def compare(result: Result) -> None:
    lengths = sorted(set(result.column("S")))
    for S, article in ((lengths[0], "2.73x at S = 512"), (lengths[-1], "8.58x at S = 8192")):
        result.compare(
            f"time of unfused relative to ours, S = {S}", column_quotient(result, UNFUSED, OURS, S=S), article
        )
    what = f"time of {SDPA} relative to ours, S = {lengths[-1]}"
    result.compare(what, column_quotient(result, SDPA, OURS, S=lengths[-1]))
