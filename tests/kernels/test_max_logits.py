"""return_max_logits: the largest logit of a head, for any reference point of the softmax."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_backends import runs_hoppers_kernels
from helpers import (
    WIDE,
    Case,
    assert_max_logits_close,
    assert_same_bits,
    call_with_max_logits,
    cu_seqlens,
    make_inputs,
    refusal,
    run_reference,
)
from torch import Tensor

import flashattn_ext

CASES = {
    "plain": Case(Sq=130, Sk=300),
    "causal, longer queries": Case(Sq=97, Sk=40, causal=True),
    "window": Case(Sq=200, Sk=200, window_size=(20, 5)),
    "sink": Case(Sq=70, Sk=130, sink_dtype=torch.float32),
    "smooth": Case(Sq=70, Sk=130, smooth_softmax=True, softmax_scale=-0.3),
    "softcap": Case(Sq=70, Sk=130, softcap=1.5),
    "biases": Case(Sq=70, Sk=130, alibi="batch", relative=9, bias="hq", bias_hides=0.2),
    "slopes": Case(Sq=70, Sk=130, alibi="heads"),
    "softcap and slopes": Case(Sq=70, Sk=130, softcap=2.0, alibi="heads", D=64, Dv=64),
    "bias alone": Case(Sq=70, Sk=130, bias="bhq", D=64, Dv=64),
    "dropout": Case(Sq=70, Sk=130, dropout_p=0.5, rng_seed=3),
    "documents": Case(Sq=300, Sk=300, causal=True, mask="documents", D=64, Dv=64),
    "zero scale": Case(Sq=33, Sk=65, softmax_scale=0.0),
    "packed": Case(lengths_q=(70, 0, 5, 130), lengths_k=(300, 40, 0, 131), Hq=4, Hk=2, sink_dtype=torch.float32),
    "packed, masked": Case(lengths_q=(70, 9), lengths_k=(30, 131), causal=True, mask="intervals"),
    "no queries": Case(Sq=0, Sk=20),
    "no keys": Case(Sq=20, Sk=0, smooth_softmax=True),
    "no batch": Case(B=0),
    **{f"{D}x{Dv}": Case(Sq=70, Sk=130, D=D, Dv=Dv) for D, Dv in [*WIDE, (80, 80), (128, 128), (192, 128), (256, 256)]},
}


def skip_where_refused(case: Case, device: str) -> None:
    if reason := refusal(case, device):
        pytest.skip(reason)


def has_one_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether a call runs the same kernel with and without max logits; most sm_80 kernels lack a register for them."""
    if not device.startswith("cuda"):
        return True
    return dtype.itemsize == 2 and runs_hoppers_kernels()


@pytest.mark.every_isa
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(device: str, dtype: torch.dtype, name: str) -> None:
    """out and lse have the bits of the call without return_max_logits, where the same kernel runs both."""
    case = replace(CASES[name], dtype=dtype, max_logits=True)
    skip_where_refused(case, device)
    inputs = make_inputs(case, device)
    out, lse, got = call_with_max_logits(case, inputs)
    ref, plain = (run_reference(case, inputs, kind).max_logits for kind in (torch.float64, dtype))
    assert_max_logits_close(got, ref, plain, dtype)
    expected = call_with_max_logits(replace(case, max_logits=False), inputs)
    assert expected[2] is None
    if has_one_kernel(device, dtype):
        assert_same_bits(out, expected[0], "out")
        assert_same_bits(lse, expected[1], "lse")
    else:
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected[0], rtol=rounding, atol=rounding)
        torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


def largest(device: str, scores: Tensor, **options: Any) -> Tensor:
    """The largest logits [1, 1] of a call in which the product of key j with every query is scores[j]."""
    k = scores.to(device)[None, :, None, None].expand(1, -1, 1, 8).contiguous() / 8
    q = torch.ones(1, options.pop("queries", 1), 1, 8, device=device)
    result: Tensor = flashattn_ext.forward(q, k, k, softmax_scale=1.0, return_max_logits=True, **options)[1]
    return result


@pytest.mark.parametrize("place", [0, 70, 130, 299])
def test_a_logit_a_little_above_the_others_is_not_lost(device: str, place: int) -> None:
    """Kernels that rescale rarely keep weights relative to a maximum that logits may exceed."""
    skip_where_refused(Case(max_logits=True), device)
    scores = torch.linspace(0, 4, 300).index_fill_(0, torch.tensor(place), 4.5)
    assert abs(largest(device, scores).item() - 4.5) < 1e-3


@pytest.mark.parametrize("sink", [-50.0, 0.0, 50.0, math.inf])
def test_a_sink_is_not_a_logit(device: str, sink: float) -> None:
    skip_where_refused(Case(max_logits=True), device)
    got = largest(device, torch.linspace(-9, -3, 130), sink=torch.full((1,), sink, device=device))
    assert abs(got.item() + 3) < 1e-3


