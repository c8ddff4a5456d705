"""Packed calls in the kernels of short sequences: that they run there, and sequences that are longer than max_seqlen says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_backends import cuda_backends
from helpers import Case, assert_same_bits, call, check, cotangents, cu_seqlens, make_inputs, run
from test_whole_heads import PACKED_OPTIONS
from torch.profiler import ProfilerActivity, profile

import flashattn_ext

BACKENDS = cuda_backends()
HALF = (torch.float16, torch.bfloat16)
ALL = {"plain": {}, **PACKED_OPTIONS}
# Sequences of several chunks of keys and tiles of queries with the hints below, and of none.
LONG_Q, LONG_K = (70, 0, 1, 300, 33, 5), (90, 5, 0, 400, 130, 33)
# cu_seqlens for as many sequences, which leave the tensors or decrease.
INVALID = (
    [0, 500, -7, 300, 20, 409, 409],
    [2**31 - 1, -(2**31), 5, 400, 30, 2, 90],
    [70, 30, 2, 1, 0, -3, 10000],
)


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with flashattn_ext.use_backend(request.param):
        yield request.param


def packed(dtype: torch.dtype, D: int, option: str, **more: Any) -> Case:
    shape: dict[str, Any] = {"lengths_q": LONG_Q, "lengths_k": LONG_K, "Hq": 4, "Hk": 2, "D": D, "Dv": D}
    return Case(dtype=dtype, **{**shape, **ALL[option], **more})


def kernels_of(case: Case) -> str:
    """The names of all kernels that a call and its backward run."""
    inputs = make_inputs(case, "cuda")
    run(case, inputs)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        run(case, inputs)
        torch.cuda.synchronize()
    return " ".join(event.name for event in prof.events())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("D,option", [(32, "plain"), (64, "plain"), (32, "mask with others"), (64, "relative")])
def test_the_kernels_run(D: int, option: str, dtype: torch.dtype) -> None:
    """With hints up to 64 keys in every class, whatever the lengths are."""
    for lengths in (((49, 64, 3), (49, 64, 3)), (LONG_Q, LONG_K)):
        names = kernels_of(packed(dtype, D, option, lengths_q=lengths[0], lengths_k=lengths[1], hints=(64, 64)))
        assert "heads_forward_kernel" in names and "heads_backward_kernel" in names, names


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("keys", [81, 128, 197])
def test_the_forward_runs_where_dense_calls_have_wgmma(keys: int, dtype: torch.dtype) -> None:
    names = kernels_of(packed(dtype, 64, "plain", lengths_q=(keys, 20), lengths_k=(keys, 20), hints=(keys, keys)))
    assert "heads_forward_kernel" in names, names


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("hints", [(1, 1), (20, 20), (100, 33), (33, 64)], ids=str)
@pytest.mark.parametrize("option", [*ALL])
@pytest.mark.parametrize("D", [32, 64])
def test_sequences_longer_than_the_hints(D: int, option: str, hints: tuple[int, int], dtype: torch.dtype) -> None:
    check(packed(dtype, D, option, hints=hints), "cuda")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("hints", [(1, 1), (20, 20), (64, 64), (10, 100)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("D,Dv", [(32, 24), (64, 64), (100, 128), (128, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_plain_sequences_longer_than_the_hints(
    causal: bool, D: int, Dv: int, heads: tuple[int, int], hints: tuple[int, int], dtype: torch.dtype
) -> None:
    """One stage of queries in shared memory or two, and the head dims of plain kernels alone."""
    shape = {"Dv": Dv, "Hq": heads[0], "Hk": heads[1], "causal": causal, "use_lse": True}
    check(packed(dtype, D, "plain", hints=hints, **shape), "cuda")


@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("length", [255, 256, 257, 1000])
def test_one_long_sequence(D: int, length: int) -> None:
    """As many chunks as there are keys for, the last of which is full or has one key."""
    for hint in (16, 64):
        case = packed(torch.bfloat16, D, "plain", lengths_q=(length,), lengths_k=(length,), hints=(hint, hint))
        check(case, "cuda")


@pytest.mark.parametrize("option", ["plain", "mask", "slopes with gradient", "mask and sink"])
@pytest.mark.parametrize("D", [32, 64])
def test_bits_repeat(D: int, option: str) -> None:
    """In every run, over any contents of the workspace, for sequences of several chunks too."""
    case = packed(torch.bfloat16, D, option, hints=(20, 20))
    inputs = make_inputs(case, "cuda")
    first = run(case, inputs)
    for filled in (torch.nan, 1e30):
        used = [torch.full((1 << 18,), filled, device="cuda") for _ in range(8)]
        del used  # freed, so that the allocator hands it out again
        again = run(case, inputs)
        assert_same_bits(again.out, first.out)
        for name, grad in first.grads.items():
            assert grad.isfinite().all() and grad.any(), name
            assert_same_bits(again.grads[name], grad, name)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("option", ["plain", "mask"])
@pytest.mark.parametrize("D", [32, 64])
def test_what_is_not_finite_stays_in_its_sequence(D: int, option: str, where: str) -> None:
    """Others keep their bits, whichever of them is in chunks."""
    case = packed(torch.bfloat16, D, option, hints=(40, 40))
    inputs = make_inputs(case, "cuda")
    clean = run(case, inputs)
    starts = {side: inputs.cu_seqlens[f"cu_seqlens_{side}"].tolist() for side in "qk"}
    for sequence in (0, 3):
        poisoned = make_inputs(case, "cuda")
        rows = slice(*starts["q" if where == "q" else "k"][sequence : sequence + 2])
        getattr(poisoned, where).data[rows] = torch.nan
        after = run(case, poisoned)
        for name, t, before in (("q", after.out, clean.out), *((n, after.grads[n], clean.grads[n]) for n in "qkv")):
            begin, end = starts["q" if name == "q" else "k"][sequence : sequence + 2]
            assert_same_bits(t[:begin], before[:begin], name)
            assert_same_bits(t[end:], before[end:], name)
        begin, end = starts["q"][sequence : sequence + 2]
        assert after.out[begin:end].isnan().any()


@pytest.mark.parametrize("D", [32, 64, 128])
def test_no_rows(D: int) -> None:
    """Sequences without queries or keys alone, and tensors without rows."""
    for lengths_q, lengths_k in (((0, 0), (0, 0)), ((5, 0), (0, 0)), ((0, 0), (30, 5))):
        case = packed(torch.float16, D, "plain", lengths_q=lengths_q, lengths_k=lengths_k, hints=(40, 40))
        got = run(case, make_inputs(case, "cuda"))
        assert not got.out.any() and got.lse.isneginf().all()
        assert not any(grad.any() for grad in got.grads.values())


def test_dropout_is_that_of_a_dense_call() -> None:
    """With equal lengths both drop the same scores: where values are 1, an output counts the weights that are kept."""
    options: dict[str, Any] = {"dropout_p": 0.4, "rng_seed": 99}
    for length, D in ((49, 64), (64, 32), (60, 64)):
        q, k = (torch.randn(3, length, 2, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        v, starts = torch.ones_like(k), torch.arange(4, dtype=torch.int32, device="cuda") * length
        dense = flashattn_ext.forward(q, k, v, **options)
        rows = [t.flatten(0, 1) for t in (q, k, v)]
        for hint in (length, 20):
            out = flashattn_ext.varlen_forward(*rows, starts, starts, hint, hint, **options)
            torch.testing.assert_close(out.view(q.shape), dense, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("option", ["plain", "slopes with gradient", "mask", "dropout"])
@pytest.mark.parametrize("D", [32, 64])
def test_a_graph_replays_longer_sequences(D: int, option: str) -> None:
    """cu_seqlens may change between replays, to lengths that max_seqlen of the capture does not cover."""
    case = packed(torch.bfloat16, D, option, hints=(20, 20))
    inputs = make_inputs(case, "cuda")
    expected = run(case, inputs)
    grown = {name: starts.clone() for name, starts in inputs.cu_seqlens.items()}
    for side, lengths in (("q", LONG_Q), ("k", LONG_K)):
        inputs.cu_seqlens[f"cu_seqlens_{side}"].copy_(cu_seqlens([min(length, 20) for length in lengths], "cuda"))
    dout, _ = cotangents(case, expected.out, expected.lse)
    leaves = [inputs.leaves()[name] for name in inputs.grad_names()]

    def step() -> list[torch.Tensor]:
        out, lse = call(case, inputs)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for name, starts in grown.items():
        inputs.cu_seqlens[name].copy_(starts)
    graph.replay()
    for got, of in zip(results, (expected.out, expected.lse, *expected.grads.values()), strict=True):
        assert_same_bits(got, of)


@pytest.mark.parametrize("option", [*ALL])
@pytest.mark.parametrize("D", [32, 64])
def test_calls_after_invalid_starts(D: int, option: str) -> None:
    """Ranges are clamped to the tensors: such a call ends, and a valid one after it has its bits."""
    case = packed(torch.bfloat16, D, option, hints=(16, 16))
    inputs = make_inputs(case, "cuda")
    expected = run(case, inputs)
    valid = inputs.cu_seqlens
    for starts in INVALID:
        given = torch.tensor(starts, dtype=torch.int32, device="cuda")
        for sides in (("q",), ("k",), ("q", "k")):
            inputs.cu_seqlens = {name: given if name[-1] in sides else of for name, of in valid.items()}
            run(case, inputs)
            torch.cuda.synchronize()
    inputs.cu_seqlens = valid
    after = run(case, inputs)
    assert_same_bits(after.out, expected.out)
    for name in "qkv":
        assert_same_bits(after.grads[name], expected.grads[name], name)
