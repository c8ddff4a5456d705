"""Every experiment with tiny sizes on the CPU: its table, and its messages about contestants that cannot run. No times are judged."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experiments import TINY, module_of, tiny_sizes

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import flashattn_ext
from flashattn_ext import _C
from flashattn_ext_lab import bench_contestants, bench_tune
from flashattn_ext_lab.block_patterns import ALL_PATTERNS
from flashattn_ext_lab.console import CommandError
from flashattn_ext_lab.experiments import EXPERIMENTS, run_experiment
from flashattn_ext_lab.experiments import harness as shared
from flashattn_ext_lab.experiments.harness import Context, Inputs, Sizes, growth_in_own_process, make_call
from flashattn_ext_lab.experiments.result import FORWARD, NOT_MEASURED, PASSES, Result
from flashattn_ext_lab.options import PATTERNS

# Tables


def test_tiny_sizes_cover_every_experiment() -> None:
    assert set(TINY) == set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_have_no_holes(results: dict[str, Result], name: str) -> None:
    if name == "models":
        pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")
    result = results[name]
    assert result.name == name and not result.error and result.rows and result.notes
    assert all(len(row) == len(result.columns) for row in result.rows)
    missing = [remark for remark in result.column("remark") if remark]
    assert all(re.search("only", remark) for remark in missing)
    assert len(missing) == {"traffic": 1}.get(name, 0)
    for column in result.columns:
        numbers = [cell for cell in result.column(column.name) if isinstance(cell, (int, float))]
        assert all(map(math.isfinite, numbers))
        if column.unit in ("ms", "us", "MiB", "x", "TFLOP/s", "GB/s"):
            assert all(number > 0 for number in numbers)
            assert numbers
        assert not (column.form and not column.unit) or column.name.startswith("error")
    assert "scaled down for this run" in result.notes[0] and "GPU" in result.notes[1]
    assert result.command == f"flashattn-ext experiments {name} --device cpu --quick --threads 1"
    assert result.machine["torch"] == torch.__version__ and result.machine["threads"] == "1"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("matmul", 7),
        ("scaling", 4),
        ("causal", 4),
        ("layout", 6),
        ("alignment", 16),
        ("dtypes", 7),
        ("memory", 4),
        ("scores", 8),
        ("masks", 18),
        ("tiles", 5),
        ("models", 11),
        ("dropout", 4),
    ],
)
def test_every_size_has_a_row(results: dict[str, Result], name: str, rows: int) -> None:
    assert len(results[name].rows) == rows


@pytest.mark.parametrize(
    "name",
    ["scaling", "causal", "layout", "alignment", "memory", "traffic", "tiles", "profile", "llama", "dropout", "smooth"],
)
def test_figures_of_the_article(results: dict[str, Result], name: str) -> None:
    comparisons = [comparison for comparison in results[name].comparisons if comparison.article]
    assert comparisons and all(f"(article: {comparison.article})" in results[name].found for comparison in comparisons)
    unmeasured = [comparison.what for comparison in comparisons if comparison.ours == NOT_MEASURED]
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
        slow, fast = (alignment.value("our rate", D=D, pass_=direction) for D in (129, 128))
        assert alignment.value("our loss", D=129, pass_=direction) == pytest.approx(100 * (1 - slow / fast))
    assert alignment.value("relative to D", D=64) is None and alignment.value("relative to D", D=129) == 128


def test_errors_of_dtypes_are_those_of_their_precision(results: dict[str, Result]) -> None:
    dtypes = results["dtypes"]
    for dtype, limit in (("fp32", 1e-5), ("fp16", 2e-2), ("bf16", 2e-1)):
        for direction in ("forward", "forward+backward"):
            error = dtypes.value("error of ours", dtype=dtype, pass_=direction)
            assert 0 < error < limit
    assert 0 < dtypes.value("error of ours", dtype="fp8", pass_="forward") < 2e-1
    assert dtypes.value("error of unfused", dtype="fp8", pass_="forward") is None


def test_memory_is_quadratic_without_fusion(results: dict[str, Result]) -> None:
    """Two matrices of scores are 32 MiB at S=2048, ours a few results."""
    memory = results["memory"]
    for direction in ("forward", "forward+backward"):
        where = {"pass": direction, "S": 2048}
        assert memory.value("unfused", **where) > 30
        assert memory.value("ours", **where) < memory.value("unfused", **where) / 2
        assert memory.value("unfused", **where) > 2 * memory.value("unfused", **{**where, "S": 1024})


def test_traffic_of_the_model(results: dict[str, Result]) -> None:
    """B=2, H=3, S=128, D=16 in fp32: a tensor has 48 KiB, a matrix of scores 384 KiB, the mask 16 KiB."""
    traffic = results["traffic"]
    where = {"source": "model"}
    assert traffic.value("read", attention="ours", **where) == 3 * 48 / 1024
    assert traffic.value("written", attention="ours", **where) == (48 + 3) / 1024
    assert traffic.value("read", attention="unfused", **where) == (4 * 48 + 3 * 384 + 16) / 1024
    assert traffic.value("written", attention="unfused", **where) == (2 * 48 + 3 * 384) / 1024
    assert traffic.value("read saved", **where) == pytest.approx(100 * (1 - 144 / 1360))
    assert "only CUDA has GPU counters, this ran on cpu" in traffic.value("remark", source="GPU counters")


def test_scores_and_masks_are_compared_with_equivalent_calls(results: dict[str, Result]) -> None:
    scores, masks = results["scores"], results["masks"]
    for ours, plain, unfused, cost, speedup in zip(
        *map(scores.column, ("ours", "ours, plain", "unfused", "cost of the option", "to unfused")), strict=True
    ):
        assert cost == pytest.approx(100 * (ours / plain - 1)) and speedup == pytest.approx(unfused / ours)
    for name, share in zip(masks.column("mask"), masks.column("visible"), strict=True):
        assert share == pytest.approx(100 * ALL_PATTERNS[name].dense(1024).double().mean().item())
        assert (masks.value("ours, packed", mask=name) is not None) == (ALL_PATTERNS[name].lengths is not None)
    rate, of_causal, causal = (
        masks.value(column, mask="one document", pass_="forward") for column in ("rate", "of causal", "ours, causal")
    )
    assert of_causal == pytest.approx(100 * rate * 1e12 / (2 * 2 * 1024**2 * 64 / causal * 1e3))
    assert masks.plot.series["ours, forward"] == sorted(masks.plot.series["ours, forward"])


def cpu_inputs(B: int, H: int, S: int, D: int) -> Inputs:
    return Inputs.random(torch.device("cpu"), Sizes(B=B, H=H, S=S, D=D, dtype="fp32"))


def _for(name: str, inputs: Inputs) -> Inputs:
    """On the CPU FlexAttention does not accept inputs that require gradients."""
    return Inputs(*(t.detach() for t in inputs)) if name == bench_contestants.FLEX else inputs


@pytest.mark.parametrize("direction", PASSES)
def test_scores_of_all_attentions_agree(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the relative bias too."""
    scores = module_of("scores")
    monkeypatch.setattr(bench_contestants, "compiled", lambda function: function)
    inputs = cpu_inputs(1, 2, 160, 16)
    for option in scores.OPTIONS:
        names = [shared.OURS, shared.UNFUSED, *([bench_contestants.FLEX] if direction == FORWARD else [])]
        found = []
        for name in names:
            torch.manual_seed(0)
            found.append(_for(name, inputs).call(name, direction, score=option)())
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-4)
        assert direction == FORWARD or len(found[0]) == 3 + (option == "relative bias")
        plain = inputs.call(shared.OURS_PLAIN, direction, score=option)()
        torch.testing.assert_close(plain, inputs.call(shared.OURS, direction, True)())


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("pattern", [*PATTERNS, "blocks 0.5"])
def test_masks_of_all_attentions_agree(pattern: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"causal": ALL_PATTERNS[pattern].causal, "pattern": pattern}
    monkeypatch.setattr(bench_contestants, "compiled", lambda function: function)
    inputs = cpu_inputs(1, 2, 256, 16)
    expected = inputs.call(shared.SDPA, direction, **options)()
    names = [shared.OURS, *([shared.OURS_PACKED] if ALL_PATTERNS[pattern].lengths else [])]
    names += [bench_contestants.FLEX] if direction == FORWARD else []
    for name in names:
        found = bench_contestants.tensors_of(_for(name, inputs).call(name, direction, **options)())
        for got, wanted in zip(found, bench_contestants.tensors_of(expected), strict=True):
            torch.testing.assert_close(got.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


def test_tiles_are_compared_with_the_default(results: dict[str, Result]) -> None:
    """With D=16 and S=200 in fp32 k and v have 25 KiB, and a tile of 64 queries reads them four times."""
    tiles = results["tiles"]
    queries, keys = _C.cpu_tile("fp32", 16)
    sizes = [f"{queries} x {keys} (default)", *(f"{q} x {k}" for q in (64, 128) for k in (64, 128))]
    assert tiles.column("queries x keys") == sizes
    times, ratios = tiles.column("time"), tiles.column("time to default")
    assert ratios == pytest.approx([ms / times[0] for ms in times])
    assert tiles.value("k and v read", **{"queries x keys": "64 x 128"}) == 4 * 25 / 1024
    assert tiles.value("k and v read", **{"queries x keys": "128 x 64"}) == 2 * 25 / 1024
    assert set(tiles.plot.series) == {f"{queries} queries, default", "64 queries", "128 queries"}
    assert tiles.plot.series["64 queries"] == [(64, ratios[1]), (128, ratios[2])]


@pytest.fixture
def gpu_tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with Hopper's table of kernels and no GPU: every tile has a time by its number of keys."""
    tiles = module_of("tiles")

    def measure_job(job: Any, device: str, quick: bool) -> dict[str, Any]:
        timed = {tile.name: {"ms": 100.0 + n, "spread": 0.01} for n, tile in enumerate(job.tiles)}
        return {"default": job.tiles[0].name, "tiles": timed, "failures": {}}

    def cuda_tile(backend: str, row: Any, choice: int) -> Any:
        return bench_tune.Tile(bench_tune.private_build().sources.describe(row, choice), backend)

    monkeypatch.setattr(tiles, "running_backend", lambda _name: "cuda-sm90")
    monkeypatch.setattr(tiles, "cuda_tile", cuda_tile)
    monkeypatch.setattr(tiles, "load_builds", lambda jobs: None)
    monkeypatch.setattr(tiles, "measure_job", measure_job)
    monkeypatch.setattr(flashattn_ext, "use_backend", lambda _name: contextlib.nullcontext())
    return tiles


def test_tiles_of_a_gpu_are_those_of_its_row_of_the_table(gpu_tiles: Any) -> None:
    result = Result("tiles", "")
    gpu_tiles.measure(Context(torch.device("cuda"), quick=False), gpu_tiles.SIZES[shared.WHOLE], result)
    table = bench_tune.private_build().sources
    [row] = [
        row
        for row in table.table()
        if (row.architecture, row.stage, row.options, row.head_dim, row.head_dim_v)
        == ("sm90", "forward", "kPlain", 128, 128)
        and "bf16" in row.dtypes
    ]
    names = [table.describe(row, choice) for choice in range(len(row.tiles))]
    assert result.column("queries x keys") == [f"{names[0]} (default)", *names[1:]]
    for name, (queries, keys) in zip(names, (table.queries_and_keys(row, n) for n in range(len(names))), strict=True):
        assert name.startswith(f"{queries} x {keys},")
    points = sorted(point for curve in result.plot.series.values() for point in curve)
    assert [keys for keys, _ in points] == sorted(table.queries_and_keys(row, n)[1] for n in range(len(names)))


def test_tiles_without_a_checkout_are_the_default_one(gpu_tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise CommandError("start this in a checkout")

    monkeypatch.setattr(gpu_tiles, "private_build", fails)
    result = Result("tiles", "")
    gpu_tiles.measure(Context(torch.device("cuda"), quick=True), gpu_tiles.SIZES[shared.WHOLE], result)
    gpu_tiles.compare(result)
    assert result.column("time") == [100.0] and not result.plot.series
    assert result.column("remark") == ["only this tile is measured: start this in a checkout"]
    assert result.comparisons[0].ours == NOT_MEASURED


NSIGHT = """==PROF== Connected to process 1
==PROF== Profiling "gemm" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 1
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","1","void gemm<float, 3>(a, b)","1,024","512"
"1","1","softmax","2048","256.000000"
"""


def fake_program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "ncu").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_counts_of_nsight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of its name that prints what Nsight Compute prints, after it has recorded its arguments."""
    traffic = module_of("traffic")
    (tmp_path / "table").write_text(NSIGHT)
    fake_program(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/arguments; cat {tmp_path}/table')
    context = Context(torch.device("cuda"), quick=True)
    result = Result("traffic", "")
    traffic._add_rows(context, tiny_sizes("traffic"), "GPU counters", result)
    assert [row[:5] for row in result.rows] == [
        ["GPU counters", name, 2, 3 / 1024, 0.75 / 1024] for name in traffic.NAMES
    ]
    arguments = (tmp_path / "arguments").read_text(encoding="utf-8")
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum" in arguments and "--print-units base" in arguments
    assert arguments.endswith("-m flashattn_ext_lab.experiments.traffic unfused 2 3 128 16 fp32\n")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1",
            "RuntimeError: ncu: ERR_NVGPUCTRPERM - no permission",
        ),
        ("echo '==PROF== nothing'", "ncu saw no kernel"),
        ("exit 3", "it failed without a message"),
        (None, "FileNotFoundError: ncu was not found"),
    ],
)
def test_counters_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, reason: str
) -> None:
    if script is None:
        monkeypatch.setattr(shutil, "which", lambda *_arguments, **_options: None)
    else:
        fake_program(tmp_path, monkeypatch, script)
    result = Result("traffic", "")
    sizes = tiny_sizes("traffic")
    module_of("traffic")._add_rows(Context(torch.device("cuda"), quick=True), sizes, "GPU counters", result)
    [row] = result.rows
    assert row[:4] == ["GPU counters", None, None, None] and reason in row[-1]


def test_profile_counts_one_kernel_and_its_steps(out: Path, results: dict[str, Result]) -> None:
    profile = results["profile"]
    assert profile.value("kernels", attention="ours") == 1 and profile.value("gaps", attention="ours") == 0
    assert profile.value("which", attention="ours") == "flashattn_ext::forward"
    assert profile.value("kernels", attention="unfused") >= 3 and profile.value("gaps", attention="unfused") > 0
    assert "2 x aten::bmm" in profile.value("which", attention="unfused")
    for name in ("ours", "unfused"):
        trace = json.loads((out / profile.value("trace", attention=name)).read_text(encoding="utf-8"))
        assert len(module_of("profile").calls_in(trace, on_cpu=True)) == 5


def test_kernels_of_a_gpu_in_a_trace() -> None:
    """A made-up trace of two calls: the second has a memset, and kernels that overlap."""
    profile = module_of("profile")

    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", profile.CALL, 0, 50),
            event("user_annotation", profile.CALL, 100, 50),
            event("cpu_op", "aten::bmm", 1, 3),
            event("kernel", "void gemm<int>(float*)", 10, 20),
            event("kernel", "softmax(float)", 110, 10),
            event("kernel", "void gemm<int>(float*)", 104, 10),
            event("gpu_memset", "Memset (Device)", 130, 5),
        ]
    }
    first, second = profile.calls_in(trace, on_cpu=False)
    assert [profile._short(work.name) for work in second] == ["gemm", "softmax", "Memset"]
    assert profile.gaps(first) == 0 and profile.gaps(second) == 10 and profile.span(second) == 31
    del trace["traceEvents"][4]
    with pytest.raises(RuntimeError, match="shows no kernel"):
        profile.calls_in(trace, on_cpu=False)


def test_layers_of_llama_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = module_of("llama")
    sizes = tiny_sizes("llama")
    gradients = {}
    for name in llama.NAMES:
        torch.manual_seed(0)
        stack = llama.Stack(torch.device("cpu"), sizes, 2, trains=True)
        before = [weight.detach().clone() for weight in stack.layers.parameters()]
        with monkeypatch.context() as patch:
            patch.setattr(stack.layers, "zero_grad", lambda set_to_none: None)
            stack.step(name)
        assert all((old != new).any() for old, new in zip(before, stack.layers.parameters(), strict=True))
        gradients[name] = [weight.grad for weight in stack.layers.parameters()]
        stack.step(name)
        assert stack.x.grad is None and all(weight.grad is None for weight in stack.layers.parameters())
    for name in llama.NAMES:
        torch.testing.assert_close(gradients[name], gradients[shared.OURS])


def test_attentions_of_models_agree() -> None:
    """The losses and the gradients of one step, and the tokens that generate() appends."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")
    models = module_of("models")
    sizes = tiny_sizes("models")
    for model, tokens, documents, layers in sizes.train:
        case = models.Case(models.TRAINING, model, 1, tokens, layers, documents)
        of = models.make_model(torch.device("cpu"), sizes, case)
        inputs = models.Training(of, sizes, case).inputs
        assert int((models.positions(tokens, documents, torch.device("cpu")) == 0).sum()) == documents
        found = []
        for name in set(models.FAMILIES[model].peers) & set(models.ON_CPU):
            of.set_attn_implementation(models.ATTENTIONS[name])
            loss = of(**inputs, use_cache=False).loss
            found.append([loss.detach(), *torch.autograd.grad(loss, of.parameters())])
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-4)
    for model, batch, tokens, cache, layers in sizes.generate:
        case = models.Case(models.DECODING, model, batch, tokens, layers, cache=cache)
        use = models.Generation(models.make_model(torch.device("cpu"), sizes, case), sizes, case)
        chosen = []
        for name in set(models.FAMILIES[model].peers) & set(models.ON_CPU):
            use.model.set_attn_implementation(models.ATTENTIONS[name])
            chosen.append(use.run())
            assert len(use.marks.marks) == sizes.new_tokens and use.marks.median_s() > 0
            use.marks.clear()
        assert all(torch.equal(tokens, chosen[0]) for tokens in chosen)
        assert chosen[0].shape == (batch, tokens + sizes.new_tokens)


