"""`bench cuda` without a GPU: its rows, numbers and tables, and the whole path on the CPU with a stand-in for the clock
and the memory counter of the device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

import flashattn_ext
from flashattn_ext_lab import (
    bench,
    bench_cases,
    bench_contestants,
    bench_cuda,
    bench_cudnn,
    bench_derivatives,
    timing,
)
from flashattn_ext_lab.bench_cases import CUDNN_FP8, DENSE, FA2, FA3, FA4, FLASH_ATTN, MATH, OURS, SETS, Case
from flashattn_ext_lab.bench_contestants import FLASH_MODULES, PEERS, TORCH_BACKENDS
from flashattn_ext_lab.console import CommandError, markdown_table
from flashattn_ext_lab.main import main
from flashattn_ext_lab.options import document_lengths, drawn_lengths
from flashattn_ext_lab.timing import Timing

TINY = Case(2, 4, 4, 64, 16, True, "fp32", set="tiny")
PACKED = Case(3, 4, 4, 90, 16, True, "fp32", set="packed", lengths=(40, 90, 25))


def a_row(**ms: float) -> dict:
    timings = {name: Timing(value / 1e3, value / 2e3, value / 1e3, 3) for name, value in ms.items()}
    memory = {name: 1 << 20 for name in ms}
    return bench_cuda.row(TINY, [OURS, FA2, MATH], timings, memory, {OURS: 0.5}, {MATH: "RuntimeError: no"})


def cells_of(columns: bench_cuda.Columns, row: dict[str, Any]) -> list[str]:
    return [text(row) for text in columns.values()]


# Selection


def test_sets_have_the_sizes_of_the_papers() -> None:
    sizes = {name: len(rows) for name, rows in SETS.items()}
    assert sizes == {
        "fa_paper": 36, "align": 4, "head_dims": 4, "dropout": 2, "gqa": 2, "window": 1, "deterministic": 2,
        "fp32": 4, "fp8": 18, "short": 3, "wide": 6, "varlen": 4, "scores": 11, "masks": 12, "blocks": 32, "derivatives": 16, "invariant": 12,
    }  # fmt: skip
    assert all(case.B * case.S == 16384 and case.Hq * case.D == 2048 for case in SETS["fa_paper"])
    assert len(set(SETS["fa_paper"])) == 36
    assert SETS["gqa"][0].shape == "2x32:8x8192x128"
    assert SETS["dropout"][0].mask == "causal p=0.1"
    assert SETS["window"][0].mask == "causal window 1024"
    assert SETS["head_dims"][-1].shape == "2x32x4096x192:128"
    assert SETS["deterministic"][0].mask == "full deterministic"


def test_packed_sequences_and_a_dense_batch_of_as_much_work() -> None:
    for case in SETS["varlen"]:
        assert sum(case.lengths) == 16384 and all(128 <= length <= 4096 for length in case.lengths)
        assert (case.B, case.S, case.Hq * case.D) == (len(case.lengths), max(case.lengths), 2048)
        dense = case.dense()
        assert not dense.lengths and dense.flop == pytest.approx(case.flop, rel=1e-3)
        assert pytest.approx(16384, rel=0.03) == dense.B * dense.S
    assert SETS["varlen"][0].shape == "8x32x293-3774x64"
    assert PACKED.flop == 4 * (40**2 + 90**2 + 25**2) * 4 * 16 / 2


def test_drawn_lengths_have_the_total() -> None:
    assert drawn_lengths(10, iter([3.6, 0.2, 9]).__next__) == (4, 1, 5)
    assert document_lengths(1000) == document_lengths(1000)


def test_cases_of_sets_and_passes() -> None:
    derivatives = bench_cases.cases(["derivatives"], "both")
    assert derivatives == [replace(case, set="derivatives") for case in SETS["derivatives"]]
    without_backward = [*derivatives, *SETS["fp8"], *SETS["invariant"]]
    assert len(bench_cases.cases(None, "both")) == 2 * sum(map(len, SETS.values())) - len(without_backward)
    assert not bench_cases.cases(["fp8", "invariant"], "backward")
    assert SETS["fp8"][0].beside() == {"bf16": replace(SETS["fp8"][0], dtype="bf16")}
    chosen = bench_cases.cases(["gqa", "align"], "backward")
    assert [case.set for case in chosen] == ["align"] * 4 + ["gqa"] * 2
    assert all(case.backward for case in chosen)
    with pytest.raises(CommandError, match="'none'; accepted are fa_paper, align"):
        bench_cases.cases(["none"], "both")


@pytest.mark.parametrize(
    ("causal", "backward", "flop"), [(False, False, 4e9), (True, False, 2e9), (False, True, 1e10), (True, True, 5e9)]
)
def test_flop_counts_visible_scores(causal: bool, backward: bool, flop: float) -> None:
    assert Case(10, 10, 5, 1000, 10, causal, "bf16", backward=backward).flop == flop


def test_flop_of_windows_and_of_another_size_of_v() -> None:
    window = Case(2, 3, 3, 10, 8, True, "bf16", window=4)
    assert window.visible_pairs == 2 * sum(min(row + 1, 4) for row in range(10))
    assert Case(1, 1, 1, 10, 8, True, "bf16", window=99).visible_pairs == 55
    mixed = Case(1, 2, 2, 10, 8, False, "bf16", Dv=4)
    assert mixed.flop == 100 * 2 * 2 * (8 + 4)
    assert Case(**{**vars(mixed), "backward": True}).flop == 100 * 2 * 2 * (3 * 8 + 2 * 4)


@pytest.mark.parametrize("what", bench_derivatives.DERIVATIVES)
def test_rows_of_derivatives_compute_what_plain_pytorch_does(on_cpu: None, what: str) -> None:
    case = Case(1, 2, 2, 40, 16, True, "fp32", derivative=what)
    row = bench_cuda.measure_case(case, [OURS, MATH, FA2], quick=True)
    assert row["direction"] == what and "no such derivatives" in row["failures"]["fa2"]
    assert (MATH in row["failures"]) == (what in bench_derivatives.ALONE)
    if what in bench_derivatives.ALONE:
        return
    given = bench_contestants.inputs(case)
    results = []
    for name in (OURS, MATH):
        with bench_contestants.kernel_of(name):
            results.append(bench_contestants.timed_call(case, name, *given)())
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_peers_are_those_that_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_contestants, "flash_module", lambda name: None)
    assert bench_contestants.contestants(None) == [OURS, "fa2", "cudnn", "efficient", "math", "flex"]
    assert bench_contestants.contestants("math, fa2") == [OURS, "fa2", "math"]
    with pytest.raises(CommandError, match="'fa9'; accepted are fa2, cudnn"):
        bench_contestants.contestants("fa9")
    with pytest.raises(CommandError, match=r"flash_attn_func of flash_attn\.cute cannot be imported"):
        bench_contestants.contestants("fa4")
    with pytest.raises(CommandError, match=r"JVPAttn of jvp_flash_attention\.jvp_attention cannot be imported"):
        bench_contestants.contestants("jvp-flash")
    monkeypatch.setattr(bench_contestants, "flash_module", lambda name: math)
    assert bench_contestants.contestants(None) == [OURS, *PEERS]
    assert {"flash-attn", "fa3", "fa4"} < set(PEERS)


class FlashModule:
    """A version of flash-attn with the options of all of them; `returns_lse` as FlashAttention-4 does."""

    def __init__(self, *, returns_lse: bool) -> None:
        self.returns_lse, self.calls = returns_lse, []

    def flash_attn_func(self, *tensors: torch.Tensor, **keywords: Any) -> Any:
        self.calls.append(keywords)
        out = flashattn_ext.forward(*tensors, **keywords)
        return (out, torch.zeros(1)) if self.returns_lse else out

    def flash_attn_varlen_func(self, *tensors: torch.Tensor, **keywords: Any) -> Any:
        self.calls.append(keywords)
        out = flashattn_ext.varlen_forward(*tensors, **keywords)
        return (out, torch.zeros(1)) if self.returns_lse else out


@pytest.mark.parametrize(("name", "returns_lse"), [(FLASH_ATTN, False), (FA3, False), (FA4, True)])
def test_flash_attention_of_every_version_gets_the_options_of_a_row(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, name: str, returns_lse: bool
) -> None:
    module = FlashModule(returns_lse=returns_lse)
    monkeypatch.setitem(sys.modules, FLASH_MODULES[name][0], module)
    if name == FA4:
        monkeypatch.setitem(sys.modules, "flash_attn", module)
    bench_contestants.flash_module.cache_clear()
    try:
        window = Case(1, 2, 2, 50, 16, True, "fp32", window=9, deterministic=True, backward=True)
        for case in (TINY, PACKED, window):
            row = bench_cuda.measure_case(case, [OURS, name], quick=False)
            assert not row["failures"] and row["max_error"][name] < 1e-4
    finally:
        bench_contestants.flash_module.cache_clear()
    assert {"causal": True} in module.calls
    assert {"causal": True, "window_size": (8, 0), "deterministic": True} in module.calls
    dropped = bench_contestants.skip_reason(Case(1, 2, 2, 50, 16, True, "fp32", 0.1), name)
    assert dropped == ("" if name == FLASH_ATTN else "skipped: it has no dropout")


def test_fp8_is_compared_with_cudnns_own_module_alone() -> None:
    wide, narrow = TINY, SETS["fp8"][0]
    assert bench_contestants.skip_reason(wide, CUDNN_FP8) == "skipped: it is compared in fp8 only"
    assert bench_contestants.skip_reason(narrow, CUDNN_FP8) == ""
    assert bench_contestants.skip_reason(narrow, FA3) == "skipped: it is called without descales"


class CudnnTensor:
    """Of a graph; its setters return it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self


