"""Packed sequences: each has the bits of a dense call of that sequence alone, for any contents of its neighbours."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, assert_same_bits, check, cu_seqlens, make_inputs, run

import flashattn_ext

pytestmark = pytest.mark.usefixtures("deterministic")

LENGTHS_Q = (33, 0, 64, 1, 130)
LENGTHS_K = (65, 17, 64, 0, 129)


@pytest.mark.every_isa
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_equals_the_dense_call_of_each_sequence(device: str, dtype: torch.dtype, causal: bool) -> None:
    case = Case(dtype=dtype, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, Hq=4, causal=causal, use_lse=True)
    inputs = make_inputs(case, device)
    out, lse = flashattn_ext.varlen_forward(
        inputs.q, inputs.k, inputs.v, **inputs.cu_seqlens, **inputs.max_seqlens, causal=causal, return_lse=True
    )
    grads = torch.autograd.grad((out.float() ** 2).sum(), [inputs.q, inputs.k, inputs.v])
    starts_q, starts_k = (inputs.cu_seqlens[f"cu_seqlens_{side}"].tolist() for side in "qk")
    for b in range(len(LENGTHS_Q)):
        rows_q, rows_k = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        q, k, v = (
            t.detach()[rows].unsqueeze(0).requires_grad_()
            for t, rows in ((inputs.q, rows_q), (inputs.k, rows_k), (inputs.v, rows_k))
        )
        out_b, lse_b = flashattn_ext.forward(q, k, v, causal=causal, return_lse=True)
        assert_same_bits(out[rows_q], out_b[0], f"out of sequence {b}")
        assert_same_bits(lse[:, rows_q], lse_b[0], f"lse of sequence {b}")
        dense = torch.autograd.grad((out_b.float() ** 2).sum(), [q, k, v])
        for name, packed, alone, rows in zip("qkv", grads, dense, (rows_q, rows_k, rows_k), strict=True):
            assert_same_bits(packed[rows], alone[0], f"d{name} of sequence {b}")


def test_dropout_mask_is_that_of_the_batch_entry(device: str) -> None:
    """Equal lengths: the packed call and the dense batch drop the same scores."""
    options = dict(dropout_p=0.3, rng_seed=99, causal=True)
    q, k, v = (torch.randn(3, 70, 2, 16, device=device) for _ in range(3))
    starts = cu_seqlens([70] * 3, device)
    packed = flashattn_ext.varlen_forward(*(t.flatten(0, 1) for t in (q, k, v)), starts, starts, 70, 70, **options)
    assert_same_bits(packed.view(q.shape), flashattn_ext.forward(q, k, v, **options))


@pytest.mark.every_isa
@pytest.mark.parametrize("extra_logit", ["none", "smooth", "sink"])
def test_agrees_with_the_reference(device: str, dtype: torch.dtype, extra_logit: str) -> None:
    case = Case(
        dtype=dtype,
        lengths_q=LENGTHS_Q,
        lengths_k=LENGTHS_K,
        Hq=4,
        D=40,
        Dv=24,
        window_size=(50, 20),
        dropout_p=0.1,
        rng_seed=5,
        smooth_softmax=extra_logit == "smooth",
        sink_dtype=torch.float32 if extra_logit == "sink" else None,
        use_lse=True,
    )
    check(case, device)


@pytest.mark.parametrize("larger_by", [0, 1, 1000])
def test_max_seqlen_may_exceed_the_longest(device: str, larger_by: int) -> None:
    case = Case(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, causal=True)
    inputs = make_inputs(case, device)
    exact = run(case, inputs)
    inputs.max_seqlens = {name: value + larger_by for name, value in inputs.max_seqlens.items()}
    larger = run(case, inputs)
    assert_same_bits(larger.out, exact.out)
    for name in exact.grads:
        assert_same_bits(larger.grads[name], exact.grads[name], f"d{name}")


def test_rows_after_the_last_sequence(device: str, dtype: torch.dtype) -> None:
    """cu_seqlens may end before the tensors do: rows that belong to no sequence give zeros and get zero gradients."""
    q, k, v = (torch.randn(40, 2, 16, device=device).to(dtype).requires_grad_() for _ in range(3))
    starts = cu_seqlens([10, 20], device)
    out, lse = flashattn_ext.varlen_forward(q, k, v, starts, starts, 20, 20, return_lse=True)
    grads = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    inner = [t.detach()[:30].requires_grad_() for t in (q, k, v)]
    expected = flashattn_ext.varlen_forward(*inner, starts, starts, 20, 20)
    assert_same_bits(out[:30], expected)
    assert not out[30:].any() and torch.isneginf(lse[:, 30:]).all()
    for name, grad, ref in zip(
        "qkv", grads, torch.autograd.grad(expected, inner, torch.ones_like(expected)), strict=True
    ):
        assert_same_bits(grad[:30], ref, f"d{name}")
        assert not grad[30:].any(), f"d{name} of unused rows"
