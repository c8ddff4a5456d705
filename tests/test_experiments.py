"""`experiments` and `report` with tiny sizes on the CPU: what the tables, files and pages hold, and what
happens when something fails. No times are judged.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import flashattn_ext
from flashattn_ext.cli import report
from flashattn_ext.cli.experiments import EXPERIMENTS, render, run_experiment
from flashattn_ext.cli.experiments import context as shared
from flashattn_ext.cli.experiments.context import Context, Inputs
from flashattn_ext.cli.experiments.result import Column, Comparison, Plot, Result
from flashattn_ext.cli.main import main
from flashattn_ext.cli.timing import Timing, time_interleaved

TINY: dict[str, dict[str, Any]] = {
    "matmul": dict(n=(32, 64), copy_mib=(1,)),
    "scaling": dict(B=1, H=2, S=(32, 64), D=16, dtype="fp32"),
    "causal": dict(B=1, H=2, S=64, D=16, dtype="fp32"),
    "layout": dict(shapes=((1, 2, 32, 16), (2, 1, 48, 24)), dtype="fp32"),
    "alignment": dict(B=1, H=1, S=32, dtype="fp32"),
    "dtypes": dict(B=1, H=2, S=64, D=16),
    "memory": dict(B=1, H=1, S=(1024, 2048), D=64, dtype="fp32"),
}
NASTY = "<script>alert('1')</script> & \"quoted\" | *pipe*\nnew line"
PNG = b"\x89PNG\r\n\x1a\n"


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"flashattn_ext.cli.experiments.{name}")


SIZES_FOR = {name: module_of(name).sizes_for for name in EXPERIMENTS}


def tiny_sizes(name: str) -> Any:
    return replace(module_of(name).GPU_SIZES, **TINY[name])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These calls are too small to share, and threads that wait for each other are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in EXPERIMENTS:
            patch.setattr(module_of(name), "sizes_for", lambda context, name=name: tiny_sizes(name))
        patch.setattr(Context, "ceiling", lambda self, dtype: 1e12)
        patch.setattr(shared, "CPU_QUICK_SECONDS", 0.02)
        yield


@pytest.fixture(scope="module")
def out(small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `experiments all`, with its reports."""
    directory = tmp_path_factory.mktemp("experiments")
    assert main(["experiments", "all", "--device", "cpu", "--quick", "--threads", "1", "--out", str(directory)]) == 0
    assert main(["report", str(directory)]) == 0
    return directory


@pytest.fixture
def results(out: Path) -> dict[str, Result]:
    return {name: Result.from_json(json.loads((out / f"{name}.json").read_text())) for name in EXPERIMENTS}


def a_result(**changes: Any) -> Result:
    result = Result(
        "matmul",
        "a title",
        [Column("n"), Column("time", "ms", ".2f"), Column("remark")],
        [[1, 2.5, ""], [2, None, "why"]],
        notes=["a note"],
        comparisons=[Comparison("speed", "2x", "3x")],
        plot=Plot("line", "n", "ms", {"time": [(1, 2.5)]}),
        machine={"device": "a machine"},
        command="a command",
    )
    return replace(result, **changes)


# Tables


