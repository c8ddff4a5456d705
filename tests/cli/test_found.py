"""The figures of an experiment that are compared: each with its spread; no difference within the spread."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from tiny_experiments import module_of

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from flashattn_ext_lab.experiments import EXPERIMENTS, run_experiment
from flashattn_ext_lab.experiments.harness import Context
from flashattn_ext_lab.experiments.result import (
    NOT_MEASURED,
    PASSES,
    Column,
    Figure,
    Result,
    alone,
    difference,
    measured,
    quotient,
)

TIMED = set(EXPERIMENTS) - {"memory", "traffic", "profile"}  # the others count instead


def compared(name: str, result: Result) -> str:
    """The sentence on the rows of a result."""
    result = replace(result, comparisons=[])
    module_of(name).compare(result)
    return result.found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_findings_contain_their_spread(results: dict[str, Result], name: str) -> None:
    sentence = results[name].found
    assert all(each.what and each.ours for each in results[name].comparisons)
    assert sentence == compared(name, results[name]) and sentence.endswith(".") and "\n" not in sentence
    assert re.search(r"\d", sentence) and ("±" in sentence) == (name in TIMED)
    assert (NOT_MEASURED in sentence) == (
        name == "memory"
    )  # of the article's S = 8192, where the tiny sizes end at 2048


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_findings_name_missing_measurements(results: dict[str, Result], name: str) -> None:
    result = results[name]
    names = ("S", "D", "dropout")  # requested sizes, not measurements
    rows = [
        [
            cell if column.name in names or isinstance(cell, str) else None
            for column, cell in zip(result.columns, row, strict=True)
        ]
        for row in result.rows
    ]
    sentence = compared(name, replace(result, rows=rows))
    assert NOT_MEASURED in sentence and "±" not in sentence


def test_a_failure_is_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(context: Context, sizes: object, result: Result) -> None:
        raise OSError("no")

    monkeypatch.setattr(module_of("matmul"), "measure", measure)
    assert run_experiment("matmul", Context(torch.device("cpu"), quick=True)).found == "It failed: OSError: no."


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (Figure(4.0, 0.2), Figure(2.0, 0.1), "2x ± 10 %"),
        (Figure(2.0, 0.1), Figure(4.0, 0.2), "0.5x ± 10 %"),
        (Figure(2.1, 0.1), Figure(2.0, 0.1), "within the spread (± 10 %)"),
        (Figure(2.001, 0.0), Figure(2.0, 0.002), "within the spread (± 1 %)"),
        (Figure(1.0, 0.5), Figure(3.0, 1.6), "within the spread (± 104 %)"),
        (Figure(3.0, 1.6), Figure(1.0, 0.5), "within the spread (± 104 %)"),
        (Figure(2.1, 0.1), None, NOT_MEASURED),
        (None, Figure(2.1, 0.1), NOT_MEASURED),
    ],
)
def test_a_quotient_has_the_spread_of_both(one: Figure | None, other: Figure | None, text: str) -> None:
    assert quotient(one, other) == text


def test_differences_and_single_figures() -> None:
    assert difference(Figure(2.0, 0.25), Figure(1.0, 0.5), ".2f") == "+1.00 ± 0.75"
    assert difference(Figure(1.5, 0.25), Figure(1.0, 0.5), ".2f") == "within the spread (± 0.75)"
    assert difference(None, Figure(1.0, 0.5), ".2f") == alone(None, "GB/s") == NOT_MEASURED
    assert alone(Figure(1234.0, 24.0), "GB/s") == "1230 GB/s ± 2 %"
    assert alone(Figure(200.0, 3.0), "GB/s") == "200 GB/s ± 2 %"
    assert alone(Figure(200.0, 438.0), "GB/s") == "unknown (± 219 %)"


def test_rates_take_the_spread_of_their_times() -> None:
    columns = [Column(name) for name in ("n", "time", "time spread", "rate")]
    result = Result("", "", columns, [[1, 8.0, 50.0, 100.0], [2, 9.0, None, 100.0]])
    assert measured(result, "time", n=1) == Figure(8.0, 2.0) and measured(result, "rate", "time", n=1) == Figure(
        100, 25
    )
    assert measured(result, "time", n=2) is None and measured(result, "time", n=3) is None


def test_rates_of_every_attention_are_drawn(results: dict[str, Result]) -> None:
    scaling = module_of("scaling")
    result = results["scaling"]
    assert result.plot.y == "TFLOP/s"
    assert set(result.plot.series) == {f"{name}, {direction}" for name in scaling.NAMES for direction in PASSES}
    for direction in PASSES:
        expected = dict(result.points("S", "rate", pass_=direction))
        assert dict(result.plot.series[f"ours, {direction}"]) == pytest.approx(expected)
        ours, sdpa = (dict(result.plot.series[f"{name}, {direction}"]) for name in ("ours", "torch SDPA"))
        ratios = dict(result.points("S", "to SDPA", pass_=direction))
        assert {S: ours[S] / sdpa[S] for S in ours} == pytest.approx(ratios)


def test_no_rate_is_called_a_limit(results: dict[str, Result]) -> None:
    for name in ("scaling", "dtypes"):
        assert any("reference" in note and "more than 100 % is possible" in note for note in results[name].notes)
    assert "eiling" not in json.dumps([result.to_json() for result in results.values()])
