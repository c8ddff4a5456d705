"""The rows of `bench cuda` as plain numbers and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .bench_cases import BESIDE, CAUSAL, DENSE, FA2, OURS, PLAIN, VARLEN, Case
from .bench_contestants import BLOCK_MASK, TABLES
from .console import markdown_table, print_table
from .flex import FLEX
from .timing import Timing

CASE_HEADER = ("set", "BxHxSxD", "dtype", "mask", "pass")
WIDTH = 320  # these tables are wider than the others


def row(
    case: Case,
    names: Sequence[str],
    timings: Mapping[str, Timing],
    memory: Mapping[str, int],
    max_error: Mapping[str, float],
    failures: Mapping[str, str],
    sustained: Mapping[str, Timing] | None = None,
) -> dict[str, Any]:
    """A row as plain numbers; None for what was not measured. Ratios above 1: ours is faster."""
    rates = _rates(case, names, timings)
    ms = rates["ms"]
    return {
        **asdict(case),
        "lengths": list(case.lengths),
        "flop": case.flop,
        **rates,
        "sustained": None if sustained is None else _rates(case, names, sustained),
        "ratio_fa2": _ratio(ms.get(FA2), ms[OURS]),
        "ratio_flex": _ratio(ms.get(FLEX), ms[OURS]),
        "beside": {name: _beside(case, other, name, timings) for name, other in case.beside().items()},
        "preparation": _preparation(ms, timings),
        "spread": {name: timings[name].spread if name in timings else None for name in names},
        "peak_extra_bytes": {name: memory.get(name) if name in timings else None for name in names},
        "max_error": {name: max_error.get(name) for name in names},
        "failures": dict(failures),
    }


def _rates(case: Case, names: Sequence[str], timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Times and rates of the contestants, and the best peer's time to ours."""
    ms = {name: timings[name].median_s * 1e3 if name in timings else None for name in names}
    best = min((ms[name] for name in names if name != OURS and ms[name] is not None), default=None)
    return {
        "ms": ms,
        "tflops": {name: None if time is None else case.flop / time * 1e-9 for name, time in ms.items()},
        "ratio_best": _ratio(best, ms[OURS]),
    }


def _beside(case: Case, other: Case, name: str, timings: Mapping[str, Timing]) -> dict[str, Any] | None:
    """What ours does in another call, and the ratio of the row's rate to that one's; None where it did not run."""
    if name not in timings:
        return None
    ms = timings[name].median_s * 1e3
    rate = other.flop / ms * 1e-9
    ratio = case.flop / (timings[OURS].median_s * 1e12) / rate if OURS in timings else None
    return {"shape": other.shape, "ms": ms, "tflops": rate, "ratio": ratio}


def _preparation(ms: Mapping[str, float | None], timings: Mapping[str, Timing]) -> dict[str, float | None]:
    """Milliseconds to make what a mask needs once, beside the row's own call of ours, and the ratio to FlexAttention with both."""
    tables, block_mask = (timings[name].median_s * 1e3 if name in timings else None for name in (TABLES, BLOCK_MASK))
    return {
        "tables_ms": tables,
        "block_mask_ms": block_mask,
        "tables_share": None if tables is None or ms[OURS] is None else tables / ms[OURS],
        "ratio_flex": _ratio(_sum(ms.get(FLEX), block_mask), _sum(ms[OURS], tables)),
    }


def _sum(call_ms: float | None, once_ms: float | None) -> float | None:
    return None if call_ms is None or once_ms is None else call_ms + once_ms


def _ratio(peer_ms: float | None, our_ms: float | None) -> float | None:
    return None if peer_ms is None or our_ms is None else peer_ms / our_ms