def test_tiny_sizes_cover_every_experiment() -> None:
    assert set(TINY) == set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_table(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert result.name == name and not result.error and result.rows and result.notes
    assert all(len(row) == len(result.columns) for row in result.rows)
    assert set(result.column("remark")) == {""}
    for column in result.columns:
        numbers = [cell for cell in result.column(column.name) if isinstance(cell, (int, float))]
        assert all(map(math.isfinite, numbers))
        if column.unit in ("ms", "us", "MiB", "x", "TFLOP/s", "GB/s"):
            assert numbers and all(number > 0 for number in numbers)
        assert not (column.form and not column.unit) or column.name.startswith("error")
    assert "scaled down for this run" in result.notes[0] and "GPU" in result.notes[1]
    assert result.command == f"flashattn-ext experiments {name} --device cpu --quick --threads 1"
    assert result.machine["torch"] == torch.__version__ and result.machine["threads"] == "1"


@pytest.mark.parametrize(
    ("name", "rows"),
    [("matmul", 7), ("scaling", 4), ("causal", 4), ("layout", 6), ("alignment", 16), ("dtypes", 6), ("memory", 4)],
)
def test_rows(results: dict[str, Result], name: str, rows: int) -> None:
    assert len(results[name].rows) == rows


@pytest.mark.parametrize("name", ["scaling", "causal", "layout", "alignment", "memory"])
def test_figures_of_the_article(results: dict[str, Result], name: str) -> None:
    comparisons = results[name].comparisons
    assert comparisons and all(comparison.article and comparison.ours for comparison in comparisons)
    unmeasured = [comparison.what for comparison in comparisons if comparison.ours == shared.NOT_MEASURED]
    assert unmeasured == (["memory saved at S=8192"] if name == "memory" else [])


def test_ratios_are_those_of_the_times(results: dict[str, Result]) -> None:
    scaling = results["scaling"]
    for ours, unfused, ratio in zip(*map(scaling.column, ("ours", "unfused", "to unfused")), strict=True):
        assert ratio == pytest.approx(unfused / ours)
    causal = results["causal"]
    for full, masked, cost in zip(*map(causal.column, ("full", "causal", "cost of the mask")), strict=True):
        assert cost == pytest.approx(100 * (masked / full - 1))
    alignment = results["alignment"]
    for direction in ("forward", "forward+backward"):
        slow, fast = (alignment.value("our rate", D=D, **{"pass": direction}) for D in (129, 128))
        assert alignment.value("our loss", D=129, **{"pass": direction}) == pytest.approx(100 * (1 - slow / fast))
    assert alignment.value("beside D", D=64) is None and alignment.value("verdict", D=129) in (
        "ok",
        "unclear",
        "defect",
    )


@pytest.mark.parametrize(
    ("of_medians", "of_quickest", "verdict"),
    [(19.0, 5.0, "ok"), (21.0, 19.0, "unclear"), (-3.0, 40.0, "unclear"), (25.0, 21.0, "defect"), (None, None, "")],
)
def test_verdict(of_medians: float | None, of_quickest: float | None, verdict: str) -> None:
    assert module_of("alignment").verdict(of_medians, of_quickest) == verdict


def test_errors_of_dtypes_are_those_of_their_precision(results: dict[str, Result]) -> None:
    dtypes = results["dtypes"]
    for dtype, limit in (("fp32", 1e-5), ("fp16", 2e-2), ("bf16", 2e-1)):
        for direction in ("forward", "forward+backward"):
            error = dtypes.value("error of ours", dtype=dtype, **{"pass": direction})
            assert 0 < error < limit
    assert any("fp8: not measured" in note for note in dtypes.notes)


def test_memory_is_quadratic_without_fusion(results: dict[str, Result]) -> None:
    """Two matrices of scores are 32 MiB at S=2048, ours is some results."""
    memory = results["memory"]
    for direction in ("forward", "forward+backward"):
        where = {"pass": direction, "S": 2048}
        assert memory.value("unfused", **where) > 30
        assert memory.value("ours", **where) < memory.value("unfused", **where) / 2
        assert memory.value("unfused", **where) > 2 * memory.value("unfused", **{**where, "S": 1024})


@pytest.mark.parametrize("causal", [False, True])
def test_attentions_agree(causal: bool) -> None:
    context = Context(torch.device("cpu"), quick=True)
    inputs = Inputs.random(context, (2, 3, 33, 16), "fp32")
    for direction in shared.PASSES:
        expected = inputs.call(shared.SDPA, direction, causal)()
        for name in (shared.OURS, shared.UNFUSED):
            torch.testing.assert_close(inputs.call(name, direction, causal)(), expected)


# Timing


def test_inputs_are_fresh_every_round() -> None:
    context = Context(torch.device("cpu"), quick=True)
    x = context.randn(8, dtype="bf16", requires_grad=True)
    seen = []
    timings = context.time({"a": lambda: seen.append(x.detach().float().sum().item())}, (x,), {})
    assert len(seen) == timings["a"].rounds + 1  # the warm-up
    assert len(set(seen)) > len(seen) // 2


def test_a_failure_drops_out_of_the_turns() -> None:
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        if (name == "b" and order.count("b") == 2) or name == "d":
            raise ValueError("no more\nof this")

    failures: dict[str, str] = {}
    calls = {name: lambda name=name: call(name) for name in "abcd"}
    timings = time_interleaved(calls, budget_s=0, min_rounds=2, clock=lambda call: call() or 0.5, failures=failures)
    assert "".join(order) == "abcd" + "abc" + "ca"
    assert failures == {"b": "ValueError: no more", "d": "ValueError: no more"}
    assert timings == {name: Timing(0.5, 0.5, 0.5, 2) for name in "ac"}
    with pytest.raises(ValueError, match="no more"):
        time_interleaved({"d": calls["d"]}, budget_s=0, min_rounds=1)
    assert time_interleaved({"d": calls["d"]}, budget_s=9, min_rounds=1, failures=failures) == {}


def test_clock_of_a_gpu_times_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts: list[int] = []

    def burst_ms(call: object, launches: int) -> float:
        bursts.append(launches)
        return 2.0 * launches

    monkeypatch.setattr(shared, "burst_ms", burst_ms)
    assert shared.event_clock(lambda: None) == pytest.approx(2e-3)
    assert bursts == [1, 3]  # 5 ms are a burst
    assert Context(torch.device("cuda"), quick=True)._clock() is shared.event_clock


# What a device cannot do


def test_sizes_of_a_gpu_are_those_of_the_article() -> None:
    context = Context(torch.device("cuda"), quick=False)
    for name in EXPERIMENTS:
        sizes = SIZES_FOR[name](context)
        assert sizes == module_of(name).GPU_SIZES
        assert shared.size_notes(sizes, sizes)[0].startswith("sizes: B = 4" if name == "scaling" else "sizes: ")


def test_memory_without_statistics_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "on_cpu", False)
    result = module_of("memory").measure(Context(torch.device("meta"), quick=True), tiny_sizes("memory"))
    assert set(result.column("ours")) == set(result.column("saved")) == {None}
    assert "no allocator statistics of meta" in result.value("remark", S=1024)


