"""The command `experiments`: its output files, and its messages when something fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_experiments import NASTY, PICTURES, PNG, a_result, module_of

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from flashattn_ext_lab import experiments
from flashattn_ext_lab.experiments import EXPERIMENTS, render
from flashattn_ext_lab.experiments.harness import Context
from flashattn_ext_lab.experiments.result import Result
from flashattn_ext_lab.main import main


def test_an_experiment_that_raises_leaves_the_others(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(context: Context, sizes: object, result: Result) -> None:
        raise RuntimeError(NASTY)

    three = {name: EXPERIMENTS[name] for name in ("matmul", "causal", "layout")}
    # A new dictionary: keys that are deleted and put back stand at the end, and other tests rely on the order.
    monkeypatch.setattr(experiments, "EXPERIMENTS", three)
    monkeypatch.setattr(module_of("causal"), "measure", fails)
    (tmp_path / "causal.png").write_bytes(PNG)  # of an earlier run
    assert main(["experiments", "all", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "causal failed: RuntimeError: <script>" in shown and "layout: [B, S, H, D] and" in shown
    assert Result.from_json(json.loads((tmp_path / "causal.json").read_text(encoding="utf-8"))).error.startswith(
        "RuntimeError"
    )
    assert not (tmp_path / "causal.png").exists()
    assert main(["report", str(tmp_path)]) == 0
    assert "<script" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "**Failed**: RuntimeError: &lt;script&gt;" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_unknown_experiment_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["experiments", "none"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and all(name in error for name in [*EXPERIMENTS, "all"])


@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_missing_device_gets_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["experiments", "matmul", "--device", name, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"flashattn-ext experiments: --device got '{name}'") and error.count("\n") == 1


def test_unwritable_directory_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["experiments", "matmul", "--device", "cpu", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "choose another directory" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "package"), [("experiments matmul", "matplotlib"), ("report .", "jinja2")])
def test_missing_package_gets_one_line(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert (
        f"needs the package {package}" in error
        and 'pip install rich matplotlib jinja2 numpy (in a checkout: pip install ".[cli]")' in error
    )
    assert error.count("\n") == 1


def test_json_round_trip(results: dict[str, Result]) -> None:
    for result in [*results.values(), a_result(), Result("matmul", "empty")]:
        assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    with pytest.raises(ValueError, match="expected the format"):
        Result.from_json({**a_result().to_json(), "format": "other"})


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_show_data(out: Path, results: dict[str, Result], name: str) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = out / f"{name}.png"
    assert path.read_bytes().startswith(PNG)
    picture = pyplot.imread(path)[..., :3]
    saturation = picture.max(axis=-1) - picture.min(axis=-1)
    assert (saturation > 0.3).sum() > 200  # coloured curves
    series = results[name].plot.series
    assert len(series) > 1 and all(series.values())


def test_texts_of_cells() -> None:
    result = a_result()
    assert result.texts() == [["1", "2.50", ""], ["2", "-", "why"]]
    assert [column.heading for column in result.columns] == ["n", "time [ms]", "remark"]
    assert result.value("time", n=1) == 2.5 and result.value("time", n=3) is None
    assert result.points("n", "time") == [(1, 2.5)]
    assert render.shown_table(replace(result, rows=[[1, None, ""]])) == (["n"], [["1"]])


def test_everything_leaves_nothing_temporary(out: Path) -> None:
    expected = {*(f"{name}.json" for name in EXPERIMENTS), *(f"{name}.png" for name in PICTURES)}
    expected |= {f"profile_{name}.trace.json" for name in ("ours", "unfused")}
    if importlib.util.find_spec("transformers"):
        expected |= {f"models_Gemma_2_2x20_{name}.profile.txt" for name in ("ours", "eager")}
    assert {path.name for path in out.iterdir()} == expected | {"report.html", "report.md"}


def test_an_interrupted_run_of_models_keeps_its_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = module_of("models")
    made = []

    def make_one(*_: object) -> None:
        made.append(1)
        if len(made) > 1:
            raise KeyboardInterrupt
        raise ImportError("no model")

    monkeypatch.setattr(models, "make_model", make_one)
    with pytest.raises(KeyboardInterrupt):
        experiments.run_experiment("models", Context(torch.device("cpu"), True, tmp_path))
    kept = Result.from_json(json.loads((tmp_path / "models.json").read_text(encoding="utf-8")))
    assert kept.rows and set(kept.column("model")) == {"Llama"}