def test_a_model_that_cannot_run_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    models = module_of("models")
    sizes = tiny_sizes("models").replace(generate=())

    def refuse(*_: Any) -> None:
        raise ImportError("transformers is not installed")

    with monkeypatch.context() as patch:
        patch.setattr(models, "make_model", refuse)
        result = run_experiment("models", Context(torch.device("cpu"), True), sizes)
    assert not result.error and set(result.column("remark")) == {"all: ImportError: transformers is not installed"}
    result = run_experiment("models", Context(torch.device("cpu"), True), sizes.replace(seconds=-1))
    assert all("the -1 seconds of this experiment were over" in remark for remark in result.column("remark"))


def test_dropout_keeps_the_expected_fraction(results: dict[str, Result]) -> None:
    """Without dropout both train the same model; with it each keeps its fraction of the weights, and the weights keep their mean."""
    dropout = results["dropout"]
    for name in ("ours", "unfused"):
        assert dropout.value("kept", attention=name, dropout=0.0) == 100
        assert dropout.value("kept", attention=name, dropout=0.25) == pytest.approx(75, abs=0.2)
        assert dropout.value("mean weight", attention=name, dropout=0.25) == pytest.approx(100, abs=1)
    ours, unfused = (dropout.value("final loss", attention=name, dropout=0.0) for name in ("ours", "unfused"))
    assert abs(ours - unfused) < 1e-4
    assert set(dropout.plot.bands) == set(dropout.plot.series)


