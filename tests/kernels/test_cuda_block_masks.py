"""Block masks on a GPU: every kernel that reads one, long lists, graphs, no synchronisation, and lists that nothing has checked."""

from __future__ import annotations

from typing import Any

import pytest
import test_derivatives
import torch
import torch.nn.functional as F
from helpers import Case, assert_same_bits, check
from mask_cases import BLOCK_KINDS
from test_cuda import DTYPES, PATHS, captured, leaves, no_waiting
from torch import Tensor

import flashattn_ext
from flashattn_ext import BlockMask
from flashattn_ext.integrations import sdpa

__all__ = ["no_waiting"]  # a fixture

OPTIONS: dict[str, dict[str, Any]] = {
    "masks": {},
    "general": dict(softcap=3.0, alibi="heads", bias="hq", dropout_p=0.2, rng_seed=3),
}


def random_blocks(heads: int, S: int, share: float, seed: int = 0, batch: int = 1) -> Tensor:
    blocks = -(-S // 128)
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(batch, heads, blocks, blocks, device="cuda", generator=generator) < share


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D,Dv", [(64, 64), (128, 128), (192, 128), (256, 256), (264, 200)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_every_kernel(path: str, dtype: torch.dtype, D: int, Dv: int, causal: bool, options: str) -> None:
    case = Case(
        dtype=dtype, B=2, Sq=400, Sk=530, Hq=4, Hk=2, D=D, Dv=Dv, mask="block_pairs", mask_heads="q", causal=causal,
        use_lse=True, max_logits=True, **OPTIONS[options],
    )  # fmt: skip
    with flashattn_ext.use_backend(f"cuda-{path}"):
        check(case, "cuda")


@pytest.mark.parametrize("options", [{}, dict(causal=True, softcap=2.0, alibi="heads")], ids=["masks", "general"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["block_pairs", "block_router"])
def test_second_derivatives_and_forward_mode(kind: str, dtype: torch.dtype, D: int, options: dict[str, Any]) -> None:
    case = Case(
        dtype=dtype, B=1, Sq=300, Sk=400, Hq=4, Hk=2, D=D, Dv=D, mask=kind, mask_heads="q", use_lse=True, **options
    )
    test_derivatives.check(case, "cuda")


@pytest.mark.parametrize("heads", ["1", "k", "q"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (900, 40)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_lists_longer_than_a_block_keeps(dtype: torch.dtype, kind: str, window: tuple[int, int], heads: str) -> None:
    """More tiles of a row than the first warp lists at a time, cut by causal and windows inside blocks."""
    case = Case(
        dtype=dtype, B=1, Sq=2900, Sk=3100, Hq=4, Hk=2, D=64, Dv=64, mask=kind, mask_heads=heads, window_size=window,
        use_lse=True, max_logits=True,
    )  # fmt: skip
    check(case, "cuda")


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (700, 30)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("path", PATHS)
def test_deterministic(path: str, dtype: torch.dtype, D: int, window: tuple[int, int], heads: int) -> None:
    """Key tiles wait for those of the lists alone, head by head, and add up in one order."""
    S = 1500
    q = torch.randn(2, S, 8, D, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, S, 2, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    partial = random_blocks(heads, S, 0.1, 1).repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :S, :S]
    whole = random_blocks(heads, S, 0.4).repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :S, :S]
    mask = BlockMask.from_dense(whole | (partial & (torch.rand(partial.shape, device="cuda") < 0.5)))
    with flashattn_ext.use_backend(f"cuda-{path}"):
        results = []
        for deterministic in (True, True, False):
            out = flashattn_ext.forward(q, k, v, mask=mask, window_size=window, deterministic=deterministic)
            results.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    for name, first, second, other in zip(("dq", "dk", "dv"), *results, strict=True):
        assert_same_bits(first, second, name)
        torch.testing.assert_close(first, other, rtol=2e-2, atol=2e-2)


def test_never_waits_for_the_device(no_waiting: None) -> None:
    q, k, v = leaves(1, 1000, 4, 64)
    for deterministic in (False, True):
        mask = BlockMask.from_blocks(random_blocks(4, 1000, 0.5), 1000, 1000)
        out, lse = flashattn_ext.forward(q, k, v, mask=mask, causal=True, deterministic=deterministic, return_lse=True)
        torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    visible = random_blocks(1, 300, 0.5).repeat_interleave(100, 2)
    BlockMask.from_dense(visible, max_partial=9)


def test_layers_share_the_blocks_of_a_boolean_mask(no_waiting: None) -> None:
    """Through scaled_dot_product_attention: each layer cuts off the keys that it has. A write to the mask makes new blocks."""
    S, mask = 1100, torch.rand(2, 1, 1100, 1200, device="cuda") < 0.5
    of_layers = [sdpa._mask_and_bias(mask[..., :S], torch.float16, 2, 4, S, S)[0] for _ in range(2)]
    assert isinstance(of_layers[0], BlockMask) and of_layers[0] is of_layers[1]
    mask[:, :, 1:, 1:].logical_not_()
    assert sdpa._mask_and_bias(mask[..., :S], torch.float16, 2, 4, S, S)[0] is not of_layers[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_boolean_masks_of_torchs_attention(dtype: torch.dtype) -> None:
    S, (q, k, v) = 1100, leaves(2, 3, 1100, 64, dtype=dtype)
    visible = torch.rand(2, 1, S, S, device="cuda") < 0.5
    visible[..., 500, :], visible[..., :300] = False, False
    dout = torch.randn_like(q)
    for mask in (visible, visible[:1, :, :, ::2].repeat_interleave(2, 3), visible[:1].expand(2, 3, S, S)):
        with sdpa.activate(report=True) as report:
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert report.ours == 1
        precise = [t.detach().double().requires_grad_() for t in (q, k, v)]
        expected = F.scaled_dot_product_attention(*precise, attn_mask=mask)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(
            torch.autograd.grad(got, (q, k, v), dout),
            torch.autograd.grad(expected, precise, dout.double()),
            strict=True,
        ):
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def test_graph_replays_route_anew() -> None:
    """A router, its mask, forward and backward in one graph."""
    S = 1300
    q, k, v = leaves(1, S, 2, 64)
    scores = torch.empty(1, 2, 11, 11, device="cuda")

    def step() -> tuple[Tensor, ...]:
        best = torch.zeros_like(scores, dtype=torch.bool).scatter(3, scores.topk(4).indices, True)
        out = flashattn_ext.forward(q, k, v, mask=BlockMask.from_blocks(best, S, S))
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    scores.normal_()
    graph, results = captured(step)
    for _ in range(3):
        scores.normal_()
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_partial_blocks_than_max_partial(dtype: torch.dtype, options: str) -> None:
    """Rows of the blocks without bits are NaN, others have their results."""
    S = 600
    given = {"softcap": 3.0} if options == "general" else {}
    visible = torch.ones(1, 1, S, S, dtype=torch.bool, device="cuda")
    visible[..., 10, 10], visible[..., 300, 20], visible[..., 590, 590] = (
        False,
        False,
        False,
    )  # blocks of rows 0, 2 and 4
    q, k, v = leaves(1, S, 2, 64, dtype=dtype)
    out, lse = flashattn_ext.forward(
        q, k, v, mask=BlockMask.from_dense(visible, max_partial=1), return_lse=True, **given
    )
    expected = flashattn_ext.forward(q, k, v, mask=BlockMask.from_dense(visible), **given)
    rows = torch.arange(S, device="cuda") // 128
    lost = (rows == 2) | (rows == 4)
    assert out[:, lost].isnan().all() and lse[..., lost].isnan().all()
    torch.testing.assert_close(out[:, ~lost], expected[:, ~lost], rtol=1e-2, atol=1e-2)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert dq[:, lost].isnan().all() and dk.isnan().all() and dv.isnan().all()
    (expected_dq,) = torch.autograd.grad(expected, q, torch.ones_like(expected))
    torch.testing.assert_close(dq[:, ~lost], expected_dq[:, ~lost], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("path", PATHS)
def test_no_address_follows_from_what_lists_hold(path: str, options: str, seed: int) -> None:
    """Any numbers in lists on the device: the results mean nothing, but kernels stay in their tensors and end.

    Deterministic backwards need not end: they wait for the blocks that one of the lists names in the other."""
    S, given = 700, {"softcap": 3.0} if options == "general" else {}
    q, k, v = leaves(1, S, 2, 64)
    mask = BlockMask.from_dense(torch.rand(1, 2, S, S, device="cuda") < 0.5)
    generator = torch.Generator("cuda").manual_seed(seed)
    most = [40, 2**31 - 1][seed % 2]
    hostile = torch.randint(-most, most, mask.lists.shape, dtype=torch.int32, device="cuda", generator=generator)
    if seed % 4 < 2:  # starts are as they were
        hostile[..., -16:] = mask.lists[..., -16:]
    with flashattn_ext.use_backend(f"cuda-{path}"):
        out = flashattn_ext.forward(q, k, v, mask=BlockMask(hostile, mask.bits, S, S), causal=seed % 3 == 0, **given)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.cuda.synchronize()
    plain = flashattn_ext.forward(q, k, v)
    assert plain.isfinite().all()
