"""The rows of `bench cuda` as plain numbers and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .bench_cases import BESIDE, CAUSAL, DENSE, FA2, OURS, PLAIN, VARLEN, Case
from .bench_contestants import BLOCK_MASK, TABLES
from .console import Columns, fields, print_rows, text_of
from .flex import FLEX
from .timing import Timing, divided

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
        **{"lengths": list(case.lengths), "shape": case.shape, "option": case.mask, "direction": case.direction},
        "flop": case.flop,
        **rates,
        "sustained": None if sustained is None else _rates(case, names, sustained),
        "ratio_fa2": divided(ms.get(FA2), ms[OURS]),
        "ratio_flex": divided(ms.get(FLEX), ms[OURS]),
        "beside": {name: _beside(case, other, name, timings) for name, other in case.beside().items()},
        "preparation": _preparation(ms, timings),
        "spread": {name: timings[name].spread if name in timings else None for name in names},
        "peak_extra_bytes": {name: memory.get(name) if name in timings else None for name in names},
        "max_error": {name: max_error.get(name) for name in names},
        "failures": dict(failures),
    }


def _rates(case: Case, names: Sequence[str], timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Times and rates of the contestants, and the ratio of the best peer's time to ours."""
    ms = {name: timings[name].median_s * 1e3 if name in timings else None for name in names}
    best = min((ms[name] for name in names if name != OURS and ms[name] is not None), default=None)
    tflops = {name: None if time is None else case.flop / time * 1e-9 for name, time in ms.items()}
    return {"ms": ms, "tflops": tflops, "ratio_best": divided(best, ms[OURS])}


def _beside(case: Case, other: Case, name: str, timings: Mapping[str, Timing]) -> dict[str, Any] | None:
    """Our time in a reference call, and the ratio of the row's rate to that one's; None where it did not run."""
    if name not in timings:
        return None
    ms = timings[name].median_s * 1e3
    rate = other.flop / ms * 1e-9
    ratio = case.flop / (timings[OURS].median_s * 1e12) / rate if OURS in timings else None
    return {"shape": other.shape, "ms": ms, "tflops": rate, "ratio": ratio}


def _preparation(ms: Mapping[str, float | None], timings: Mapping[str, Timing]) -> dict[str, float | None]:
    """Milliseconds to build the tables of a mask once, relative to our call, and the ratio to FlexAttention, both with theirs."""
    tables, block_mask = (timings[name].median_s * 1e3 if name in timings else None for name in (TABLES, BLOCK_MASK))
    return {
        "tables_ms": tables,
        "block_mask_ms": block_mask,
        "tables_share": divided(tables, ms[OURS]),
        "ratio_flex": divided(_sum(ms.get(FLEX), block_mask), _sum(ms[OURS], tables)),
    }


def _sum(call_ms: float | None, once_ms: float | None) -> float | None:
    return None if call_ms is None or once_ms is None else call_ms + once_ms


def _pair(first: float | None, first_form: str, second: float | None, second_form: str) -> str:
    if first is None and second is None:
        return "-"
    return f"{text_of(first, first_form)} / {text_of(second, second_form)}"


ABOUT = fields({"set": "set", "BxHxSxD": "shape", "dtype": "dtype", "mask": "option", "pass": "direction"})
RATIOS: Columns = {
    **fields({"to best": "ratio_best", "to fa2": "ratio_fa2", "to flex": "ratio_flex"}, ".2f", "x"),
    "to flex, with tables": lambda row: text_of(row["preparation"]["ratio_flex"], ".2f", "x"),
    **{
        f"to {name}": lambda row, name=name: text_of((row["beside"].get(name) or {}).get("ratio"), ".2f", "x")
        for name in BESIDE
    },
    "tables": lambda row: _pair(row["preparation"]["tables_ms"], ".3f", row["preparation"]["tables_share"], ".1%"),
    "block mask": lambda row: text_of(row["preparation"]["block_mask_ms"], ".3f"),
    "spread": lambda row: text_of(row["spread"][OURS], ".0%"),
}
MEANINGS = {
    f"to {DENSE}": "our rate relative to a dense batch with the same work",
    f"to {PLAIN}": "our rate relative to the same call without the option",
    f"to {CAUSAL}": "our rate on visible scores relative to a causal call of the same length",
    f"to {VARLEN}": "our rate relative to the equivalent packed call",
    "tables": "milliseconds to build a mask's tables once, and their fraction of the call",
    "block mask": "milliseconds to build FlexAttention's",
    "spread": "of our calls",
}
MEMORY_TITLE = "MiB that a call allocates / largest error against fp64, of out or of the gradients"
SUSTAINED_TITLE = "The same without a pause, as in training: milliseconds / TFLOP/s"


def speed_columns(names: Sequence[str], ratios: Iterable[str] = RATIOS) -> Columns:
    rates = {name: lambda row, name=name: _pair(row["ms"][name], ".3f", row["tflops"][name], ".1f") for name in names}
    return {**ABOUT, **rates, **{name: RATIOS[name] for name in ratios}}


def memory_columns(names: Sequence[str]) -> Columns:
    def text(row: dict[str, Any], name: str) -> str:
        return _pair(divided(row["peak_extra_bytes"][name], 2**20), ".1f", row["max_error"][name], ".1e")

    return {**ABOUT, **{name: lambda row, name=name: text(row, name) for name in names}}


def sustained_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that were timed without pauses, with those times in place of the others."""
    return [{**row, **row["sustained"]} for row in rows if row["sustained"]]


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the speed, then memory and accuracy, then why ours could not run somewhere."""
    rows = results["rows"]
    skipped = [{name for name, reason in row["failures"].items() if reason.startswith("skipped")} for row in rows]
    names = [name for name in results["contestants"] if not all(name in of for of in skipped)]
    ratios = [name for name, text in RATIOS.items() if name == "to best" or any(text(row) != "-" for row in rows)]
    about = (
        f"Milliseconds / TFLOP/s on {results['machine']}, {results['backend']}, torch {results['torch']}, "
        f"CUDA {results['cuda']}, cuDNN {results['cudnn']}"
    )
    title = "; ".join([about, *(f"{name}: {MEANINGS[name]}" for name in ratios if name in MEANINGS)])
    tables = [(title, speed_columns(names, ratios), rows)]
    if steady := sustained_rows(rows):
        tables.append((SUSTAINED_TITLE, speed_columns(names, ["to best"]), steady))
    tables.append((MEMORY_TITLE, memory_columns(names), rows))
    for title, columns, shown in tables:
        slower = [row["ratio_best"] is not None and row["ratio_best"] < 1 for row in shown]
        print_rows(title, columns, shown, markdown=markdown, marked=slower, width=WIDTH)
    for note in notes(rows):
        print(note)


def _about(row: dict[str, Any]) -> str:
    return " ".join(str(text(row)) for text in ABOUT.values())


def in_one_line(row: dict[str, Any]) -> str:
    """A row and the rates of its contestants."""
    rates = [f"{name} {rate:.1f}" for name, rate in row["tflops"].items() if rate is not None]
    return f"{_about(row)}: " + (", ".join(rates) + " TFLOP/s" if rates else "nothing could run")


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where ours or the reference failed, and why. A peer's reasons are in the JSON."""
    names = (OURS, *BESIDE, TABLES, "reference")
    failed = [(row, name) for row in rows for name in names if name in row["failures"]]
    return [f"{_about(row)}: {name}: {row['failures'][name]}" for row, name in failed]
