"""The rows of `bench cuda` as plain numbers and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .bench_cases import DENSE, FA2, OURS, Case
from .console import markdown_table, print_table
from .timing import Timing

CASE_HEADER = ("set", "BxHxSxD", "dtype", "mask", "pass")
WIDTH = 220  # these tables are wider than the others


def row(
    case: Case,
    names: Sequence[str],
    timings: Mapping[str, Timing],
    memory: Mapping[str, int],
    max_error: Mapping[str, float],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    """A row as plain numbers; None for what was not measured. Ratios above 1: ours is faster."""
    ms = {name: timings[name].median_s * 1e3 if name in timings else None for name in names}
    best = min((ms[name] for name in names if name != OURS and ms[name] is not None), default=None)
    return {
        **asdict(case),
        "lengths": list(case.lengths),
        "flop": case.flop,
        "ms": ms,
        "tflops": {name: None if time is None else case.flop / time * 1e-9 for name, time in ms.items()},
        "ratio_best": _ratio(best, ms[OURS]),
        "ratio_fa2": _ratio(ms.get(FA2), ms[OURS]),
        **_beside_dense(case, timings),
        "spread": {name: timings[name].spread if name in timings else None for name in names},
        "peak_extra_bytes": {name: memory.get(name) if name in timings else None for name in names},
        "max_error": {name: max_error.get(name) for name in names},
        "failures": dict(failures),
    }


def _beside_dense(case: Case, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """What ours does on a dense batch of as much work as the packed sequences, and the ratio of the rates."""
    if DENSE not in timings:
        return {"dense": None, "ratio_dense": None}
    dense, ms = case.dense(), timings[DENSE].median_s * 1e3
    rate = dense.flop / ms * 1e-9
    ratio = case.flop / (timings[OURS].median_s * 1e12) / rate if OURS in timings else None
    return {"dense": {"shape": dense.shape, "ms": ms, "tflops": rate}, "ratio_dense": ratio}


def _ratio(peer_ms: float | None, our_ms: float | None) -> float | None:
    return None if peer_ms is None or our_ms is None else peer_ms / our_ms


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the speed, then memory and accuracy, then why ours could not run somewhere."""
    rows, names = results["rows"], results["contestants"]
    tables = [
        (
            speed_title(results),
            (*CASE_HEADER, *names, "to best", "to fa2", "to dense", "spread"),
            speed_cells(rows, names),
        ),
        (
            "MiB that a call allocates / largest error against fp64, of out or of the gradients",
            (*CASE_HEADER, *names),
            memory_cells(rows, names),
        ),
    ]
    for title, header, lines in tables:
        if markdown:
            print(markdown_table(title, header, lines))
        else:
            slower = [row["ratio_best"] is not None and row["ratio_best"] < 1 for row in rows]
            print_table(title, header, lines, left=range(len(CASE_HEADER)), marked=slower, width=WIDTH)
    for note in notes(rows):
        print(note)


def speed_title(results: dict[str, Any]) -> str:
    return (
        f"Milliseconds / TFLOP/s on {results['machine']}, {results['backend']}, torch {results['torch']}, "
        f"CUDA {results['cuda']}, cuDNN {results['cudnn']}; to dense: our rate beside that of a dense batch of as much work; "
        "spread is that of ours"
    )


def speed_cells(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    return [
        [
            *_case_cells(row),
            *(_pair(row["ms"][name], ".3f", row["tflops"][name], ".1f") for name in names),
            _cell(row["ratio_best"], ".2f", "x"),
            _cell(row["ratio_fa2"], ".2f", "x"),
            _cell(row["ratio_dense"], ".2f", "x"),
            _cell(row["spread"][OURS], ".0%"),
        ]
        for row in rows
    ]


def memory_cells(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    def mib(size: int | None) -> float | None:
        return None if size is None else size / 2**20

    return [
        [
            *_case_cells(row),
            *(_pair(mib(row["peak_extra_bytes"][name]), ".1f", row["max_error"][name], ".1e") for name in names),
        ]
        for row in rows
    ]


def _case_of(row: dict[str, Any]) -> Case:
    return Case(**{**{name: row[name] for name in Case.__dataclass_fields__}, "lengths": tuple(row["lengths"])})


def _case_cells(row: dict[str, Any]) -> list[str]:
    case = _case_of(row)
    return [case.set, case.shape, case.dtype, case.mask, case.direction]


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def _pair(first: float | None, first_form: str, second: float | None, second_form: str) -> str:
    if first is None and second is None:
        return "-"
    return f"{_cell(first, first_form)} / {_cell(second, second_form)}"


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where ours or the reference failed, and why. A peer's reasons are in the JSON."""
    return [
        " ".join(_case_cells(row)) + f": {name}: {row['failures'][name]}"
        for row in rows
        for name in (OURS, DENSE, "reference")
        if name in row["failures"]
    ]
