"""What the causal mask costs: unfused attention pays for it, a fused kernel skips what it hides."""

from __future__ import annotations

from .ascend import modelled_cycles
from .context import (
    FORWARD,
    OURS,
    PASSES,
    UNFUSED,
    Context,
    Inputs,
    Shape,
    number,
    ratio,
    remark,
    size_notes,
    time_cells,
    time_columns,
)
from .result import Cell, Column, Comparison, Plot, Result

FULL, CAUSAL = "full", "causal"
COST, PER_SCORE = "cost of the mask", "cost per visible score"


GPU_SIZES = Shape(4, 32, 2048, 64, "fp16")


def sizes_for(context: Context) -> Shape:
    if context.on_cpu:
        return Shape(1, 4, 1024 if context.quick else 2048, 64, context.dtype)
    return GPU_SIZES


def measure(context: Context, sizes: Shape) -> Result:
    columns = [
        Column("pass"),
        Column("attention"),
        *time_columns([FULL, CAUSAL]),
        Column("causal/full", "x", ".3f"),
        Column(COST, "%", "+.1f"),
        Column(PER_SCORE, "%", "+.1f"),
        Column("remark"),
    ]
    result = Result("causal", "Cost of the causal mask", columns, notes=size_notes(sizes, GPU_SIZES))
    for direction, name in context.track([(direction, name) for direction in PASSES for name in (OURS, UNFUSED)]):
        result.rows.append(_row(context, sizes, direction, name))
    result.notes.append(
        f"{COST}: time of the causal call beside the full one. {PER_SCORE}: the same for equal work, as the mask leaves "
        f"{visible_share(sizes.S):.1%} of the scores; causal/full would be {visible_share(sizes.S):.3f} if it cost nothing"
    )
    result.plot = Plot(
        "bar",
        "pass",
        "causal / full time",
        {name: result.points("pass", "causal/full", attention=name) for name in (OURS, UNFUSED)},
    )
    result.comparisons = [
        Comparison(
            f"cost of the mask, {name}, forward",
            article,
            number(result.value(COST, attention=name, **{"pass": FORWARD}), "+.1f", " %"),
        )
        for name, article in ((OURS, "+7.5 %"), (UNFUSED, "+16.2 %"))
    ]
    full, causal = (modelled_cycles(sizes.S, sizes.D, causal=causal) for causal in (False, True))
    if full and causal:
        cost = f"{100 * (causal / full - 1):+.1f} %, modelled"
        result.comparisons.append(Comparison("cost of the mask, Ascend emulator, forward", "+7.5 %", cost))
    return result


def visible_share(S: int) -> float:
    return (S + 1) / (2 * S)


def _row(context: Context, sizes: Shape, direction: str, name: str) -> list[Cell]:
    inputs = Inputs.random(context, (sizes.B, sizes.H, sizes.S, sizes.D), sizes.dtype)
    failures: dict[str, str] = {}
    calls = {mask: inputs.call(name, direction, causal=mask == CAUSAL) for mask in (FULL, CAUSAL)}
    timings = context.time(calls, inputs.all, failures)
    relative = ratio(timings, CAUSAL, FULL)
    cost = None if relative is None else 100 * (relative - 1)
    per_score = None if relative is None else 100 * (relative / visible_share(sizes.S) - 1)
    return [direction, name, *time_cells(timings, [FULL, CAUSAL]), relative, cost, per_score, remark(failures)]
