"""Masks: windows and causal against the reference at every tile edge, and rows that see no key at all."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, check, cu_seqlens, make_inputs, run

import flashattn_ext

# (Sq, Sk, options) where some or all rows see no key.
MASKED = {
    "causal, more queries than keys": (70, 40, dict(causal=True)),
    "window left of every key": (130, 20, dict(window_size=(3, 0))),
    "window between": (100, 30, dict(window_size=(0, 5))),
    "no keys": (20, 0, dict()),
    "no keys, causal": (20, 0, dict(causal=True)),
}


def visible(Sq: int, Sk: int, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> torch.Tensor:
    """bool [Sq, Sk], from the definition."""
    left, right = window_size
    at = torch.arange(Sq)[:, None] + Sk - Sq
    j = torch.arange(Sk)[None, :]
    mask = torch.ones(Sq, Sk, dtype=torch.bool)
    if left >= 0:
        mask &= j >= at - left
    if right >= 0:
        mask &= j <= at + right
    return mask & (j <= at) if causal else mask


@pytest.mark.every_isa
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("extra_logit", ["none", "smooth", "sink"])
def test_fully_masked_rows(device: str, dtype: torch.dtype, name: str, extra_logit: str) -> None:
    Sq, Sk, options = MASKED[name]
    case = Case(
        dtype=dtype,
        Sq=Sq,
        Sk=Sk,
        smooth_softmax=extra_logit == "smooth",
        sink_dtype=torch.float32 if extra_logit == "sink" else None,
        use_lse=True,
        **options,
    )
    inputs = make_inputs(case, device)
    got = run(case, inputs)
    masked = ~visible(Sq, Sk, **options).any(1).to(device)
    assert masked.any()
    assert not got.out[:, masked].any()
    sink = {"none": torch.full((2,), -torch.inf), "smooth": torch.zeros(2), "sink": inputs.sink}[extra_logit]
    expected = sink.detach().to(got.lse)[None, :, None].expand_as(got.lse[..., masked])
    torch.testing.assert_close(got.lse[..., masked], expected, rtol=0, atol=0)
    assert not got.grads["q"][:, masked].any()
    for name, grad in got.grads.items():
        assert torch.isfinite(grad).all(), f"d{name}"
    check(case, device)


def test_masked_rows_of_packed_sequences(device: str, dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, lengths_q=(70, 3, 64, 9), lengths_k=(40, 0, 64, 100), causal=True, use_lse=True), device)


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16")
@pytest.mark.parametrize("left", [-1, 0, 1, 31, 64, 500])
@pytest.mark.parametrize("right", [-1, 0, 1, 32, 63, 500])
def test_windows_of_every_width_are_exact(device: str, dtype: torch.dtype, left: int, right: int) -> None:
    for Sq, Sk in ((129, 129), (65, 140), (140, 65)):
        check(Case(dtype=dtype, B=1, Sq=Sq, Sk=Sk, D=16, Dv=16, window_size=(left, right)), device)


@pytest.mark.parametrize("window_size", [(-1, -1), (5, 7), (5, 0), (-1, 3)], ids=str)
def test_causal_caps_the_window_at_zero(device: str, window_size: tuple[int, int]) -> None:
    inputs = make_inputs(Case(Sq=70, Sk=90), device)
    causal = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, causal=True, window_size=window_size)
    window = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, window_size=(window_size[0], 0))
    assert torch.equal(causal, window)


def test_masked_keys_have_no_influence(device: str, dtype: torch.dtype) -> None:
    """A key outside every window gets zero gradient, and its value does not matter."""
    case = Case(dtype=dtype, Sq=20, Sk=200, window_size=(10, 0))
    inputs = make_inputs(case, device)
    got = run(case, inputs)
    seen = visible(20, 200, window_size=(10, 0)).any(0).to(device)
    assert not got.grads["k"][:, ~seen].any() and not got.grads["v"][:, ~seen].any()
    with torch.no_grad():
        inputs.k[:, ~seen] = 100.0
        inputs.v[:, ~seen] = -100.0
    assert torch.equal(run(case, inputs).out, got.out)


@pytest.mark.parametrize(
    "B,Sq,Sk,Hq", [(0, 4, 4, 2), (2, 0, 4, 2), (2, 0, 0, 2), (2, 4, 0, 2), (0, 0, 0, 2), (2, 4, 4, 0)]
)
def test_empty_tensors_are_calls_like_others(
    device: str, dtype: torch.dtype, B: int, Sq: int, Sk: int, Hq: int
) -> None:
    check(Case(dtype=dtype, B=B, Sq=Sq, Sk=Sk, Hq=Hq, Hk=1, sink_dtype=torch.float32, use_lse=True), device)


def test_empty_sequences_are_calls_like_others(device: str, dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, lengths_q=(), lengths_k=(), use_lse=True), device)
    check(Case(dtype=dtype, lengths_q=(0, 0), lengths_k=(0, 5), use_lse=True), device)
    q = torch.zeros(0, 2, 8, device=device, dtype=dtype)
    out = flashattn_ext.varlen_forward(q, q, q, cu_seqlens([0], device), cu_seqlens([0], device), 0, 0)
    assert out.shape == (0, 2, 8)
