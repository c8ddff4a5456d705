"""Activation checkpointing: the recomputed forward draws the same dropout mask."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashattn_ext


@pytest.mark.dtypes("float32", "bfloat16")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(dropout_p=0.5), dict(dropout_p=0.5, rng_seed=3)], ids=str)
def test_checkpointing_gives_the_same_gradients(
    device: str, dtype: torch.dtype, use_reentrant: bool, options: dict
) -> None:
    x = torch.randn(2, 33, 2, 16, device=device).to(dtype).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        y = flashattn_ext.forward(x * 2, x, x + 1, causal=True, **options)
        return flashattn_ext.forward(y, y, y, **options)

    torch.manual_seed(4)
    (expected,) = torch.autograd.grad(block(x).float().square().sum(), x)
    torch.manual_seed(4)
    out = checkpoint(block, x, use_reentrant=use_reentrant)
    torch.manual_seed(99)  # what happens between forward and backward must not matter
    out.float().square().sum().backward()
    assert torch.equal(x.grad, expected)
