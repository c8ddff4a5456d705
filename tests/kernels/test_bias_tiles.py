"""Calls whose only option is a 16-bit bias with rows of a multiple of 16 bytes: Hopper loads its tiles with TMA."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Case, assert_same_bits, check

import flashattn_ext

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.mark.parametrize("D", [40, 64, 96, 128, 144, 256])
@pytest.mark.parametrize("bias", ["", "q", "bhq"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dims(device: str, bias: str, D: int, causal: bool) -> None:
    case = Case(dtype=torch.bfloat16, Sq=200, Sk=328, Hq=4, D=D, Dv=D, bias=bias, bias_hides=0.1, causal=causal)
    check(case, device)


@HALVES
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("Sq", "Sk"), [(1, 8), (7, 64), (193, 136), (400, 1000), (64, 335)])
def test_lengths(device: str, half: torch.dtype, D: int, Sq: int, Sk: int) -> None:
    """Rows of 335 keys are not a multiple of 16 bytes, so these calls do not use TMA."""
    check(Case(dtype=half, Sq=Sq, Sk=Sk, D=D, Dv=D, bias="hq", use_lse=True, softmax_scale=-0.2), device)


@HALVES
@pytest.mark.parametrize("D", [64, 128])
def test_one_in_many_tiles(device: str, half: torch.dtype, D: int) -> None:
    """So many tiles that a thread block computes several; with a window some of them are fully masked for a warpgroup."""
    case = Case(dtype=half, B=4, Sq=300, Sk=304, Hq=24, D=D, Dv=D, bias="hq", window_size=(70, 40), needs_grad=())
    check(case, device)


@pytest.mark.parametrize("bias", ["q", "hq", "bhq"])
def test_gradients_of_many_tiles(device: str, bias: str) -> None:
    """So many tiles that a thread block computes several; the bias is broadcast over heads or batch entries, or is not."""
    check(
        Case(
            dtype=torch.bfloat16,
            B=3,
            Sq=300,
            Sk=392,
            Hq=16,
            Hk=8,
            D=128,
            Dv=128,
            bias=bias,
            bias_hides=0.01,
            causal=True,
        ),
        device,
    )


@HALVES
def test_bias_without_gradient(device: str, half: torch.dtype) -> None:
    check(Case(dtype=half, Sq=130, Sk=264, D=128, Dv=72, bias="hq", needs_grad=("q", "k", "v"), use_lse=True), device)


@pytest.mark.parametrize("shape", [(1, 4, 200, 264), (3, 4, 200, 264), (1, 1, 1, 264)], ids=["shared", "whole", "keys"])
def test_deterministic(device: str, shape: tuple[int, ...]) -> None:
    q, k, v = (
        torch.randn(3, S, 4, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for S in (200, 264, 264)
    )
    bias = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = flashattn_ext.forward(q, k, v, bias=bias, causal=True, deterministic=True)
        return torch.autograd.grad(out.square().sum(), (q, k, v, bias))

    for one, other in zip(gradients(), gradients(), strict=True):
        assert_same_bits(one, other)


@HALVES
@pytest.mark.parametrize("D", [64, 128])
def test_hidden_scores_may_be_anything(device: str, half: torch.dtype, D: int) -> None:
    """A bias of -inf hides a score that is not a number, and its row keeps its bits."""
    q, k, v = (torch.randn(2, 200, 2, D, device=device).to(half) for _ in range(3))
    bias = torch.randn(1, 2, 200, 200, device=device).to(half)
    bias[:, :, :150, 77] = -math.inf
    clean, clean_lse = flashattn_ext.forward(q, k, v, bias=bias, return_lse=True)
    k[:, 77] = math.nan
    out, lse = flashattn_ext.forward(q, k, v, bias=bias, return_lse=True)
    assert_same_bits(out[:, :150], clean[:, :150])
    assert_same_bits(lse[:, :, :150], clean_lse[:, :, :150])
    assert out[:, 150:].isnan().all()