def test_others_are_compared_with_plain_softmax(results: dict[str, Result]) -> None:
    smooth = results["smooth"]
    assert smooth.value("of plain's steps", softmax="plain") == pytest.approx(100)
    assert abs(smooth.value("on no token", softmax="plain")) < 1e-3
    for name in ("smooth", "sink"):  # hardly trained, they attend nearly uniformly: 1/(i + 2) to nothing
        assert 3 < smooth.value("on no token", softmax=name) < 6
        assert 3 < smooth.value("on first token", softmax=name) < 6


def test_steps_to_a_loss() -> None:
    smooth = module_of("smooth")
    curve = [(10, 3.0), (20, 2.0), (30, 2.5), (40, 1.0)]
    assert smooth.steps_to(curve, 4.0) == 10 and smooth.steps_to(curve, 2.25) == 17.5
    assert smooth.steps_to(curve, 1.5) == pytest.approx(30 + 10 * 2 / 3) and smooth.steps_to(curve, 0.5) is None


def test_attention_mass_is_that_of_the_weights() -> None:
    """With equal scores, query i gives every token and the extra logit 1/(i + 2)."""
    smooth, model = module_of("smooth"), importlib.import_module("flashattn_ext_lab.model")
    gpt = model.GPT(model.ModelConfig(1, 16, 2, 2, 0.0, "smooth", "flashattn"), context=32)
    with torch.no_grad():
        gpt.blocks[0].attention.qkv.weight.zero_()
    first, none = smooth.attention_mass(gpt, torch.zeros(2, 32, dtype=torch.long))
    expected = sum(1 / (i + 2) for i in range(16, 32)) / 16
    assert first == pytest.approx(expected, rel=1e-4) and none == pytest.approx(expected, rel=1e-4)