def test_one_attention_that_fails_leaves_the_others(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("16 GiB\nmore")

    monkeypatch.setitem(shared.ATTENTIONS, shared.UNFUSED, fails)
    result = run_experiment("scaling", Context(torch.device("cpu"), quick=True))
    assert not result.error
    assert set(result.column("remark")) == {"unfused: OutOfMemoryError: 16 GiB"}
    assert set(result.column("unfused")) == set(result.column("to unfused")) == {None}
    assert all(ms > 0 for name in ("ours", "torch SDPA") for ms in result.column(name))
    assert [comparison.ours for comparison in result.comparisons] == [shared.NOT_MEASURED] * 2
    json.dumps(result.to_json(), allow_nan=False)


def test_products_that_take_too_long_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of("matmul"), "LIMIT_S", 0.0)
    result = run_experiment("matmul", Context(torch.device("cpu"), quick=True), tiny_sizes("matmul"))
    assert result.value("rate", dtype="bf16", size=32) > 0
    assert result.value("rate", dtype="bf16", size=64) is None
    assert "skipped: at the rate of 32" in result.value("remark", dtype="bf16", size=64)


def test_memory_of_a_process_that_fails() -> None:
    memory = module_of("memory")
    with pytest.raises(RuntimeError, match="KeyError: 'none'"):
        memory.in_own_process(tiny_sizes("memory"), "none", "forward", 64, 1)


