"""`bench cuda` without a GPU: its rows, numbers and tables, and the whole path on the CPU with a stand-in for the clock
and the memory counter of the device.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from flashattn_ext.cli import bench_accuracy, bench_cases, bench_contestants, bench_cuda, bench_cuda_tables
from flashattn_ext.cli.bench_cases import DENSE, FA2, FLASH_ATTN, MATH, OURS, SETS, Case
from flashattn_ext.cli.bench_contestants import PEERS, TORCH_BACKENDS
from flashattn_ext.cli.console import CommandError, markdown_table
from flashattn_ext.cli.main import main
from flashattn_ext.cli.timing import Timing

TINY = Case(2, 4, 4, 64, 16, True, "fp32", set="tiny")
PACKED = Case(3, 4, 4, 90, 16, True, "fp32", set="packed", lengths=(40, 90, 25))


def a_row(**ms: float) -> dict:
    timings = {name: Timing(value / 1e3, value / 2e3, value / 1e3, 3) for name, value in ms.items()}
    memory = {name: 1 << 20 for name in ms}
    return bench_cuda_tables.row(TINY, [OURS, FA2, MATH], timings, memory, {OURS: 0.5}, {MATH: "RuntimeError: no"})


# What is asked for


def test_sets_have_the_sizes_of_the_papers() -> None:
    sizes = {name: len(rows) for name, rows in SETS.items()}
    assert sizes == {
        "fa_paper": 36,
        "align": 3,
        "dropout": 2,
        "gqa": 1,
        "fp32": 4,
        "short": 2,
        "wide": 6,
        "varlen": 4,
    } | {
        "scores": 11,
        "masks": 12,
    }
    assert all(case.B * case.S == 16384 and case.Hq * case.D == 2048 for case in SETS["fa_paper"])
    assert len(set(SETS["fa_paper"])) == 36
    assert SETS["gqa"][0].shape == "2x32:8x8192x128"
    assert SETS["dropout"][0].mask == "causal p=0.1"


def test_packed_sequences_and_a_dense_batch_of_as_much_work() -> None:
    for case in SETS["varlen"]:
        assert sum(case.lengths) == 16384 and all(128 <= length <= 4096 for length in case.lengths)
        assert (case.B, case.S, case.Hq * case.D) == (len(case.lengths), max(case.lengths), 2048)
        dense = case.dense()
        assert not dense.lengths and dense.flop == pytest.approx(case.flop, rel=1e-3)
        assert pytest.approx(16384, rel=0.03) == dense.B * dense.S
    assert SETS["varlen"][0].shape == "8x32x293-3774x64"
    assert PACKED.flop == 4 * (40**2 + 90**2 + 25**2) * 4 * 16 / 2


def test_drawn_lengths_are_always_the_same() -> None:
    assert bench_cases.draw_lengths(100, 10, 40, seed=0) == bench_cases.draw_lengths(100, 10, 40, seed=0)
    assert bench_cases.draw_lengths(5, 10, 40, seed=0) == (5,)


def test_cases_of_sets_and_passes() -> None:
    assert len(bench_cases.cases(None, "both")) == 2 * sum(map(len, SETS.values()))
    chosen = bench_cases.cases(["gqa", "align"], "backward")
    assert [case.set for case in chosen] == ["align"] * 3 + ["gqa"]
    assert all(case.backward for case in chosen)
    with pytest.raises(CommandError, match="'none'; accepted are fa_paper, align"):
        bench_cases.cases(["none"], "both")


@pytest.mark.parametrize(
    ("causal", "backward", "flop"), [(False, False, 4e9), (True, False, 2e9), (False, True, 1e10), (True, True, 5e9)]
)
def test_flop_counts_visible_scores(causal: bool, backward: bool, flop: float) -> None:
    assert Case(10, 10, 5, 1000, 10, causal, "bf16", backward=backward).flop == flop


def test_peers_are_those_that_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cuda, "flash_attn_func", lambda: None)
    assert bench_cuda.contestants(None) == [OURS, "fa2", "cudnn", "efficient", "math", "flex"]
    assert bench_cuda.contestants("math, fa2") == [OURS, "fa2", "math"]
    with pytest.raises(CommandError, match="'fa9'; accepted are fa2, cudnn"):
        bench_cuda.contestants("fa9")
    with pytest.raises(CommandError, match="flash_attn cannot be imported"):
        bench_cuda.contestants(FLASH_ATTN)
    monkeypatch.setattr(bench_cuda, "flash_attn_func", lambda: max)
    assert bench_cuda.contestants(None) == [OURS, *PEERS]


def test_math_is_skipped_where_scores_are_large() -> None:
    by_length = {case.S: case for case in SETS["fa_paper"] if case.D == 64 and not case.causal}
    assert bench_contestants.skip_reason(by_length[8192], MATH) == ""  # exactly at the limit
    assert "16 GiB" in bench_contestants.skip_reason(by_length[16384], MATH)
    assert bench_contestants.skip_reason(by_length[16384], FA2) == ""
    longest = max(SETS["scores"], key=lambda case: case.S)
    assert bench_contestants.skip_reason(longest, FA2) == "skipped: a bias of every score takes 32 GiB"


# Measuring


@pytest.mark.parametrize(("ms", "launches"), [(0.0, 20), (0.01, 20), (1.0, 5), (2.4, 3), (80.0, 1)])
def test_short_calls_are_timed_in_bursts(ms: float, launches: int) -> None:
    assert bench_cuda.launches_for(ms) == launches


def test_bursts_take_turns_and_a_failure_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(bench_cuda, "burst_ms", lambda call, launches: call() or 10.0)

    def call(name: str) -> None:
        order.append(name)
        if name == "b" and order.count("b") == 3:
            raise torch.OutOfMemoryError("no memory left\nmore")

    failures: dict[str, str] = {}
    timings = bench_cuda.time_events({name: lambda name=name: call(name) for name in "abc"}, 3, failures)
    assert "".join(order) == "abc" + "abc" + "bca" + "ca"
    assert failures == {"b": "OutOfMemoryError: no memory left"}
    assert timings == {name: Timing(0.01, 0.01, 0.01, 3) for name in "ac"}
    assert bench_cuda.time_events({}, 3, failures) == {}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "case",
    [TINY, Case(2, 6, 2, 48, 16, True, "fp32"), Case(1, 3, 3, 40, 16, False, "fp32", 0.2)],
    ids=["plain", "gqa", "dropout"],
)
def test_a_row_measured_on_the_cpu(on_cpu: None, case: Case, backward: bool) -> None:
    case = Case(**{**vars(case), "backward": backward})
    names = [OURS, MATH, "cudnn"]
    row = bench_cuda.measure_case(case, names, quick=False)
    assert list(row["failures"]) == ["cudnn"]  # never on the CPU
    assert row["ms"]["cudnn"] is row["tflops"]["cudnn"] is row["spread"]["cudnn"] is row["max_error"]["cudnn"] is None
    assert row["ratio_best"] == pytest.approx(row["ms"][MATH] / row["ms"][OURS])
    assert row["ratio_fa2"] is None
    assert row["peak_extra_bytes"][OURS] == 3 << 20
    assert 0 < row["max_error"][OURS] < 1e-5  # with dropout: the mask is the one of the reference
    assert case.dropout or 0 < row["max_error"][MATH] < 1e-5
    assert not case.dropout or row["max_error"][MATH] is None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_measured_on_the_cpu(on_cpu: None, causal: bool, backward: bool) -> None:
    case = Case(**{**vars(PACKED), "causal": causal, "backward": backward})
    row = bench_cuda.measure_case(case, [OURS, *TORCH_BACKENDS], quick=False)
    assert list(row["ms"]) == [OURS, *TORCH_BACKENDS]
    assert 0 < row["max_error"][OURS] < 1e-5
    failures = row["failures"]
    assert failures.pop(MATH) == "skipped: it takes no packed sequences"
    # The others take the arguments, and are for a GPU alone.
    assert len(failures) == 3 and all(reason.startswith("NotImplementedError") for reason in failures.values())
    dense = row["beside"][DENSE]
    assert dense["shape"] == case.dense().shape == "2x4x72x16"
    assert dense["ratio"] == pytest.approx(row["tflops"][OURS] / dense["tflops"])
    assert json.loads(json.dumps(row)) == row
    assert bench_cuda_tables.speed_cells([row], [OURS])[0][1] == "3x4x25-90x16"


def test_dense_failing_is_reported_and_leaves_the_rest(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(_seed: int | None, case: Case, *tensors: torch.Tensor) -> torch.Tensor:
        if not case.lengths:
            raise RuntimeError("no dense today")
        return tensors[0] * 1

    monkeypatch.setattr(bench_contestants, "ours", ours)
    row = bench_cuda.measure_case(PACKED, [OURS], quick=True)
    assert row["ms"][OURS] > 0 and row["beside"] == {DENSE: None}
    assert bench_cuda_tables.notes([row]) == [
        f"packed 3x4x25-90x16 fp32 causal forward: {DENSE}: RuntimeError: no dense today"
    ]


def test_quick_leaves_accuracy_out(on_cpu: None) -> None:
    row = bench_cuda.measure_case(TINY, [OURS], quick=True)
    assert row["max_error"] == {OURS: None}
    assert row["ratio_best"] is None and row["ms"][OURS] > 0


def test_ours_failing_leaves_the_peers(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object) -> None:
        raise NotImplementedError("backend 'cuda-none': not yet")

    monkeypatch.setattr(bench_contestants, "ours", fails)
    row = bench_cuda.measure_case(TINY, [OURS, FA2], quick=False)
    assert row["ms"][OURS] is None and row["ms"][FA2] > 0 and row["ratio_best"] is None
    assert row["max_error"][FA2] > 0
    assert bench_cuda_tables.notes([row]) == [
        "tiny 2x4x64x16 fp32 causal forward: ours: NotImplementedError: backend 'cuda-none': not yet"
    ]


def test_compared_heads_fit_and_keep_groups_whole() -> None:
    assert bench_accuracy.compared_heads(TINY) == (2, 2)
    assert bench_accuracy.compared_heads(Case(1, 1, 1, 64, 16, True, "fp32")) == (1, 1)
    assert bench_accuracy.compared_heads(Case(1, 8, 8, 16384, 64, True, "bf16")) == (1, 1)
    assert bench_accuracy.compared_heads(SETS["gqa"][0]) == (4, 1)


def test_the_largest_error_keeps_nan() -> None:
    a, b = [torch.tensor([1.0, 2.0]), torch.tensor([0.0])], [torch.tensor([1.5, 2.0]), torch.tensor([-3.0])]
    assert bench_accuracy.largest_error(a, b) == 3.0
    assert math.isnan(bench_accuracy.largest_error([torch.tensor([math.nan, 1.0])], [torch.zeros(2)]))


def test_fp32_products_are_exact_meanwhile() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with bench_cuda._exact_fp32_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


# Results


def test_row_has_ratios_to_the_best_peer_and_to_fa2() -> None:
    row = a_row(ours=2.0, fa2=3.0, math=1.0)
    assert row["ratio_best"] == 0.5 and row["ratio_fa2"] == 1.5
    assert row["tflops"][OURS] == pytest.approx(TINY.flop / 2e-3 / 1e12)
    assert row["spread"][OURS] == pytest.approx(0.5)
    assert json.loads(json.dumps(row)) == row


def test_cells_show_what_was_measured() -> None:
    rows, names = [a_row(ours=2.0, fa2=3.0)], [OURS, FA2, MATH]
    about = ["tiny", "2x4x64x16", "fp32", "causal", "forward"]
    ratios = ["to best", "to fa2", "to dense", "spread"]
    assert bench_cuda_tables.speed_cells(rows, names, ratios) == [
        [*about, "2.000 / 0.0", "3.000 / 0.0", "-", "1.50x", "1.50x", "-", "50%"],
    ]
    assert bench_cuda_tables.memory_cells(rows, names) == [[*about, "1.0 / 5.0e-01", "1.0 / -", "-"]]
    nothing = a_row()
    assert bench_cuda_tables.speed_cells([nothing], names, ratios)[0][5:] == ["-"] * 7
    assert markdown_table("title", "ab", ["cd"]) == "title\n\n| a | b |\n| --- | --- |\n| c | d |\n"


# The command


@pytest.mark.parametrize("markdown", [False, True])
def test_bench_cuda_prints_and_writes_every_row(
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    markdown: bool,
) -> None:
    monkeypatch.setitem(SETS, "tiny", [TINY])
    path = tmp_path / "bench.json"
    options = ["--set", "tiny", "--peers", "fa2,cudnn", "--json", str(path), *(["--markdown"] if markdown else [])]
    assert main(["bench", "cuda", *options]) == 0
    results = json.loads(path.read_text())
    assert results["contestants"] == [OURS, FA2, "cudnn"] and results["backend"] == "cuda-none"
    assert [row["backward"] for row in results["rows"]] == [False, True]
    out = capsys.readouterr().out
    assert out.count("2x4x64x16") == 4  # two rows in each of two tables
    assert out.count("\n| tiny | ") == (4 if markdown else 0)
    assert "a GPU" in out and "…" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["cuda", "--set", "none"], "--set got 'none'; accepted are fa_paper"),
        (["cuda", "--peers", "none"], "--peers got 'none'; accepted are fa2"),
        (["cpu", "--pass", "forward"], "--pass is an option of bench cuda, not of cpu"),
    ],
)
def test_bad_options_get_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"flashattn-ext bench: {message}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("present", "backends", "backend", "message"),
    [
        (False, ["cpu"], None, "needs a CUDA device"),
        (True, ["cpu"], None, "this build has only the backends cpu; rebuild"),
        (True, ["cpu", "cuda-a", "cuda-b"], "cpu", "--backend got 'cpu'; accepted are cuda-a, cuda-b"),
        (True, ["cpu", "cuda-a", "cuda-b"], "cuda-b", None),
        (True, ["cpu", "cuda-a", "cuda-b"], None, None),
    ],
)
def test_device_and_build_are_checked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    present: bool,
    backends: list[str],
    backend: str | None,
    message: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    monkeypatch.setattr("flashattn_ext.build_info", lambda: {"backends": backends})
    if message is None:
        monkeypatch.delenv("FLASHATTN_EXT_CUDA_PATH", raising=False)
        assert bench_cuda.check_cuda(backend) == (backend or "cuda-a")
        monkeypatch.setenv("FLASHATTN_EXT_CUDA_PATH", "b")
        assert bench_cuda.check_cuda(backend) == "cuda-b"
        return
    assert main(["bench", "cuda", *(["--backend", backend] if backend else [])]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_reported_keeps_interrupts() -> None:
    failures: dict[str, str] = {}
    with contextlib.suppress(KeyboardInterrupt), bench_cuda._reported("a", failures):
        raise KeyboardInterrupt
    assert not failures
    with bench_cuda._reported("a", failures):
        raise ValueError
    assert failures == {"a": "ValueError: "}