class Cudnn:
    """The module `cudnn`, whose graph computes what its one operation says."""

    data_type = types.SimpleNamespace(FP8_E4M3=0, FLOAT=1)
    heur_mode = types.SimpleNamespace(A=0)

    def __init__(self) -> None:
        self.builds = 0

    def create_handle(self) -> object:
        return object()

    def set_stream(self, handle: object, stream: int) -> None:
        pass

    def pygraph(self, **_keywords: Any) -> Cudnn:
        return self

    def tensor(self, **_keywords: Any) -> CudnnTensor:
        return CudnnTensor()

    def sdpa_fp8(self, *inputs: CudnnTensor, **keywords: Any) -> list[CudnnTensor]:
        self.inputs, self.keywords = inputs, keywords
        self.outputs = [CudnnTensor() for _ in range(4)]
        return self.outputs

    def build(self, _heuristics: list[int]) -> None:
        self.builds += 1

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensors: dict[CudnnTensor, torch.Tensor], _workspace: torch.Tensor, handle: object) -> None:
        q, k, v = (tensors[each].float() for each in self.inputs)
        of_weights = tensors[self.keywords["scale_s"]] * tensors[self.keywords["descale_s"]]
        options = {"scale": self.keywords["attn_scale"], "is_causal": self.keywords["use_causal_mask"]}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        tensors[self.outputs[0]].copy_(out * of_weights)


