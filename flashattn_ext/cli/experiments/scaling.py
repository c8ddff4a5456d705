"""Time over sequence length: unfused attention moves S x S matrices, ours does not."""

from __future__ import annotations

from dataclasses import dataclass

from .context import (
    CEILING_NOTE,
    OURS,
    PASSES,
    SDPA,
    UNFUSED,
    Context,
    Inputs,
    attention_flop,
    of_passes,
    per_second,
    ratio,
    remark,
    scaled,
    share,
    size_notes,
    time_cells,
    time_columns,
)
from .result import Cell, Column, Comparison, Plot, Result

NAMES = (OURS, UNFUSED, SDPA)
TO_UNFUSED, TO_SDPA = "to unfused", "to SDPA"


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    S: tuple[int, ...]
    D: int
    dtype: str


GPU_SIZES = Sizes(4, 32, (512, 1024, 2048, 4096, 8192), 64, "fp16")


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        return Sizes(1, 4, (256, 512, 1024) if context.quick else (512, 1024, 2048, 4096), 64, context.dtype)
    return Sizes(4, 32, (512, 1024, 2048), 64, context.dtype) if context.quick else GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("pass"),
        Column("S"),
        *time_columns(NAMES),
        Column(TO_UNFUSED, "x", ".2f"),
        Column(TO_SDPA, "x", ".2f"),
        Column("rate", "TFLOP/s", ".3f"),
        Column("of matmul", "%", ".0f"),
        Column("remark"),
    ]
    result = Result("scaling", "Causal attention over sequence length", columns, notes=size_notes(sizes, GPU_SIZES))
    for direction, S in context.track([(direction, S) for direction in PASSES for S in sizes.S]):
        result.rows.append(_row(context, sizes, direction, S))
    result.notes.append(f"to unfused, to SDPA: how many times faster ours is; {CEILING_NOTE}")
    series = {f"{name}, {direction}": _rates(result, sizes, name, direction) for name in NAMES for direction in PASSES}
    result.plot = Plot("line", "S", "TFLOP/s", series, log="x")
    result.comparisons = _comparisons(result, sizes)
    return result


def _row(context: Context, sizes: Sizes, direction: str, S: int) -> list[Cell]:
    shape = (sizes.B, sizes.H, S, sizes.D)
    inputs = Inputs.random(context, shape, sizes.dtype)
    failures: dict[str, str] = {}
    calls = {name: inputs.call(name, direction, causal=True) for name in NAMES}
    timings = context.time(calls, inputs.all, failures)
    rate = per_second(attention_flop(*shape, causal=True, direction=direction), timings, OURS)
    return [
        direction,
        S,
        *time_cells(timings, NAMES),
        ratio(timings, UNFUSED, OURS),
        ratio(timings, SDPA, OURS),
        scaled(rate, 1e12),
        share(rate, context.ceiling(sizes.dtype)),
        remark(failures),
    ]


def _rates(result: Result, sizes: Sizes, name: str, direction: str) -> list[tuple[int, float]]:
    """TFLOP/s over S, from the times of the table."""
    return [
        (S, attention_flop(sizes.B, sizes.H, S, sizes.D, causal=True, direction=direction) / ms * 1e-9)
        for S, ms in result.points("S", name, **{"pass": direction})
    ]


def _comparisons(result: Result, sizes: Sizes) -> list[Comparison]:
    """The article does not say which pass it measured."""
    return [
        Comparison(
            f"speed-up over unfused, S={theirs} there" + (f" and {S} here" if theirs != S else ""),
            article,
            of_passes(result, TO_UNFUSED, ".2f", "x", S=S),
        )
        for theirs, nearest, article in ((512, sizes.S[0], "2.73x"), (8192, sizes.S[-1], "8.58x"))
        for S in [theirs if theirs in sizes.S else nearest]
    ]