def test_an_experiment_that_raises_leaves_the_others(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(context: Context, sizes: object) -> Result:
        raise RuntimeError(NASTY)

    for name in set(EXPERIMENTS) - {"matmul", "causal", "layout"}:
        monkeypatch.delitem(EXPERIMENTS, name)
    monkeypatch.setattr(module_of("causal"), "measure", fails)
    (tmp_path / "causal.png").write_bytes(PNG)  # of an earlier run
    assert main(["experiments", "all", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "causal failed: RuntimeError: <script>" in shown and "layout: Layouts" in shown
    assert Result.from_json(json.loads((tmp_path / "causal.json").read_text())).error.startswith("RuntimeError")
    assert not (tmp_path / "causal.png").exists()
    assert main(["report", str(tmp_path)]) == 0
    assert "<script" not in (tmp_path / "report.html").read_text()
    assert "**Failed**: RuntimeError: &lt;script&gt;" in (tmp_path / "report.md").read_text()


# The command


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
    assert f"needs the package {package}" in error and 'pip install "flashattn_ext[cli]"' in error
    assert error.count("\n") == 1


# Files


def test_json_round_trip(results: dict[str, Result]) -> None:
    for result in [*results.values(), a_result(), Result("matmul", "empty")]:
        assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    with pytest.raises(ValueError, match="expected the format"):
        Result.from_json({**a_result().to_json(), "format": "other"})


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_pictures_show_data(out: Path, results: dict[str, Result], name: str) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = out / f"{name}.png"
    assert path.read_bytes().startswith(PNG)
    picture = pyplot.imread(path)[..., :3]
    saturation = picture.max(axis=-1) - picture.min(axis=-1)
    assert (saturation > 0.3).sum() > 200  # coloured curves or bars
    series = results[name].plot.series
    assert len(series) > 1 and all(series.values())


def test_texts_of_cells() -> None:
    result = a_result()
    assert result.texts() == [["1", "2.50", ""], ["2", "-", "why"]]
    assert [column.heading for column in result.columns] == ["n", "time [ms]", "remark"]
    assert result.value("time", n=1) == 2.5 and result.value("time", n=3) is None
    assert result.points("n", "time") == [(1, 2.5)]
    assert render.shown_columns(replace(result, rows=[[1, None, ""]])) == [0]


def test_everything_leaves_nothing_temporary(out: Path) -> None:
    expected = {f"{name}.{ending}" for name in EXPERIMENTS for ending in ("json", "png")}
    assert {path.name for path in out.iterdir()} == expected | {"report.html", "report.md"}


# The report


class Page(HTMLParser):
    """Tables as lists of rows of texts, the attributes that load something, and the names of all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self._in_cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def test_html_has_every_table_and_picture(out: Path, results: dict[str, Result]) -> None:
    text = (out / "report.html").read_text()
    page = Page(text)
    for name, result in results.items():
        shown = render.shown_columns(result)
        expected = [[result.columns[index].heading for index in shown]]
        expected += [[line[index] for index in shown] for line in result.texts()]
        assert expected in page.tables, name
        picture = base64.b64encode((out / f"{name}.png").read_bytes()).decode()
        assert f"data:image/png;base64,{picture}" in page.references
    assert ["torch", torch.__version__] in page.tables[0]
    assert ["flashattn_ext", flashattn_ext.__version__] in page.tables[0]


def test_html_loads_nothing(out: Path) -> None:
    text = (out / "report.html").read_text()
    page = Page(text)
    assert len(page.references) == len(EXPERIMENTS)
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not any(word in text for word in ("http:", "https:", "url(", "@import"))


def test_markdown_has_every_table_and_picture(out: Path, results: dict[str, Result]) -> None:
    text = (out / "report.md").read_text()
    for name, result in results.items():
        assert f"![{name}]({name}.png)" in text and f"`{result.command}`" in text
        for line in result.texts():
            cells = [report.escape(line[index]) for index in render.shown_columns(result)]
            assert "| " + " | ".join(cells) + " |" in text


def test_nasty_strings_are_escaped(tmp_path: Path) -> None:
    result = a_result(
        title=NASTY,
        rows=[[1, 1.0, NASTY]],
        notes=[NASTY],
        comparisons=[Comparison(NASTY, NASTY, NASTY)],
        machine={NASTY: NASTY},
        command=NASTY,
        error=NASTY,
    )
    render.write_json(result, tmp_path / "matmul.json")
    render.write_plot(result, tmp_path / "matmul.png")
    assert main(["report", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert "script" not in page.tags and [["figure", "article", "here"], [NASTY] * 3] in page.tables
    lines = (tmp_path / "report.md").read_text().splitlines()
    [row] = [line for line in lines if line.startswith("| 1 | ")]
    assert "<script>" not in row and row.replace("\\|", "").count("|") == 4


def test_machines_are_grouped() -> None:
    results = [a_result(name=name, machine={"device": device}) for name, device in zip("abc", "xyx", strict=True)]
    assert report.machines(results) == [(["a", "c"], {"device": "x"}), (["b"], {"device": "y"})]


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"format": "other"}', '{"format": "flashattn_ext experiment 1"}']
)
def test_report_without_usable_results(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    if content is not None:
        (tmp_path / "matmul.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flashattn-ext report: ") and error.count("\n") == 1
    assert ("has no results; first: flashattn-ext experiments" if content is None else "not a result") in error


def test_report_keeps_results_without_pictures(out: Path, tmp_path: Path) -> None:
    shutil.copy(out / "matmul.json", tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert not Page((tmp_path / "report.html").read_text()).references
    assert "![" not in (tmp_path / "report.md").read_text()
