"""The result of one sequence has the same bits alone, in a batch and packed, for any neighbours."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_bits, cu_seqlens

import flashattn_ext

pytestmark = pytest.mark.usefixtures("deterministic")

OPTIONS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window_size=(40, 3)),
    "smooth": dict(smooth_softmax=True),
    "scale": dict(softmax_scale=0.4),
    # So that some products of a tile are small and some are not: CUDA caps them in different ways.
    "softcap": dict(softcap=5.0, softmax_scale=0.3),
}


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of a dense call."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = flashattn_ext.forward(*leaves, **options, return_lse=True)
    return [out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)]


@pytest.mark.every_isa
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("D,Dv", [(40, 40), (104, 104), (160, 96)])  # three orders of products on Hopper
def test_alone_in_a_batch_and_packed(device: str, dtype: torch.dtype, name: str, D: int, Dv: int) -> None:
    options = OPTIONS[name]
    q = torch.randn(3, 100, 4, D, device=device).to(dtype)
    k, v = (torch.randn(3, 150, 2, columns, device=device).to(dtype) for columns in (D, Dv))
    batch = results(q, k, v, **options)
    for b in range(3):
        alone = results(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options)
        for what, whole, part in zip(("out", "lse", "dq", "dk", "dv"), batch, alone, strict=True):
            assert_same_bits(whole[b : b + 1], part, f"{what} of entry {b}")

    # As a packed sequence between two others.
    packed = [
        torch.cat([torch.randn(13, *t.shape[2:], device=device).to(dtype), t[1], torch.randn(71, *t.shape[2:], device=device).to(dtype)])
        for t in (q, k, v)
    ]  # fmt: skip
    leaves = [t.requires_grad_() for t in packed]
    starts_q, starts_k = cu_seqlens([13, 100, 71], device), cu_seqlens([13, 150, 71], device)
    out, lse = flashattn_ext.varlen_forward(*leaves, starts_q, starts_k, 100, 150, **options, return_lse=True)
    grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)
    assert_same_bits(out[13:113], batch[0][1], "packed out")
    assert_same_bits(lse[:, 13:113], batch[1][1], "packed lse")
    for what, grad, ref, length in zip(("dq", "dk", "dv"), grads, batch[2:], (100, 150, 150), strict=True):
        assert_same_bits(grad[13 : 13 + length], ref[1], f"packed {what}")


@pytest.mark.parametrize("D", [64, 128])
def test_large_neighbour_under_a_softcap(device: str, dtype: torch.dtype, D: int) -> None:
    """One query whose products are large, among others of its tile whose products are small."""
    q, k, v = (torch.randn(1, 150, 2, D, device=device).to(dtype) for _ in range(3))
    large = q.clone()
    large[:, 70] *= 100
    others = torch.arange(150) != 70
    for what, one, other in zip(
        ("out", "lse", "dq"), results(q, k, v, softcap=30.0), results(large, k, v, softcap=30.0), strict=False
    ):
        rows = 2 if what == "lse" else 1
        assert_same_bits(*(x.index_select(rows, others.nonzero()[:, 0].to(device)) for x in (one, other)), what)


def test_many_small_sequences(device: str, dtype: torch.dtype) -> None:
    """More sequences than any tile or thread count."""
    q = torch.randn(50, 5, 2, 16, device=device).to(dtype)
    starts = cu_seqlens([5] * 50, device)
    packed = flashattn_ext.varlen_forward(*[q.flatten(0, 1)] * 3, starts, starts, 5, 5, causal=True)
    for b in range(50):
        alone = flashattn_ext.forward(*[q[b : b + 1]] * 3, causal=True)
        assert_same_bits(packed.view_as(q)[b : b + 1], alone, f"sequence {b}")
