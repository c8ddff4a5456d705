"""The sentence that says what an experiment found is made from the numbers of its table."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tiny_experiments import module_of

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from flashattn_ext.cli.experiments import EXPERIMENTS
from flashattn_ext.cli.experiments.findings import FINDINGS, finding
from flashattn_ext.cli.experiments.result import Column, Result

NOTHING = "The numbers that a finding needs were not measured here."


def test_every_experiment_has_a_finding() -> None:
    assert FINDINGS.keys() == EXPERIMENTS.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_finding_is_one_sentence_of_the_table(results: dict[str, Result], name: str) -> None:
    sentence = finding(results[name])
    assert sentence != NOTHING and sentence.endswith(".") and ". " not in sentence and "\n" not in sentence
    assert re.search(r"\d", sentence)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_was_not_measured_is_not_found(results: dict[str, Result], name: str) -> None:
    result = results[name]
    words = [[None if isinstance(cell, float) else cell for cell in row] for row in result.rows]
    for rows in (words, []):
        assert finding(replace(result, rows=rows)) == NOTHING
    assert finding(Result(name, "")) == NOTHING
    assert finding(replace(result, error="OSError: no")) == "It failed: OSError: no."


def test_speed_over_lengths() -> None:
    columns = [Column(name) for name in ("pass", "S", "to unfused", "to SDPA", "rate")]
    rows = [
        ["forward", 64, 2.0, 0.5, 7.0],
        ["forward", 128, 4.0, 1.25, 50.0],
        ["forward+backward", 128, 3.0, 1.5, 40.0],
    ]
    sentence = finding(Result("scaling", "", columns, rows))
    assert "At S = 128 ours runs at 50 and 40 TFLOP/s" in sentence and "4 and 3 times as fast" in sentence
    assert "0.50 to 1.50 times as fast as PyTorch's own" in sentence


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ((2.0, 3.0), "The default tile, 64 x 64, is the quickest of those that were measured."),
        ((4.0, 3.0), "The quickest tile, 128 x 128, takes 75.0 % of the time of the default one, 64 x 64 (default)."),
        ((3.1, 3.0), "(default), a difference within the spread of the calls."),
    ],
)
def test_quickest_tile_and_its_doubt(times: tuple[float, float], sentence: str) -> None:
    columns = [Column("queries x keys"), Column("time"), Column("time spread")]
    rows = [["64 x 64 (default)", times[0], 10.0], ["128 x 128", times[1], 10.0]]
    assert finding(Result("tiles", "", columns, rows)).endswith(sentence)


def test_rates_of_every_attention_are_drawn(results: dict[str, Result]) -> None:
    scaling = module_of("scaling")
    result = results["scaling"]
    assert result.plot.y == "TFLOP/s"
    assert set(result.plot.series) == {f"{name}, {direction}" for name in scaling.NAMES for direction in scaling.PASSES}
    for direction in scaling.PASSES:
        expected = dict(result.points("S", "rate", **{"pass": direction}))
        assert dict(result.plot.series[f"ours, {direction}"]) == pytest.approx(expected)
        ours, sdpa = (dict(result.plot.series[f"{name}, {direction}"]) for name in ("ours", "torch SDPA"))
        ratios = dict(result.points("S", "to SDPA", **{"pass": direction}))
        assert {S: ours[S] / sdpa[S] for S in ours} == pytest.approx(ratios)


def test_findings_survive_json(results: dict[str, Result]) -> None:
    for result in results.values():
        assert finding(Result.from_json(json.loads(json.dumps(result.to_json())))) == finding(result)


def test_scores_and_masks_are_found() -> None:
    columns = ["option", "pass", "S", "cost of the option", "to unfused", "memory of ours", "memory of unfused"]
    rows = [
        [option, direction, S, cost, 4.0, 1.0, 5.0]
        for option, cost in (("softcap", 7.0), ("relative bias", -1.0))
        for direction in ("forward", "forward+backward")
        for S in (64, 128)
    ]
    sentence = finding(Result("scores", "", [Column(name) for name in columns], rows))
    assert sentence.startswith("At S = 128 softcap makes a forward of ours 7 % slower and a relative bias 1 % quicker;")
    assert "4 and 4 times as fast" in sentence and "80 and 80 % less memory" in sentence
    columns = ["mask", "visible", "of causal", "to SDPA", "memory of ours", "memory of torch SDPA"]
    rows = [["documents", 5.0, 91.0, 12.0, 1.0, 4.0], ["prefix", 53.0, 99.0, 3.0, 1.0, 2.0]]
    sentence = finding(Result("masks", "", [Column(name) for name in columns], rows))
    assert "With 5 to 53 % of the scores visible, ours computes those at 91 to 99 % of the rate" in sentence
    assert "3.00 to 12.00 times" in sentence and "50 to 75 % less memory" in sentence
