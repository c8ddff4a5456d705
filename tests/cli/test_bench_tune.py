"""`bench tune`: the real tiles of the CPU, and GPU tiles with stand-ins for backends and the clock."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

import flashattn_ext
from flashattn_ext import _C
from flashattn_ext_lab import bench_contestants, bench_cuda, bench_tune, timing
from flashattn_ext_lab.bench_cases import Case
from flashattn_ext_lab.bench_tune import Job, Tile
from flashattn_ext_lab.console import CommandError
from flashattn_ext_lab.main import main
from flashattn_ext_lab.timing import Timing

CASE = Case(2, 2, 2, 32, 16, True, "fp32")


class Gpu:
    """A build for a GPU, with a table of kernels, and which backends were used."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.rows = [self.row("forward"), self.row("forward", options="kDropout", tiles=1), self.row("backward")]
        self.rows.append(self.row("forward", architecture="b"))

    def row(self, stage: str, architecture: str = "a", options: str = "kPlain", tiles: int = 3) -> SimpleNamespace:
        """As csrc/sources.py reads it."""
        return SimpleNamespace(
            architecture=architecture, stage=stage, options=options, head_dim=16, head_dim_v=16,
            dtypes=("fp16", "bf16"), competing=tuple((str(64 + 16 * i),) for i in range(tiles)),
        )  # fmt: skip

    def table(self) -> list[SimpleNamespace]:
        return self.rows

    def describe(self, row: SimpleNamespace, choice: int) -> str:
        return f"128 x {row.competing[choice][0]}, 2"

    def backends(self) -> list[str]:
        return ["cuda-a", "cuda-b", "cpu"]

    def use_backend(self, name: str | None) -> contextlib.AbstractContextManager[None]:
        self.used.append(str(name))
        return contextlib.nullcontext()


def private(backend: str, choice: int, dtype: str) -> SimpleNamespace:
    assert dtype == "bf16"
    return SimpleNamespace(name=f"{backend}-tile{choice}")


