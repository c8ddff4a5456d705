"""Tests notice memory that a kernel leaves unset: every result and workspace of the package is filled with NaN before a kernel runs."""

from __future__ import annotations

import poison
import pytest
import torch

import flashattn_ext


def test_what_torch_hands_out_is_poisoned(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.empty(7, 3, dtype=dtype, device=device).isnan().all()
    assert (torch.empty(9, dtype=torch.uint8, device=device).view(-1) == 255).all()
    assert torch.empty(64, dtype=torch.uint8, device=device).view(torch.float32).isnan().all()
    assert torch.empty(2, 3, 4, 5, memory_format=torch.channels_last).stride() == (60, 1, 15, 3)
    assert not torch.zeros(5, device=device).any()


@pytest.mark.dtypes("bfloat16", "float16")
def test_results_and_workspaces_are_poisoned(device: str, dtype: torch.dtype) -> None:
    """The backward has a workspace in 16 bits (fp32 sums of dq); on the emulator the forward has one, too. CUDA's kernels of whole heads, which
    have none, do not run deterministic calls.
    """
    q, k, v = (torch.randn(1, 20, 2, width).to(device, dtype).requires_grad_() for width in (16, 16, 24))
    poison.allocated.clear()
    out, lse = flashattn_ext.forward(q, k, v, return_lse=True, deterministic=True)
    assert {(out.dtype, tuple(out.shape)), (lse.dtype, tuple(lse.shape))} <= set(poison.allocated)
    poison.allocated.clear()
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    assert {(t.dtype, tuple(t.shape)) for t in gradients} <= set(poison.allocated)
    assert any(kind == torch.uint8 for kind, _ in poison.allocated)
