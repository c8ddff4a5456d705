"""Smooth softmax and learnable sinks: the extra logit in the denominator, its gradient, its dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Case, assert_same_bits, check, make_inputs

import flashattn_ext


@pytest.mark.every_isa
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sink", ["smooth", "float32", "float16", "bfloat16"])
def test_against_the_reference(device: str, dtype: torch.dtype, sink: str, causal: bool) -> None:
    case = Case(
        dtype=dtype,
        Sq=70,
        Sk=90,
        Hq=4,
        causal=causal,
        smooth_softmax=sink == "smooth",
        sink_dtype=None if sink == "smooth" else getattr(torch, sink),
        use_lse=True,
    )
    check(case, device)


@pytest.mark.dtypes("float32", "float64")
def test_sink_of_zero_is_smooth_softmax(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, Sq=40, Sk=70), device)
    sink = torch.zeros(2, device=device)
    smooth = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, smooth_softmax=True, return_lse=True)
    learnt = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, sink=sink, return_lse=True)
    for a, b in zip(smooth, learnt, strict=True):
        assert_same_bits(a, b)


def test_smooth_softmax_is_softmax_with_one_more_key(device: str) -> None:
    q, k, v = (torch.randn(2, 33, 2, 16, device=device) for _ in range(3))
    zero = torch.zeros(2, 1, 2, 16, device=device)
    expected = flashattn_ext.forward(q, torch.cat([zero, k], 1), torch.cat([zero, v], 1))
    torch.testing.assert_close(flashattn_ext.forward(q, k, v, smooth_softmax=True), expected, rtol=1e-5, atol=1e-6)


def test_sink_of_minus_infinity_is_plain_softmax(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, Sq=40, Sk=70), device)
    sink = torch.full((2,), -torch.inf, device=device, requires_grad=True)
    out = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, sink=sink)
    torch.testing.assert_close(out, flashattn_ext.forward(inputs.q, inputs.k, inputs.v))
    (dsink,) = torch.autograd.grad(out.sum(), sink)
    assert not dsink.any()


def test_huge_sink_takes_all_the_weight(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, Sq=40, Sk=70), device)
    sink = torch.full((2,), 1e4, device=device)
    out, lse = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, sink=sink, return_lse=True)
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, 1e4))


def test_each_head_has_its_own_sink(device: str) -> None:
    q, k, v = (torch.randn(1, 20, 3, 8, device=device) for _ in range(3))
    sink = torch.tensor([-2.0, 0.0, 5.0], device=device)
    together = flashattn_ext.forward(q, k, v, sink=sink)
    for h in range(3):
        one = [t[:, :, h : h + 1] for t in (q, k, v)]
        assert_same_bits(together[:, :, h : h + 1], flashattn_ext.forward(*one, sink=sink[h : h + 1]), f"head {h}")


@pytest.mark.dtypes("bfloat16")
def test_gradient_comes_in_the_dtype_of_the_sink(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype), device)
    for sink_dtype in (torch.float32, torch.float16, torch.bfloat16):
        sink = torch.zeros(2, device=device, dtype=sink_dtype, requires_grad=True)
        flashattn_ext.forward(inputs.q, inputs.k, inputs.v, sink=sink).sum().backward()
        assert sink.grad is not None and sink.grad.dtype == sink_dtype


def test_the_sink_is_never_dropped(device: str, dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, dropout_p=0.5, rng_seed=21, sink_dtype=torch.float32, use_lse=True), device)


def test_strided_sink(device: str) -> None:
    q, k, v = (torch.randn(1, 20, 4, 8, device=device) for _ in range(3))
    wide = torch.randn(4, 3, device=device)
    assert_same_bits(
        flashattn_ext.forward(q, k, v, sink=wide[:, 1]), flashattn_ext.forward(q, k, v, sink=wide[:, 1].contiguous())
    )


@pytest.mark.parametrize("value", [math.inf, 3e38], ids=str)
def test_a_sink_that_takes_everything(device: str, dtype: torch.dtype, value: float) -> None:
    """The limit: no weight is left for a key, the gradient of lse is all the sink's, and nothing is NaN."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, 2, 16, device=device).to(dtype).requires_grad_() for _ in range(3))
    sink = torch.tensor([value, 0.5], device=device, requires_grad=True)
    out, lse = flashattn_ext.forward(q, k, v, sink=sink, causal=True, return_lse=True)
    assert not out[:, :, 0].any() and (lse[:, 0] >= 3e38).all()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse[:, 1] = 0
    dq, dk, dv, dsink = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    for gradient in (dq, dk, dv):
        assert not gradient[:, :, 0].any() and gradient[:, :, 1].isfinite().all()
    torch.testing.assert_close(dsink[0], dlse[:, 0].sum().to(dsink.dtype), rtol=1e-4, atol=1e-4)
    other, other_lse = flashattn_ext.forward(
        q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], sink=sink[1:], causal=True, return_lse=True
    )
    assert torch.equal(out[:, :, 1:], other) and torch.equal(lse[:, 1:], other_lse)


def test_a_sink_that_is_not_a_number_shows(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(1, 20, 2, 16, device=device).to(dtype)
    out, lse = flashattn_ext.forward(q, q, q, sink=torch.tensor([math.nan, 0.5], device=device), return_lse=True)
    assert out[:, :, 0].isnan().all() and lse[:, 0].isnan().all()
    assert out[:, :, 1].isfinite().all() and lse[:, 1].isfinite().all()