def private_build(gpu: Gpu, load: Any = lambda builds: None) -> SimpleNamespace:
    return SimpleNamespace(cuda=private, load=load, sources=gpu)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Tables with three tiles without dropout, whose second one takes twice as long and third one half."""
    gpu = Gpu()
    monkeypatch.setattr(bench_tune, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(bench_tune, "private_build", lambda: private_build(gpu))
    monkeypatch.setattr(flashattn_ext, "use_backend", gpu.use_backend)
    monkeypatch.setattr(flashattn_ext, "build_info", lambda: {"backends": gpu.backends()})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("FLASHATTN_EXT_CUDA_PATH", raising=False)
    monkeypatch.setattr(bench_tune, "describe_machine", lambda _device: {"machine": "a GPU", "torch": "2"})
    real_inputs = bench_contestants.inputs
    for module in (bench_cuda, bench_tune):
        monkeypatch.setattr(module, "inputs", lambda case, device=None: real_inputs(small(case), "cpu"))

    def burst_ms(call: Any, launches: int) -> float:
        call()
        return {"cuda-a": 4.0, "cuda-a-tile1": 8.0, "cuda-a-tile2": 2.0}[gpu.used[-1]] * launches

    monkeypatch.setattr(timing, "burst_ms", burst_ms)
    return gpu


def small(case: Case) -> Case:
    return Case(**{**vars(case), "B": 1, "S": 8, "Hq": 1, "Hk": 1, "dtype": "fp32"})


# Candidates


def test_cpu_tiles_start_with_the_default_and_never_repeat_it() -> None:
    jobs = bench_tune.cpu_jobs(quick=False)
    assert {(job.case.D, job.case.causal, job.case.dropout > 0) for job in jobs} == {
        (D, causal, dropout) for D in (64, 128) for causal in (False, True) for dropout in (False, True)
    }
    for job in jobs:
        names = [tile.name for tile in job.tiles]
        own = _C.cpu_tile("fp32", job.case.D)
        assert names[0] == " x ".join(map(str, own)) and len(set(names)) == len(names) >= 25
        assert job.tiles[0].cpu_size is None
        assert all(" x ".join(map(str, tile.cpu_size)) == tile.name for tile in job.tiles[1:])
        assert {tile.backend for tile in job.tiles} == {"cpu"}


def test_cuda_jobs_are_the_rows_with_alternatives(gpu: Gpu) -> None:
    jobs = bench_tune.cuda_jobs("cuda-a", quick=False)
    assert [(job.case.backward, job.case.causal, job.case.dropout) for job in jobs] == [
        (backward, causal, 0.0) for backward in (False, True) for causal in (False, True)
    ]
    assert [tile.name for tile in jobs[0].tiles] == [f"128 x {keys}, 2" for keys in (64, 80, 96)]
    assert [tile.backend for tile in jobs[0].tiles] == ["cuda-a", "cuda-a-tile1", "cuda-a-tile2"]
    assert jobs[0].case.Hq * jobs[0].case.D == 2048


ONE, SEVERAL = "one document", "documents"


@pytest.mark.parametrize(
    ("stage", "options", "dtype", "calls"),
    [
        ("forward", "kDropout", "bf16", ["full p=0.1", "causal p=0.1"]),
        ("backward", "kIntervals", "bf16", [ONE, SEVERAL]),
        ("forward", "kScores", "bf16", ["full softcap", "causal softcap"]),
        ("forward", "kBias", "bf16", ["full bias", "causal bias"]),
        ("forward", "kGeneral", "bf16", [f"{ONE} softcap", f"{SEVERAL} softcap"]),
        ("forward", "kFp8Scores", "fp8", ["full", "causal"]),
        ("forward", "kFp8General", "fp8", [ONE, SEVERAL]),
        ("jvp", "kPlain", "bf16", ["full", "causal"]),
    ],
)
def test_a_row_is_measured_with_its_options(stage: str, options: str, dtype: str, calls: list[str]) -> None:
    row = SimpleNamespace(stage=stage, options=options, head_dim=128, head_dim_v=128, dtypes=(dtype,))
    cases = bench_tune.cuda_cases(row, quick=False)
    assert [case.mask for case in cases] == calls
    assert {case.direction for case in cases} == {"J" if stage == "jvp" else stage}
    assert {case.tokens for case in cases} == {16384} and {case.dtype for case in cases} == {dtype}


def test_every_row_of_the_table_whose_tiles_compete_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    build = bench_tune.private_build()
    monkeypatch.setattr(build, "cuda", lambda backend, choice, dtype: SimpleNamespace(name=f"{choice}"))
    jobs = [*bench_tune.cuda_jobs("cuda-sm90", quick=True), *bench_tune.cuda_jobs("cuda-sm80", quick=True)]
    rows = [row for row in build.sources.table() if len(row.competing) > 1]
    assert len(jobs) == 2 * len(rows) > 100
    assert sum(len(job.tiles) for job in jobs) == 2 * sum(len(row.tiles) for row in rows)


def test_a_class_whose_v_is_narrower_is_measured_with_such_a_v(gpu: Gpu) -> None:
    for row in gpu.rows:
        row.head_dim_v = 8
    assert {job.case.head_dim_v for job in bench_tune.cuda_jobs("cuda-a", quick=True)} == {8}
    assert {bench_tune.COLUMNS["D"](row) for row in bench_tune.measure(quick=True)["rows"]} == {"16:8"}


def test_a_tile_that_does_not_compile_ends_the_command(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(builds: list[SimpleNamespace]) -> None:
        raise RuntimeError(f"{builds[0].name}: why")

    monkeypatch.setattr(bench_tune, "private_build", lambda: private_build(gpu, load))
    assert main(["bench", "tune"]) == 2
    assert capsys.readouterr().err == "flashattn-ext bench: cuda-a-tile1: why\n"


def test_the_backend_is_one_that_runs_here(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def use_backend(name: str) -> contextlib.AbstractContextManager[None]:
        used.append(name)
        return contextlib.nullcontext()

    def forward(*_tensors: torch.Tensor) -> None:
        if used[-1] != "cuda-b":
            raise NotImplementedError(f"{used[-1]} needs another GPU")

    monkeypatch.setattr(flashattn_ext, "use_backend", use_backend)
    monkeypatch.setattr(flashattn_ext, "forward", forward)
    assert bench_cuda.running_backend(None) == "cuda-b"
    with pytest.raises(CommandError, match="cuda-a needs another GPU"):
        bench_cuda.running_backend("cuda-a")
    used.clear()
    monkeypatch.setenv("FLASHATTN_EXT_CUDA_PATH", "b")
    assert bench_cuda.running_backend(None) == "cuda-b" and used == ["cuda-b"]


# Measuring


def test_a_tile_is_used_for_one_call() -> None:
    tile = Tile("a", "cpu")
    assert tile.run(_C.forced_backend) == "cpu" and _C.forced_backend() == ""
    own = _C.cpu_tile("fp32", 64)
    assert Tile("b", "cpu", cpu_size=(64, 128)).run(lambda: _C.cpu_tile("fp32", 64)) == (64, 128)
    assert _C.cpu_tile("fp32", 64) == own
    with pytest.raises(ValueError, match="'absent' is not in this build"):
        Tile("b", "absent").run(print)


def test_wrong_and_failing_tiles_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that is not checked could win by computing something else."""
    used: list[str] = []

    def use_backend(name: str) -> contextlib.AbstractContextManager[None]:
        used.append(name)
        if name == "D":
            raise RuntimeError("does not fit")
        return contextlib.nullcontext()

    def ours(_seed: int | None, _case: Case, q: torch.Tensor, *_others: torch.Tensor) -> torch.Tensor:
        return q * {"B": 1.001, "C": 1.1, "E": float("nan")}.get(used[-1] if used else "", 1.0)

    job = Job("any", CASE, tuple(Tile(name, name.upper()) for name in "abcde"))
    monkeypatch.setattr(bench_contestants, "ours", ours)
    monkeypatch.setattr(flashattn_ext, "use_backend", use_backend)
    row = bench_tune.measure_job(job, "cpu", quick=True)
    assert list(row["tiles"]) == ["a", "b"] and row["best"] in ("a", "b")
    assert row["tiles"]["a"]["difference"] == 0 and row["tiles"]["b"]["difference"] == pytest.approx(1e-3, rel=0.01)
    assert row["failures"] == {
        "c": "its results differ from the default ones by 10.0%",
        "d": "RuntimeError: does not fit",
        "e": "its results differ from the default ones by nan%",
    }
    assert json.loads(json.dumps(row)) == row