def test_cudnn_in_fp8_is_called_with_descales_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = Cudnn()
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: types.SimpleNamespace(cuda_stream=0))
    q, k, v = (torch.randn(2, 30, 4, 16).to(torch.float8_e4m3fn) for _ in range(3))
    for causal in (False, True, True):
        out = bench_cudnn.attention(cudnn, causal, q, k, v)
        expected = flashattn_ext.attention_reference(q, k, v, causal=causal)
        torch.testing.assert_close(out.float(), expected.float(), atol=2**-9, rtol=2**-3)
    assert cudnn.builds == 2  # the plan of the second causal call is that of the first


def test_a_module_that_fails_to_import_is_no_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", object())  # another package's
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    bench_contestants.flash_module.cache_clear()
    try:
        assert all(bench_contestants.flash_module(name) is None for name in FLASH_MODULES)
    finally:
        bench_contestants.flash_module.cache_clear()


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
    assert timing.launches_for(ms) == launches


def test_bursts_are_interleaved_and_a_failure_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing, "burst_ms", lambda call, launches: call() or 10.0)

    def call(name: str) -> None:
        order.append(name)
        if name == "b" and order.count("b") == 3:
            raise torch.OutOfMemoryError("no memory left\nmore")

    failures: dict[str, str] = {}
    timings = timing.time_bursts({name: lambda name=name: call(name) for name in "abc"}, 3, failures)
    assert "".join(order) == "abc" + "abc" + "bca" + "ac"
    assert failures == {"b": "OutOfMemoryError: no memory left"}
    assert timings == {name: Timing(0.01, 0.01, 0.01, 3) for name in "ac"}
    assert timing.time_bursts({}, 3, failures) == {}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        TINY,
        Case(2, 6, 2, 48, 16, True, "fp32"),
        Case(1, 3, 3, 40, 16, False, "fp32", 0.2),
        Case(1, 2, 2, 40, 24, True, "fp32", Dv=16),
    ],
    ids=["plain", "gqa", "dropout", "another size of v"],
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
def test_a_window_is_compared_with_the_causal_call_and_not_with_peers_that_have_none(
    on_cpu: None, backward: bool
) -> None:
    case = Case(1, 2, 2, 60, 16, True, "fp32", window=7, backward=backward)
    row = bench_cuda.measure_case(case, [OURS, MATH, FA2], quick=False)
    assert row["failures"] == {MATH: "skipped: it has no window", FA2: "skipped: it has no window"}
    assert 0 < row["max_error"][OURS] < 1e-5
    assert row["beside"]["causal"]["tflops"] > 0


