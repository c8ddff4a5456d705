"""Head sizes that are no multiple of 8, each beside the next size that is."""

from __future__ import annotations

from dataclasses import dataclass

from ..timing import Timing
from .ascend import modelled_cycles
from .context import (
    FORWARD,
    OURS,
    PASSES,
    SDPA,
    Context,
    Inputs,
    attention_flop,
    number,
    per_second,
    remark,
    scaled,
    size_notes,
    time_cells,
    time_columns,
)
from .result import Cell, Column, Comparison, Plot, Result

NAMES = (OURS, SDPA)
BASE_OF = {65: 64, 97: 96, 120: 128, 129: 128, 136: 128}  # head size -> the one that it is compared with
DEFECT_PERCENT = 20.0


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    S: int
    D: tuple[int, ...]
    dtype: str


GPU_SIZES = Sizes(16, 16, 2048, (64, 65, 96, 97, 120, 128, 129, 136), "fp16")


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        return Sizes(1, 4, 256 if context.quick else 1024, GPU_SIZES.D, context.dtype)
    return GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("pass"),
        Column("D"),
        *time_columns(NAMES),
        Column("our rate", "TFLOP/s", ".3f"),
        Column("SDPA rate", "TFLOP/s", ".3f"),
        Column("beside D"),
        Column("our loss", "%", ".1f"),
        Column("SDPA loss", "%", ".1f"),
        Column("verdict"),
        Column("remark"),
    ]
    result = Result("alignment", "Head sizes, full attention", columns, notes=size_notes(sizes, GPU_SIZES))
    for direction in context.track(PASSES):
        result.rows += _rows(context, sizes, direction)
    result.notes.append(
        f"loss: of TFLOP/s, beside the head size named; over {DEFECT_PERCENT:g} % is called a defect, unclear where the medians "
        "and the quickest calls disagree"
    )
    series = {
        f"{name}, {direction}": [(str(D), y) for D, y in result.points("D", rate, **{"pass": direction})]
        for direction in PASSES
        for name, rate in ((OURS, "our rate"), (SDPA, "SDPA rate"))
    }
    result.plot = Plot("bar", "D", "TFLOP/s", series)
    measured = result.value("our loss", D=129, **{"pass": FORWARD})
    result.comparisons = [
        Comparison("loss of D=129 beside 128, forward", "over 20 %: defect", number(measured, ".1f", " %"))
    ]
    odd, even = (modelled_cycles(sizes.S, D, causal=False) for D in (129, 128))
    if odd and even:
        modelled = f"{loss(129 / odd, 128 / even):.1f} %, modelled"
        result.comparisons.append(
            Comparison("loss of D=129 beside 128, Ascend emulator, forward", "over 20 %: defect", modelled)
        )
    return result


def _rows(context: Context, sizes: Sizes, direction: str) -> list[list[Cell]]:
    """All head sizes take turns: a noisy moment touches them all."""
    inputs = {D: Inputs.random(context, (sizes.B, sizes.H, sizes.S, D), sizes.dtype) for D in sizes.D}
    calls = {
        f"{name} D={D}": values.call(name, direction, causal=False) for D, values in inputs.items() for name in NAMES
    }
    failures: dict[str, str] = {}
    timings = context.time(calls, [t for values in inputs.values() for t in values.all], failures)
    return [_row(sizes, direction, D, timings, failures) for D in sizes.D]


def _row(sizes: Sizes, direction: str, D: int, timings: dict[str, Timing], failures: dict[str, str]) -> list[Cell]:
    def rate(name: str, D: int) -> float | None:
        flop = attention_flop(sizes.B, sizes.H, sizes.S, D, causal=False, direction=direction)
        return per_second(flop, timings, f"{name} D={D}")

    def quickest(D: int) -> float | None:
        timing = timings.get(f"{OURS} D={D}")
        return D / timing.fastest_s if timing else None

    of_this = {name: timings[f"{name} D={D}"] for name in NAMES if f"{name} D={D}" in timings}
    base = BASE_OF.get(D)
    our_loss, sdpa_loss = (loss(rate(name, D), rate(name, base)) if base else None for name in NAMES)
    return [
        direction,
        D,
        *time_cells(of_this, NAMES),
        *(scaled(rate(name, D), 1e12) for name in NAMES),
        base,
        our_loss,
        sdpa_loss,
        verdict(our_loss, loss(quickest(D), quickest(base))) if base else "",
        remark({name: failures[f"{name} D={D}"] for name in NAMES if f"{name} D={D}" in failures}),
    ]


def loss(rate: float | None, base: float | None) -> float | None:
    """In percent; negative for a gain."""
    return None if rate is None or base is None else 100 * (1 - rate / base)


def verdict(of_medians: float | None, of_quickest: float | None) -> str:
    """What the loss is called; on a noisy machine the medians and the quickest calls may disagree."""
    if of_medians is None or of_quickest is None:
        return ""
    defects = [percent > DEFECT_PERCENT for percent in (of_medians, of_quickest)]
    return "defect" if all(defects) else "unclear" if any(defects) else "ok"