def test_a_default_tile_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_backend(name: str) -> contextlib.AbstractContextManager[None]:
        if name == "first":
            raise RuntimeError("no memory")
        return contextlib.nullcontext()

    monkeypatch.setattr(flashattn_ext, "use_backend", use_backend)
    job = Job("any", CASE, (Tile("default", "first"), Tile("other", "second")))
    row = bench_tune.measure_job(job, "cpu", quick=True)
    assert row["failures"] == {"default": "RuntimeError: no memory"}
    assert (row["default"], row["best"], row["gain"]) == ("default", "other", None)


@pytest.mark.parametrize("backward", [False, True])
def test_cpu_tiles_agree(backward: bool) -> None:
    case = Case(**{**vars(CASE), "S": 200, "dropout": 0.2, "backward": backward})
    job = Job("cpu", case, (Tile("0", "cpu"), Tile("64 x 128", "cpu", cpu_size=(64, 128))))
    row = bench_tune.measure_job(job, "cpu", quick=True)
    assert not row["failures"] and list(row["tiles"]) == ["0", "64 x 128"]
    assert all(tile["difference"] < 1e-5 and tile["ms"] > 0 for tile in row["tiles"].values())
    assert row["gain"] == pytest.approx(row["tiles"]["0"]["ms"] / row["tiles"][row["best"]]["ms"])


