"""Figures in the sentences and comparisons of an experiment: each with its spread; differences within the spread are called so."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .harness import PASSES
from .result import Cell, Result

NOT_MEASURED = "not measured here"


@dataclass(frozen=True)
class Figure:
    """A measured value, and half the distance between the smallest and the largest of its calls or seeds."""

    value: float
    half: float


def measured(result: Result, column: str, time: str = "", **where: Cell) -> Figure | None:
    """A cell of a column of times, or of rates that come from the column `time`; None where it is empty."""
    value, percent = result.value(column, **where), result.value(f"{time or column} spread", **where)
    if not isinstance(value, (int, float)) or not isinstance(percent, (int, float)):
        return None
    return Figure(value, value * percent / 200)


def final_loss(result: Result, **where: Cell) -> Figure | None:
    """The mean of the seeds of a training."""
    value, spread = (result.value(column, **where) for column in ("final loss", "seed spread"))
    return Figure(value, spread / 2) if isinstance(value, float) and isinstance(spread, float) else None


def quotient(one: Figure | None, other: Figure | None) -> str:
    """`one` divided by `other`: "2.73x ± 4 %", or "within the spread (± 4 %)"."""
    if one is None or other is None:
        return NOT_MEASURED
    ratio, relative = one.value / other.value, one.half / one.value + other.half / other.value
    spread = f"± {math.ceil(100 * relative)} %"
    differs = 1 - min(ratio, 1 / ratio) > relative  # in either direction
    return f"{ratio:.3g}x {spread}" if differs else f"within the spread ({spread})"


def difference(one: Figure | None, other: Figure | None, form: str) -> str:
    """`one` minus `other`: "-0.031 ± 0.012", or "within the spread (± 0.012)"."""
    if one is None or other is None:
        return NOT_MEASURED
    by, half = one.value - other.value, one.half + other.half
    spread = f"± {half:{form}}"
    return f"{by:+{form}} {spread}" if abs(by) > half else f"within the spread ({spread})"


def alone(figure: Figure | None, unit: str) -> str:
    """A figure without a comparison; only its spread where that is as large as the figure."""
    if figure is None:
        return NOT_MEASURED
    spread = f"± {math.ceil(100 * figure.half / figure.value)} %"
    return f"{float(f'{figure.value:.3g}'):g} {unit} {spread}" if figure.half < figure.value else f"unknown ({spread})"


def of_both_passes(result: Result, one: str, other: str, **where: Cell) -> str:
    """The quotient of two columns of times, forward and with the backward."""
    pairs = {each: [measured(result, column, pass_=each, **where) for column in (one, other)] for each in PASSES}
    return ", ".join(f"{quotient(*pair)} {direction}" for direction, pair in pairs.items())


def number(value: Cell, form: str, unit: str = "") -> str:
    """A cell in a comparison."""
    return format(value, form) + unit if isinstance(value, (int, float)) else NOT_MEASURED


def of_passes(result: Result, column: str, form: str, unit: str, **where: Cell) -> str:
    """A cell of each pass in a comparison."""
    values = {direction: result.value(column, pass_=direction, **where) for direction in PASSES}
    if all(value is None for value in values.values()):
        return NOT_MEASURED
    return ", ".join(f"{number(value, form, unit)} {direction}" for direction, value in values.items())
