"""`bench cuda --set scores` and `--set masks` without a GPU: what every contestant computes there is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")

from torch.nn.attention.flex_attention import create_mask

from flashattn_ext import BlockMask
from flashattn_ext_lab import bench_contestants, bench_cuda
from flashattn_ext_lab.bench_cases import CAUSAL, FA3, FA4, FLASH_ATTN, FLEX, MATH, OURS, PLAIN, SETS, VARLEN, Case
from flashattn_ext_lab.block_patterns import BLOCK_PATTERNS
from flashattn_ext_lab.options import PATTERNS, SCORE_OPTIONS, document_lengths

SMALL = Case(2, 4, 4, 96, 16, True, "fp32", set="tiny")
ROWS = {
    **{name: replace(SMALL, score=name, causal=name != "bias") for name in SCORE_OPTIONS},
    **{name: replace(SMALL, B=1, S=256, pattern=name, causal=of.causal) for name, of in PATTERNS.items()},
    **{name: Case(1, 16, 16, 300, 16, False, "fp32", set="tiny", pattern=name) for name in BLOCK_PATTERNS},
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention in plain PyTorch, which needs no compiler."""
    monkeypatch.setattr(bench_contestants, "compiled", lambda function: function)
    bench_contestants.extras.cache_clear()


# Cases


@pytest.mark.parametrize("S", [1, 24, 512])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_the_same_for_all_contestants(name: str, S: int) -> None:
    pattern = PATTERNS[name]
    dense = pattern.dense(S)
    assert torch.equal(dense, create_mask(pattern.rule(S, "cpu"), 1, 1, S, S, device="cpu"))
    assert pattern.visible_pairs(S) == dense.sum()
    assert dense.diagonal(dim1=-2, dim2=-1).all()  # no row is fully masked
    if pattern.lengths:
        parts = [torch.ones(length, length, dtype=torch.bool).tril() for length in pattern.lengths(S)]
        assert sum(pattern.lengths(S)) == S and torch.equal(dense[0, 0], torch.block_diag(*parts))


@pytest.mark.parametrize("name", BLOCK_PATTERNS)
def test_a_pattern_of_blocks_is_the_same_for_all_contestants(name: str) -> None:
    pattern, S = BLOCK_PATTERNS[name], 1100
    dense, counts = pattern.dense(S), pattern.blocks(S).sum(3)
    assert torch.equal(dense, BlockMask.from_flex(pattern.flex_mask(S, "cpu")).dense())
    of_blocks = pattern.blocks(S).repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :S, :S]
    assert pattern.visible_pairs(S) == of_blocks.sum() / pattern.heads
    assert torch.equal(dense, of_blocks) == (not pattern.is_partial)
    if pattern.is_unequal:
        assert (
            counts.amin() == 1
            and counts.amax() == 9
            and pattern.blocks(1 << 16).float().mean() == pytest.approx(pattern.share, abs=0.01)
        )
    else:
        assert (counts == max(round(9 * pattern.share), 1)).all()


def test_documents_are_of_very_different_lengths() -> None:
    lengths = document_lengths(32768)
    assert sum(lengths) == 32768 and 8 <= len(lengths) <= 32 and max(lengths) > 8 * min(lengths)


def test_rows_count_what_is_visible() -> None:
    S = 512
    for name, pattern in PATTERNS.items():
        case = Case(3, 4, 2, S, 8, pattern.causal, "bf16", pattern=name)
        assert case.flop == 4 * 3 * 4 * 8 * pattern.dense(S).sum() and case.mask == name
        assert replace(case, backward=True).flop == 2.5 * case.flop
        beside = case.beside()
        assert beside[CAUSAL].flop == 4 * 3 * 4 * 8 * S * S / 2 and (VARLEN in beside) == (pattern.lengths is not None)
        if pattern.lengths:
            assert sum(beside[VARLEN].lengths) == 3 * S and beside[VARLEN].flop == pytest.approx(case.flop, rel=0.05)
    case = replace(SMALL, score="softcap")
    assert case.flop == SMALL.flop and case.mask == "causal softcap" and case.beside() == {PLAIN: SMALL}


