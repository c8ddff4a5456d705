"""Inside torch.autocast, inputs are cast as for scaled_dot_product_attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import flashattn_ext


@pytest.mark.dtypes("bfloat16", "float16")
def test_fp32_inputs_are_cast(device: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 33, 2, 16, device=device, requires_grad=True) for _ in range(3))
    with torch.autocast(device, dtype=dtype):
        out = flashattn_ext.forward(q, k, v, causal=True)
        sdpa = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    assert out.dtype == sdpa.dtype == dtype
    assert torch.equal(out, flashattn_ext.forward(*(t.to(dtype) for t in (q, k, v)), causal=True))
    grads = torch.autograd.grad(out.float().square().sum(), [q, k, v])
    assert all(g.dtype == torch.float32 for g in grads)


@pytest.mark.dtypes("bfloat16")
def test_mixed_inputs_are_unified(device: str, dtype: torch.dtype) -> None:
    """A projection computed under autocast beside fp32 tensors."""
    q, k, v = (torch.randn(2, 33, 2, 16, device=device) for _ in range(3))
    with torch.autocast(device, dtype=dtype):
        mixed = flashattn_ext.forward(q.to(dtype), k, v.to(dtype))
    assert torch.equal(mixed, flashattn_ext.forward(*(t.to(dtype) for t in (q, k, v))))


@pytest.mark.dtypes("bfloat16")
def test_a_sink_parameter_keeps_its_gradient_dtype(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(2, 33, 2, 16, device=device)
    sink = torch.zeros(2, device=device, requires_grad=True)
    with torch.autocast(device, dtype=dtype):
        out = flashattn_ext.forward(q, q, q, sink=sink)
    out.float().sum().backward()
    assert sink.grad is not None and sink.grad.dtype == torch.float32


@pytest.mark.dtypes("bfloat16")
@pytest.mark.computes_in_fp32
def test_varlen_and_disabled_regions(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(30, 2, 16, device=device)
    starts = torch.tensor([0, 10, 30], dtype=torch.int32, device=device)
    with torch.autocast(device, dtype=dtype):
        assert flashattn_ext.varlen_forward(q, q, q, starts, starts, 20, 20).dtype == dtype
        with torch.autocast(device, enabled=False):
            assert flashattn_ext.varlen_forward(q, q, q, starts, starts, 20, 20).dtype == torch.float32


@pytest.mark.dtypes("float64")
def test_fp64_is_left_alone(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(1, 5, 1, 8, device=device, dtype=dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        sdpa = F.scaled_dot_product_attention(q, q, q)
        assert flashattn_ext.forward(q, q, q).dtype == sdpa.dtype