def test_a_training_that_diverges_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module_of("dropout").ATTENTION, "unfused", lambda q, *_: q * math.nan)
    result = run_experiment("dropout", Context(torch.device("cpu"), quick=True), tiny_sizes("dropout"))
    assert not result.error and result.value("final loss", attention="ours") > 0
    assert result.value("final loss", attention="unfused") is None
    assert "the loss became nan at step 1" in result.value("remark", attention="unfused")


@pytest.mark.parametrize("causal", [False, True])
def test_attentions_agree(causal: bool) -> None:
    inputs = cpu_inputs(2, 3, 33, 16)
    for direction in PASSES:
        expected = inputs.call(shared.SDPA, direction, causal)()
        for name in (shared.OURS, shared.UNFUSED):
            torch.testing.assert_close(inputs.call(name, direction, causal)(), expected)


# Unsupported on a device


def test_sizes_of_a_gpu_are_those_of_the_article() -> None:
    for name in EXPERIMENTS:
        sizes = module_of(name).SIZES["gpu", False]
        assert shared.size_notes(sizes, sizes)[0].startswith("sizes: B = 4" if name == "scaling" else "sizes: ")


def test_memory_without_statistics_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "on_cpu", False)
    result = Result("memory", "")
    module_of("memory").measure(Context(torch.device("meta"), quick=True), tiny_sizes("memory"), result)
    assert set(result.column("ours")) == set(result.column("saved")) == {None}
    assert "allocator statistics of meta are not read yet" in result.value("remark", S=1024)


