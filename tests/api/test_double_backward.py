"""Second derivatives do not exist here: asking for one says so and names what has them."""

from __future__ import annotations

import pytest
import torch

import flashattn_ext


@pytest.mark.parametrize("through", ["out", "lse"])
def test_double_backward_raises(device: str, through: str) -> None:
    q, k, v = (torch.randn(1, 5, 1, 8, device=device, requires_grad=True) for _ in range(3))
    out, lse = flashattn_ext.forward(q, k, v, return_lse=True)
    (dq,) = torch.autograd.grad((out if through == "out" else lse).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_reference"):
        torch.autograd.grad(dq.sum(), q)


def test_the_alternative_that_the_message_names_works(device: str) -> None:
    q, k, v = (torch.randn(1, 5, 1, 8, device=device, requires_grad=True) for _ in range(3))
    out = flashattn_ext.attention_reference(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (ddq,) = torch.autograd.grad(dq.sum(), q)
    assert torch.isfinite(ddq).all()