def test_options_are_compared_with_the_call_without_them() -> None:
    for options in ({"dropout": 0.1}, {"deterministic": True}, {"score": "softcap"}):
        case = Case(1, 2, 2, 60, 16, True, "fp32", **options)
        assert case.beside() == {"plain": Case(1, 2, 2, 60, 16, True, "fp32")}


def test_calls_without_a_pause(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(timing, "burst_ms", lambda call, launches: launched.append(launches) or 1.5 * launches)
    row = bench_cuda.measure_case(TINY, [OURS, MATH], quick=True, sustained=True)
    assert row["sustained"]["ms"] == pytest.approx({OURS: 1.5, MATH: 1.5})
    assert launched[-8:] == [2, 2, *[134] * 6]  # bursts of 200 ms


def test_rows_without_a_pause_have_a_table(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cuda, "SUSTAINED_MS", 1e-3)
    row = bench_cuda.measure_case(TINY, [OURS, MATH], quick=True, sustained=True)
    steady = row["sustained"]
    assert steady["ratio_best"] == pytest.approx(steady["ms"][MATH] / steady["ms"][OURS])
    [shown] = bench_cuda.sustained_rows([row, a_row(ours=1.0)])
    cells = cells_of(bench_cuda.speed_columns([OURS, MATH], ["to best"]), shown)
    assert cells[-1] == f"{steady['ratio_best']:.2f}x" and cells[-2].startswith(f"{steady['ms'][MATH]:.3f} / ")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_measured_on_the_cpu(on_cpu: None, causal: bool, backward: bool) -> None:
    case = Case(**{**vars(PACKED), "causal": causal, "backward": backward})
    row = bench_cuda.measure_case(case, [OURS, *TORCH_BACKENDS], quick=False)
    assert list(row["ms"]) == [OURS, *TORCH_BACKENDS]
    assert 0 < row["max_error"][OURS] < 1e-5
    failures = row["failures"]
    assert failures.pop(MATH) == "skipped: it does not support packed sequences"
    # The others accept the arguments, and run on a GPU only.
    assert len(failures) == 3 and all(reason.startswith("NotImplementedError") for reason in failures.values())
    dense = row["beside"][DENSE]
    assert dense["shape"] == case.dense().shape == "2x4x72x16"
    assert dense["ratio"] == pytest.approx(row["tflops"][OURS] / dense["tflops"])
    assert json.loads(json.dumps(row)) == row
    assert cells_of(bench_cuda.speed_columns([OURS]), row)[1] == "3x4x25-90x16"


def test_dense_failing_is_reported_and_leaves_the_rest(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(_seed: int | None, case: Case, *tensors: torch.Tensor) -> torch.Tensor:
        if not case.lengths:
            raise RuntimeError("no dense today")
        return tensors[0] * 1

    monkeypatch.setattr(bench_contestants, "ours", ours)
    row = bench_cuda.measure_case(PACKED, [OURS], quick=True)
    assert row["ms"][OURS] > 0 and row["beside"] == {DENSE: None}
    assert bench_cuda.notes([row]) == [
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
    assert bench_cuda.notes([row]) == [
        "tiny 2x4x64x16 fp32 causal forward: ours: NotImplementedError: backend 'cuda-none': not yet"
    ]


def test_compared_heads_fit_and_keep_groups_whole() -> None:
    assert bench_cuda.compared_heads(TINY) == (2, 2)
    assert bench_cuda.compared_heads(Case(1, 1, 1, 64, 16, True, "fp32")) == (1, 1)
    assert bench_cuda.compared_heads(Case(1, 8, 8, 16384, 64, True, "bf16")) == (1, 1)
    assert bench_cuda.compared_heads(SETS["gqa"][0]) == (4, 1)


def test_the_largest_error_keeps_nan() -> None:
    a, b = [torch.tensor([1.0, 2.0]), torch.tensor([0.0])], [torch.tensor([1.5, 2.0]), torch.tensor([-3.0])]
    assert bench_cuda.largest_error(a, b) == 3.0
    assert math.isnan(bench_cuda.largest_error([torch.tensor([math.nan, 1.0])], [torch.zeros(2)]))


# Results


def test_row_has_ratios_to_the_best_peer_and_to_fa2() -> None:
    row = a_row(ours=2.0, fa2=3.0, math=1.0)
    assert row["ratio_best"] == 0.5 and row["ratio_fa2"] == 1.5
    assert row["tflops"][OURS] == pytest.approx(TINY.flop / 2e-3 / 1e12)
    assert row["spread"][OURS] == pytest.approx(0.5)
    assert json.loads(json.dumps(row)) == row


def test_cells_show_what_was_measured() -> None:
    row, names = a_row(ours=2.0, fa2=3.0), [OURS, FA2, MATH]
    about = ["tiny", "2x4x64x16", "fp32", "causal", "forward"]
    ratios = ["to best", "to fa2", "to dense", "spread"]
    speed, memory = bench_cuda.speed_columns(names, ratios), bench_cuda.memory_columns(names)
    assert cells_of(speed, row) == [*about, "2.000 / 0.0", "3.000 / 0.0", "-", "1.50x", "1.50x", "-", "50%"]
    assert cells_of(memory, row) == [*about, "1.0 / 5.0e-01", "1.0 / -", "-"]
    assert cells_of(speed, a_row())[5:] == ["-"] * 7
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
    monkeypatch.setattr(bench_cuda, "SUSTAINED_MS", 1e-3)
    options = ["--set", "tiny", "--peers", "fa2,cudnn", "--json", str(path), "--sustained"]
    options += ["--markdown"] if markdown else []
    assert main(["bench", "cuda", *options]) == 0
    results = json.loads(path.read_text())
    assert results["contestants"] == [OURS, FA2, "cudnn"] and results["backend"] == "cuda-none"
    assert [row["backward"] for row in results["rows"]] == [False, True]
    out, reported = capsys.readouterr()
    assert out.count("2x4x64x16") == 6  # two rows in each of three tables
    assert out.count("\n| tiny | ") == (6 if markdown else 0)
    lines = reported.splitlines()
    assert len(lines) == 2 and lines[1].startswith("2 of 2: tiny 2x4x64x16 fp32 causal backward: ours ")
    assert "a GPU" in out and "…" not in out


def test_help_names_every_target_of_an_option() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    for flag, targets, _ in bench.OPTIONS.values():
        [(title, described)] = [
            (group.title, action.help)
            for group in parser._action_groups
            for action in group._group_actions
            if flag in action.option_strings
        ]
        assert all(f"bench {target}" in f"{title}: {described}" for target in targets), flag


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
        monkeypatch.setattr(flashattn_ext, "use_backend", contextlib.nullcontext)
        monkeypatch.setattr(flashattn_ext, "forward", lambda *_tensors: None)
        monkeypatch.setattr(bench_cuda, "inputs", lambda _case: ())
        assert bench_cuda.running_backend(backend) == (backend or "cuda-a")
        monkeypatch.setenv("FLASHATTN_EXT_CUDA_PATH", "b")
        assert bench_cuda.running_backend(backend) == "cuda-b"
        return
    assert main(["bench", "cuda", *(["--backend", backend] if backend else [])]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_reported_keeps_interrupts() -> None:
    failures: dict[str, str] = {}
    with contextlib.suppress(KeyboardInterrupt), timing.reported("a", failures):
        raise KeyboardInterrupt
    assert not failures
    with timing.reported("a", failures):
        raise ValueError
    assert failures == {"a": "ValueError: "}