def test_one_attention_that_fails_leaves_the_others(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("16 GiB\nmore")

    monkeypatch.setattr(bench_contestants, "_unfused", fails)
    result = run_experiment("scaling", Context(torch.device("cpu"), quick=True))
    assert not result.error
    assert set(result.column("remark")) == {"unfused: OutOfMemoryError: 16 GiB"}
    assert set(result.column("unfused")) == set(result.column("to unfused")) == {None}
    assert all(ms > 0 for name in ("ours", "torch SDPA") for ms in result.column(name))
    assert [comparison.ours for comparison in result.comparisons if comparison.article] == [NOT_MEASURED] * 2
    json.dumps(result.to_json(), allow_nan=False)


def test_products_that_take_too_long_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of("matmul"), "LIMIT_S", 0.0)
    result = run_experiment("matmul", Context(torch.device("cpu"), quick=True), tiny_sizes("matmul"))
    assert result.value("rate", dtype="bf16", size=32) > 0
    assert result.value("rate", dtype="bf16", size=64) is None
    assert "skipped: at the rate of 32" in result.value("remark", dtype="bf16", size=64)


def test_memory_that_was_freed_before_a_call_counts_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs leave freed memory in the heap, which a result of this size would fit into."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**25))
    sizes = tiny_sizes("scores").replace(S=1024)
    result = 4 * 1024 * 128 * 4
    grown = growth_in_own_process(make_call, torch.device("cpu"), sizes, "ours", "forward", {"score": "softcap"})
    assert result <= grown < 2 * result


def test_memory_of_a_process_that_fails() -> None:
    with pytest.raises(KeyError, match="none"):
        sizes = tiny_sizes("memory").replace(S=64)
        growth_in_own_process(make_call, torch.device("cpu"), sizes, "none", "forward", {})