def test_fully_masked_keys_are_not_logits(device: str) -> None:
    skip_where_refused(Case(max_logits=True), device)
    scores = torch.zeros(200)
    scores[150:] = 7
    assert abs(largest(device, scores, queries=100, causal=True).item() - 7) < 1e-3
    assert largest(device, scores, queries=100, window_size=(0, 0)).item() == 7.0  # row 99 is at key 199
    mask = flashattn_ext.Mask(
        torch.tensor([[0, 100]] * 150 + [[0, 0]] * 50, dtype=torch.int32, device=device)[None, None]
    )
    assert largest(device, scores, queries=100, mask=mask).item() == 0.0
    bias = torch.zeros(1, 1, 1, 200, device=device)
    bias[..., 150:] = -math.inf
    assert largest(device, scores, queries=100, bias=bias).item() == 0.0
    nothing = flashattn_ext.Mask(torch.zeros(1, 1, 200, 2, dtype=torch.int32, device=device))
    assert largest(device, scores, queries=100, mask=nothing, smooth_softmax=True).item() == -math.inf


def test_rows_after_the_last_sequence_are_of_none(device: str) -> None:
    skip_where_refused(Case(max_logits=True), device)
    q = torch.randn(50, 2, 16, device=device)
    q[30:] = 1e4
    k = torch.randn(50, 2, 16, device=device)
    starts = cu_seqlens([20, 10], device)
    _, got = flashattn_ext.varlen_forward(q, k, k, starts, starts, 20, 20, return_max_logits=True)
    expected = [torch.einsum("ihd,jhd->hij", q[a:b], k[a:b]).amax((1, 2)) / 4 for a, b in ((0, 20), (20, 30))]
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_it_is_the_last_result_and_has_no_gradient(device: str) -> None:
    skip_where_refused(Case(max_logits=True), device)
    q, k, v = (torch.randn(2, 9, 2, 16, device=device, requires_grad=True) for _ in range(3))
    out, lse, max_logits = flashattn_ext.forward(q, k, v, return_lse=True, return_max_logits=True)
    assert out.requires_grad and lse.requires_grad and not max_logits.requires_grad
    assert max_logits.shape == (2, 2) and max_logits.dtype == torch.float32
    (out.sum() + lse.sum()).backward()
    assert q.grad is not None


def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, max_logits = flashattn_ext.forward(q, k, v, causal=True, return_max_logits=True)
    return out, max_logits


def test_compiled_mapped_and_as_a_module(device: str) -> None:
    skip_where_refused(Case(max_logits=True), device)
    torch._dynamo.reset()
    q, k, v = (torch.randn(3, 2, 9, 2, 16, device=device) for _ in range(3))
    expected = [both(*each) for each in zip(q, k, v, strict=True)]
    for n, (out, max_logits) in enumerate(zip(*torch.vmap(both)(q, k, v), strict=True)):
        torch.testing.assert_close((out, max_logits), expected[n])
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    leaves = [t[0].clone().requires_grad_() for t in (q, k, v)]
    out, max_logits = compiled(*leaves)
    torch.testing.assert_close((out, max_logits), expected[0])
    out.sum().backward()
    module = flashattn_ext.FlashAttention(16, causal=True)
    torch.testing.assert_close(module(q[0], k[0], v[0], return_max_logits=True), expected[0])


def test_nested_tensors(device: str) -> None:
    skip_where_refused(Case(max_logits=True), device)
    q = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (5, 9)], layout=torch.jagged, device=device)
    out, max_logits = flashattn_ext.forward(q, q, q, return_max_logits=True)
    assert out.is_nested and max_logits.shape == (2, 2)
    for n, t in enumerate(q.unbind()):
        torch.testing.assert_close(
            flashattn_ext.forward(t[None], t[None], t[None], return_max_logits=True)[1][0], max_logits[n]
        )


def test_the_function(device: str) -> None:
    skip_where_refused(Case(max_logits=True), device)
    q, k, v = (torch.randn(2, 9, 2, 16, device=device, requires_grad=True) for _ in range(3))
    options = flashattn_ext.autograd.CallOptions(softmax_scale=0.25, causal=True)
    out, _, max_logits, *_ = flashattn_ext.FlashAttentionFunction.apply(q, k, v, *[None] * 8, None, options, True)
    torch.testing.assert_close((out, max_logits), both(q, k, v))
    assert not max_logits.requires_grad


def test_packed_sequences_under_deterministic_algorithms(device: str) -> None:
    """The order of atomic maxima does not change the result, so torch must not refuse the op."""
    skip_where_refused(Case(max_logits=True), device)
    q = torch.randn(30, 2, 16, device=device)
    starts = cu_seqlens([20, 10], device)

    def call() -> Tensor:
        result: Tensor = flashattn_ext.varlen_forward(q, q, q, starts, starts, 20, 20, return_max_logits=True)[1]
        return result

    expected = call()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(call(), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("key", [0, 40, 99])
def test_a_logit_that_is_nan_is_not_forgotten(isa: str, key: int) -> None:
    """A vector maximum takes the second of two numbers if either is NaN, so that a later key could hide it."""
    q, k, v = (torch.ones(1, S, 1, 16) for S in (3, 100, 100))
    k[0, key] = float("nan")
    _, max_logits = flashattn_ext.forward(q, k, v, return_max_logits=True)
    assert max_logits.isnan().all()
