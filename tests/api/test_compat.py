"""The flash-attn 2 spellings: their signatures, and the same results as forward and varlen_forward."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import cu_seqlens

import flashattn_ext

COMMON = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
VARLEN = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": (["q", "k", "v"], COMMON),
    "flash_attn_qkvpacked_func": (["qkv"], COMMON),
    "flash_attn_kvpacked_func": (["q", "kv"], COMMON),
    "flash_attn_varlen_func": (["q", "k", "v", *VARLEN], [*COMMON, ("block_table", None)]),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], COMMON),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *VARLEN], COMMON),
}
OPTIONS = dict(dropout_p=0.3, softmax_scale=0.2, causal=True, window_size=(20, 0), softcap=3.0)


def slopes(device: str, *batch: int) -> torch.Tensor:
    """Of four heads."""
    return torch.linspace(0.1, 0.7, 4, device=device).expand(*batch, 4) * torch.ones(*batch, 1, device=device)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(flashattn_ext, name)).parameters.values()
    required, optional = SIGNATURES[name]
    assert [p.name for p in parameters] == required + [key for key, _ in optional]
    assert [p.default for p in parameters if p.default is not p.empty] == [value for _, value in optional]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.dtypes("float32", "bfloat16")
def test_dense_spellings(device: str, dtype: torch.dtype) -> None:
    qkv = torch.randn(2, 33, 3, 4, 16, device=device).to(dtype)
    q, k, v = qkv.unbind(2)
    options = {**OPTIONS, "alibi_slopes": slopes(device, 2)}
    torch.manual_seed(1)
    expected = flashattn_ext.forward(q, k, v, **options)
    calls = [
        lambda **o: flashattn_ext.flash_attn_func(q, k, v, **o),
        lambda **o: flashattn_ext.flash_attn_qkvpacked_func(qkv, **o),
        lambda **o: flashattn_ext.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **o),
    ]
    for function in calls:
        torch.manual_seed(1)
        assert torch.equal(function(**options), expected)


@pytest.mark.dtypes("float32", "bfloat16")
def test_varlen_spellings(device: str, dtype: torch.dtype) -> None:
    qkv = torch.randn(50, 3, 4, 16, device=device).to(dtype)
    q, k, v = qkv.unbind(1)
    starts = cu_seqlens([20, 0, 30], device)
    options = {**OPTIONS, "alibi_slopes": slopes(device)}
    torch.manual_seed(1)
    expected = flashattn_ext.varlen_forward(q, k, v, starts, starts, 30, 30, **options)
    both = (starts, starts, 30, 30)
    calls = [
        lambda **o: flashattn_ext.flash_attn_varlen_func(q, k, v, *both, **o),
        lambda **o: flashattn_ext.flash_attn_varlen_qkvpacked_func(qkv, starts, 30, **o),
        lambda **o: flashattn_ext.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], *both, **o),
    ]
    for function in calls:
        torch.manual_seed(1)
        assert torch.equal(function(**options), expected)


def test_packed_gradients(device: str) -> None:
    qkv = torch.randn(2, 33, 3, 4, 16, device=device, requires_grad=True)
    (packed,) = torch.autograd.grad(flashattn_ext.flash_attn_qkvpacked_func(qkv, causal=True).square().sum(), qkv)
    (apart,) = torch.autograd.grad(flashattn_ext.forward(*qkv.unbind(2), causal=True).square().sum(), qkv)
    assert torch.equal(packed, apart)
    q = torch.randn(2, 20, 4, 16, device=device, requires_grad=True)
    kv = torch.randn(2, 33, 2, 2, 16, device=device, requires_grad=True)
    packed = torch.autograd.grad(flashattn_ext.flash_attn_kvpacked_func(q, kv).square().sum(), [q, kv])
    apart = torch.autograd.grad(flashattn_ext.forward(q, *kv.unbind(2)).square().sum(), [q, kv])
    assert all(torch.equal(a, b) for a, b in zip(packed, apart, strict=True))


def test_return_attn_probs(device: str) -> None:
    q = torch.randn(2, 33, 4, 16, device=device)
    out, lse, probs = flashattn_ext.flash_attn_func(q, q, q, return_attn_probs=True)
    expected = flashattn_ext.forward(q, q, q, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert probs is None


def test_slopes_have_gradients(device: str) -> None:
    q = torch.randn(2, 33, 4, 16, device=device)
    given = slopes(device).requires_grad_()
    (got,) = torch.autograd.grad(flashattn_ext.flash_attn_func(q, q, q, alibi_slopes=given).square().sum(), given)
    expected = flashattn_ext.attention_reference(q, q, q, alibi_slopes=given)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), given)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 8, 4, 16), (2, 8, 2, 4, 16)], ids=str)
def test_wrongly_packed_input(device: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="qkv"):
        flashattn_ext.flash_attn_qkvpacked_func(torch.randn(shape, device=device))


@pytest.mark.dtypes("float32", "bfloat16")
def test_npu_spelling(device: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 33, 16, device=device).to(dtype) for _ in range(3))
    expected = flashattn_ext.forward(q, k, v, causal=True, layout="bhsd")
    assert torch.equal(flashattn_ext.flash_attention_npu(q, k, v, causal=True), expected)