# Results


def a_row(**calls: tuple[float, float, float]) -> dict[str, Any]:
    """A row of tiles a, b, ..., with milliseconds of the median, fastest and slowest call."""
    timings = {name: Timing(*(ms / 1e3 for ms in times), 3) for name, times in calls.items()}
    tiles = tuple(Tile(name, "cpu") for name in "ab")
    return bench_tune.row(Job("any", CASE, tiles), timings, dict.fromkeys(calls, 0.0), {})


@pytest.mark.parametrize(
    ("calls", "end", "faster"),
    [
        ({"a": (4, 4, 4), "b": (2, 1, 3)}, ["a", "4.000 / 0%", "b", "2.000 / 100%", "2.00x"], True),
        ({"a": (4, 3, 5), "b": (3, 2, 4)}, ["a", "4.000 / 50%", "b", "3.000 / 67%", "1.33x, within the spread"], False),
        ({"a": (4, 4, 4), "b": (5, 5, 5)}, ["a", "4.000 / 0%", "the same", "-", "-"], False),
        ({"b": (5, 5, 5)}, ["a", "-", "b", "5.000 / 0%", "-"], False),
        ({}, ["a", "-", "-", "-", "-"], False),
    ],
)
def test_a_gain_within_the_spread_is_none(
    calls: dict[str, tuple[float, float, float]], end: list[str], faster: bool
) -> None:
    row = a_row(**calls)
    assert [text(row) for text in bench_tune.COLUMNS.values()] == ["any", "16", "forward", "causal", *end]
    assert bench_tune.is_faster(row) == faster


# The command


@pytest.mark.parametrize("markdown", [False, True])
def test_bench_tune_finds_the_fastest_tile_of_a_gpu(
    gpu: Gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], markdown: bool
) -> None:
    path = tmp_path / "tune.json"
    assert main(["bench", "tune", "--json", str(path), *(["--markdown"] if markdown else [])]) == 0
    results = json.loads(path.read_text())
    assert results["device"] == "cuda" and len(results["rows"]) == 4
    for row in results["rows"]:
        assert (row["default"], row["best"]) == ("128 x 64, 2", "128 x 96, 2")
        assert row["gain"] == pytest.approx(2) and len(row["tiles"]) == 3 and not row["failures"]
    out = capsys.readouterr().out
    assert out.count("2.00x") == 4 and "a GPU" in out
    assert {"cuda-a", "cuda-a-tile1", "cuda-a-tile2"} <= set(gpu.used)


def test_command_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_tune, "CPU_QUICK_TILES", (64,))
    path = tmp_path / "tune.json"
    assert main(["bench", "tune", "--device", "cpu", "--quick", "--markdown", "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert results["device"] == "cpu" and results["isa"] == _C.cpu_isa()
    assert len(results["rows"]) == 8 and all(len(row["tiles"]) == 2 for row in results["rows"])
    assert capsys.readouterr().out.count("\n| cpu | ") == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["tune", "--device", "cpu", "--backend", "cuda-sm90"],
            "--backend got 'cuda-sm90', which is for --device cuda",
        ),
        (["tune", "--set", "short"], "--set is an option of bench cuda, not of tune"),
        (["cpu", "--backend", "cpu"], "--backend is an option of bench cuda and tune, not of cpu"),
        (["cuda", "--device", "cuda"], "--device is an option of bench tune, not of cuda"),
    ],
)
def test_bad_options_get_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"flashattn-ext bench: {message}") and error.count("\n") == 1


def test_other_tiles_need_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench_tune.private_build.cache_clear()
    monkeypatch.setattr(bench_tune, "__file__", str(tmp_path / "a" / "b" / "bench_tune.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="in a checkout"):
        bench_tune.private_build()