def test_the_sets_have_every_option_and_pattern() -> None:
    assert {(case.score, case.D) for case in SETS["scores"]} == {(name, D) for name in SCORE_OPTIONS for D in (64, 128)}
    assert {(case.pattern, case.D) for case in SETS["blocks"]} == {
        (name, D) for name in BLOCK_PATTERNS for D in (64, 128)
    }
    assert all(case.beside()[PLAIN] == replace(case, pattern="") for case in SETS["blocks"])
    assert {(case.pattern, case.D) for case in SETS["masks"]} == {(name, D) for name in PATTERNS for D in (64, 128)}
    shapes = {(case.pattern, case.D): case.shape for case in SETS["masks"]}
    assert shapes["documents", 128] == "1x64:8x32768x128" and shapes["prefix", 128] == "1x16x16384x128"
    assert shapes["window", 64] == "1x32x32768x64"
    bias = next(case for case in SETS["scores"] if case.score == "bias")
    assert bias.shape == "2x16x4096x128" and bias.mask == "full bias"


# Measuring


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_every_contestant_computes_the_same(on_cpu: None, name: str, backward: bool) -> None:
    case = replace(ROWS[name], backward=backward)
    row = bench_cuda.measure_case(case, [OURS, MATH, FLEX], quick=False)
    assert json.loads(json.dumps(row)) == row
    missing = {MATH} if case.score == "softcap" else set()
    missing |= {FLEX} if backward else set()  # it has no backward on the CPU
    assert set(row["failures"]) == missing
    for contestant in {OURS, MATH, FLEX} - missing:
        assert row["ms"][contestant] > 0 and 0 < row["max_error"][contestant] < 2e-5
    beside = row["beside"]
    for other in case.beside():
        assert beside[other]["ratio"] == pytest.approx(row["tflops"][OURS] / beside[other]["tflops"])


@pytest.mark.parametrize("name", SCORE_OPTIONS)
def test_gradients_of_the_options_are_timed_and_agree(name: str) -> None:
    case, device = replace(ROWS[name], backward=True), torch.device("cpu")
    tensors = bench_contestants.inputs(case, "cpu")
    trains = SCORE_OPTIONS[name].trains
    gradients = bench_contestants.timed_call(case, OURS, *tensors)()
    assert len(gradients) == 3 + trains
    if trains:
        of = bench_contestants.extras(case, device)
        assert gradients[3].shape == of.value.shape and gradients[3].abs().sum() > 0
        of_scores = bench_contestants.timed_call(case, MATH, *tensors)()[3]  # gradient of the dense bias
        with torch.enable_grad():
            added = SCORE_OPTIONS[name].added(of.value, case.S)
        [expected] = torch.autograd.grad(added, of.value, of_scores[0])
        assert torch.allclose(gradients[3], expected, atol=1e-4)


@pytest.mark.parametrize("name", [FLASH_ATTN, FA3, FA4])
def test_flash_attn_gets_its_own_options(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given: dict[str, object] = {}
    module = SimpleNamespace(flash_attn_func=lambda q, k, v, **options: given.update(options) or q)
    monkeypatch.setattr(bench_contestants, "flash_module", {name: module}.get)
    case = replace(SMALL, score="softcap", dropout=0.1)
    bench_contestants.timed_call(case, name, *bench_contestants.inputs(case, "cpu"))()
    assert given == {"dropout_p": 0.1, "causal": True, "softcap": 30.0}


def test_the_reference_is_skipped_where_it_exceeds_the_memory() -> None:
    case = Case(1, 64, 8, 32768, 128, True, "bf16")
    with pytest.raises(ValueError, match="in fp64 the scores of 8 heads take 64 GiB"):
        bench_cuda.reference_results(case, *[torch.empty(0)] * 4)


# Tables


def test_tables_show_what_their_rows_have(on_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(case: Case, names: list[str]) -> str:
        rows = [bench_cuda.measure_case(case, names, quick=True)]
        about = {"machine": "a GPU", "backend": "none", "torch": "2", "cuda": "12", "cudnn": 9}
        bench_cuda.show({**about, "contestants": names, "rows": rows}, markdown=True)
        return capsys.readouterr().out

    text = shown(ROWS["documents"], [OURS, MATH, FLEX])
    assert "| ours | math | flex | to best | to flex | to causal | to varlen | spread |" in text
    assert "| tiny | 1x4x256x16 | fp32 | documents | forward |" in text
    text = shown(ROWS["alibi"], [OURS, MATH, FLEX])
    assert "| ours | math | flex | to best | to flex | to plain | spread |" in text and "causal alibi" in text
    text = shown(SMALL, [OURS, MATH, FLEX])
    assert "| ours | math | to best | spread |" in text  # FlexAttention was not selected


def test_a_row_makes_its_tensors_once(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the name of the device differs from that of its tensors, as "cuda" from "cuda:0"."""
    monkeypatch.setattr(bench_contestants, "DEVICE", "cpu:0")
    bench_cuda.measure_case(ROWS["documents"], [OURS, MATH, FLEX], quick=False)
    assert bench_contestants.extras.cache_info().misses == 1