# What the speed table has after the contestants: a column's name, and its cell from a row.
RATIOS: dict[str, Callable[[dict[str, Any]], str]] = {
    "to best": lambda row: _cell(row["ratio_best"], ".2f", "x"),
    "to fa2": lambda row: _cell(row["ratio_fa2"], ".2f", "x"),
    "to flex": lambda row: _cell(row["ratio_flex"], ".2f", "x"),
    "to flex, with tables": lambda row: _cell(row["preparation"]["ratio_flex"], ".2f", "x"),
    **{
        f"to {name}": lambda row, name=name: _cell((row["beside"].get(name) or {}).get("ratio"), ".2f", "x")
        for name in BESIDE
    },
    "tables": lambda row: _pair(row["preparation"]["tables_ms"], ".3f", row["preparation"]["tables_share"], ".1%"),
    "block mask": lambda row: _cell(row["preparation"]["block_mask_ms"], ".3f"),
    "spread": lambda row: _cell(row["spread"][OURS], ".0%"),
}


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the speed, then memory and accuracy, then why ours could not run somewhere."""
    rows, names = results["rows"], tried(results["rows"], results["contestants"])
    ratios = [
        name for name, cell in RATIOS.items() if name.startswith("to best") or any(cell(row) != "-" for row in rows)
    ]
    steady = [row["sustained"] for row in rows if row["sustained"]]
    slower = [_is_slower(row["ratio_best"]) for row in rows]
    tables = [(speed_title(results, ratios), (*CASE_HEADER, *names, *ratios), speed_cells(rows, names, ratios), slower)]
    if steady:
        slower_then = [_is_slower(rates["ratio_best"]) for rates in steady]
        tables.append((SUSTAINED_TITLE, (*CASE_HEADER, *names, "to best"), sustained_cells(rows, names), slower_then))
    tables.append((MEMORY_TITLE, (*CASE_HEADER, *names), memory_cells(rows, names), slower))
    for title, header, lines, marked in tables:
        if markdown:
            print(markdown_table(title, header, lines))
        else:
            print_table(title, header, lines, left=range(len(CASE_HEADER)), marked=marked, width=WIDTH)
    for note in notes(rows):
        print(note)


def _is_slower(ratio: float | None) -> bool:
    """Whether a peer was quicker than ours."""
    return ratio is not None and ratio < 1


def tried(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """The contestants that were not skipped in every row."""
    return [name for name in names if not all(row["failures"].get(name, "").startswith("skipped") for row in rows)]


MEMORY_TITLE = "MiB that a call allocates / largest error against fp64, of out or of the gradients"
SUSTAINED_TITLE = "The same without a pause, as in training: milliseconds / TFLOP/s"
MEANINGS = {
    f"to {DENSE}": "our rate beside that of a dense batch of as much work",
    f"to {PLAIN}": "our rate beside that of the same call without the option",
    f"to {CAUSAL}": "our rate on visible scores beside that of a causal call of the same length",
    f"to {VARLEN}": "our rate beside that of the packed call that computes the same",
    "tables": "milliseconds to make what a mask needs once, and their share of the call",
    "block mask": "milliseconds to make FlexAttention's",
    "spread": "that of ours",
}


def speed_title(results: dict[str, Any], ratios: Sequence[str]) -> str:
    about = (
        f"Milliseconds / TFLOP/s on {results['machine']}, {results['backend']}, torch {results['torch']}, "
        f"CUDA {results['cuda']}, cuDNN {results['cudnn']}"
    )
    return "; ".join([about, *(f"{name}: {MEANINGS[name]}" for name in ratios if name in MEANINGS)])


def speed_cells(
    rows: Sequence[dict[str, Any]], names: Sequence[str], ratios: Iterable[str] = RATIOS
) -> list[list[str]]:
    return [
        [
            *_case_cells(row),
            *(_pair(row["ms"][name], ".3f", row["tflops"][name], ".1f") for name in names),
            *(RATIOS[name](row) for name in ratios),
        ]
        for row in rows
    ]


def sustained_cells(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    return [
        [
            *_case_cells(row),
            *(_pair(steady["ms"][name], ".3f", steady["tflops"][name], ".1f") for name in names),
            _cell(steady["ratio_best"], ".2f", "x"),
        ]
        for row in rows
        if (steady := row["sustained"])
    ]


def in_one_line(row: dict[str, Any]) -> str:
    """A row and the rates of its contestants."""
    rates = [f"{name} {rate:.1f}" for name, rate in row["tflops"].items() if rate is not None]
    return " ".join(_case_cells(row)) + ": " + (", ".join(rates) + " TFLOP/s" if rates else "nothing could run")


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
        for name in (OURS, *BESIDE, TABLES, "reference")
        if name in row["failures"]
    ]
