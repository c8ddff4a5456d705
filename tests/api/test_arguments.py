"""Integers, numbers and flags: arguments accept what Python itself accepts as one, and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import numpy
import pytest
import torch

import flashattn_ext
from flashattn_ext import FlashAttention


class Index:
    """An integer like numpy's: not an int, but with __index__."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Float:
    """A number like numpy's: not a float, but with __float__."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


INTEGERS = [Index, numpy.int64, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)]
NUMBERS = [Float, numpy.float32, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64)]
FLAGS = [numpy.bool_, torch.tensor]


def qkv(device: str) -> list[torch.Tensor]:
    return [torch.randn(2, 20, 2, 16, device=device) for _ in range(3)]


@pytest.mark.parametrize("integer", INTEGERS, ids=["index", "numpy", "tensor", "int32 tensor"])
def test_integers(device: str, integer: Any) -> None:
    q, k, v = qkv(device)
    plain = dict(window_size=(3, 4), dropout_p=0.5)
    expected = flashattn_ext.forward(q, k, v, rng_seed=7, **plain)
    given = dict(rng_seed=integer(7), window_size=(integer(3), integer(4)), dropout_p=0.5)
    assert torch.equal(flashattn_ext.forward(q, k, v, **given), expected)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    out = flashattn_ext.varlen_forward(*packed, starts, starts, integer(20), integer(20), **given)
    assert torch.equal(out, expected.flatten(0, 1))
    mask = flashattn_ext.dropout_mask(*(integer(n) for n in (1, 2, 3, 4)), 0.5, integer(7), device)
    assert torch.equal(mask, flashattn_ext.dropout_mask(1, 2, 3, 4, 0.5, 7, device))


@pytest.mark.parametrize("number", NUMBERS, ids=["float", "numpy", "tensor", "float64 tensor"])
def test_numbers(device: str, number: Any) -> None:
    q, k, v = qkv(device)
    plain = dict(softmax_scale=0.5, softcap=1.5, dropout_p=0.25)
    given = {name: number(value) for name, value in plain.items()}
    for function in (flashattn_ext.forward, flashattn_ext.attention_reference):
        assert torch.equal(function(q, k, v, **given, rng_seed=7), function(q, k, v, **plain, rng_seed=7))


@pytest.mark.parametrize("flag", FLAGS, ids=["numpy", "tensor"])
def test_flags(device: str, flag: Any) -> None:
    q, k, v = qkv(device)
    out, lse = flashattn_ext.forward(q, k, v, causal=flag(True), smooth_softmax=flag(True), return_lse=flag(True))
    expected = flashattn_ext.forward(q, k, v, causal=True, smooth_softmax=True, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


BEYOND = 2**63
WRONG = [
    (TypeError, "causal", "no"),
    (TypeError, "causal", 1),
    (TypeError, "causal", None),
    (TypeError, "causal", torch.tensor([True, False])),
    (TypeError, "smooth_softmax", "yes"),
    (TypeError, "deterministic", 0.0),
    (TypeError, "return_lse", "both"),
    (TypeError, "dropout_p", True),
    (TypeError, "dropout_p", 1j),
    (TypeError, "dropout_p", torch.zeros(2)),
    (TypeError, "softmax_scale", "1"),
    (TypeError, "softmax_scale", [1.0]),
    (TypeError, "softcap", torch.ones(2)),
    (ValueError, "softcap", 10**400),
    (ValueError, "softmax_scale", 10**400),
    (TypeError, "window_size", (True, 1)),
    (TypeError, "window_size", (torch.tensor(1.5), 1)),
    (TypeError, "window_size", (torch.tensor(True), 1)),
    (ValueError, "window_size", (BEYOND, 1)),
    (ValueError, "window_size", (1, -BEYOND - 1)),
    (ValueError, "window_size", None),
    (TypeError, "rng_seed", 1.0),
    (TypeError, "rng_seed", True),
    (ValueError, "rng_seed", BEYOND),
]


@pytest.mark.parametrize(("error", "name", "value"), WRONG, ids=str)
def test_nothing_else(device: str, error: type[Exception], name: str, value: Any) -> None:
    q, k, v = qkv(device)
    with pytest.raises(error, match=name):
        flashattn_ext.forward(q, k, v, **{name: value})
    if name != "deterministic":
        with pytest.raises(error, match=name):
            flashattn_ext.attention_reference(q, k, v, **{name: value})


PACKED = dict(max_seqlen_q=20, max_seqlen_k=20)


def packed_starts() -> torch.Tensor:
    return torch.tensor([0, 20, 40], dtype=torch.int32)


def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    lse = torch.zeros(2, 2, 20)
    return flashattn_ext.backward(q, q, k, v, q, lse, rng_seed=7, **options)


def varlen(function: Any) -> Any:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        packed = [t.flatten(0, 1) for t in (q, k, v)]
        return function(*packed, packed_starts(), packed_starts(), **PACKED, **options)

    return call


def transformers_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    from flashattn_ext.integrations.transformers import attention

    renamed = {"softmax_scale": "scaling", "dropout_p": "dropout"}
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    named = {renamed.get(name, name): value for name, value in options.items()}
    return attention(torch.nn.Module(), *heads_first, None, is_causal=False, **named)


SCALARS = ("softmax_scale", "softcap", "dropout_p")
DIFFERENTIABLE_CALLS = {
    "forward": (flashattn_ext.forward, SCALARS),
    "varlen_forward": (varlen(flashattn_ext.varlen_forward), SCALARS),
    "backward": (backward, SCALARS),
    "attention_reference": (flashattn_ext.attention_reference, SCALARS),
    "flash_attn_func": (flashattn_ext.flash_attn_func, SCALARS),
    "flash_attn_varlen_func": (varlen(flashattn_ext.flash_attn_varlen_func), SCALARS),
    "flash_attention_npu": (flashattn_ext.flash_attention_npu, ("softmax_scale",)),
    "flash_attn_with_kvcache": (flashattn_ext.flash_attn_with_kvcache, ("softmax_scale", "softcap")),
    "transformers": (transformers_attention, SCALARS),
    "dropout_mask": (lambda q, k, v, dropout_p: flashattn_ext.dropout_mask(1, 1, 2, 2, dropout_p, 7), ("dropout_p",)),
    "FlashAttention": (lambda q, k, v, **options: FlashAttention(16, **options), ("softcap", "dropout")),
}


@pytest.mark.parametrize("value", [torch.nn.Parameter(torch.tensor(0.5)), torch.tensor([0.5], requires_grad=True) * 1])
@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, (_, names) in DIFFERENTIABLE_CALLS.items() for name in names]
)
def test_a_scalar_that_would_lose_its_gradient(call: str, name: str, value: torch.Tensor) -> None:
    """A learnable temperature was read as a number, so that it never got a gradient."""
    function, _ = DIFFERENTIABLE_CALLS[call]
    given = {name: value}
    with pytest.raises(TypeError, match=r"requires a gradient, which it would not get.*\.detach\(\)") as raised:
        function(*qkv("cpu"), **given)
    assert ("scale q instead" in str(raised.value)) == (name == "softmax_scale")


def test_a_tensor_without_a_gradient_to_lose_is_a_number() -> None:
    q, k, v = qkv("cpu")
    scale = torch.nn.Parameter(torch.tensor(0.5))
    expected = flashattn_ext.forward(q, k, v, softmax_scale=0.5)
    assert torch.equal(flashattn_ext.forward(q, k, v, softmax_scale=scale.detach()), expected)
    with torch.no_grad():
        assert torch.equal(flashattn_ext.forward(q, k, v, softmax_scale=scale), expected)


def test_a_scalar_that_would_lose_its_tangent() -> None:
    q, k, v = qkv("cpu")
    with torch.autograd.forward_ad.dual_level():
        scale = torch.autograd.forward_ad.make_dual(torch.tensor(0.5), torch.tensor(1.0))
        for function in (flashattn_ext.forward, flashattn_ext.attention_reference):
            with pytest.raises(TypeError, match=r"softmax_scale: .*requires a gradient"):
                function(q, k, v, softmax_scale=scale)


@pytest.mark.parametrize("name", ["window_size", "origin", "max_seqlen_q", "rng_seed"])
def test_integers_that_require_a_gradient(name: str) -> None:
    number = torch.nn.Parameter(torch.tensor(1.0))
    given = (number, number) if name in ("window_size", "origin") else number
    with pytest.raises(TypeError, match=f"{name}: expected an int"):
        varlen(lambda *tensors, **options: flashattn_ext.varlen_forward(*tensors, **{**options, name: given}))(
            *qkv("cpu")
        )


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize(("error", "value"), [(TypeError, 20.0), (TypeError, True), (ValueError, BEYOND)])
def test_lengths(device: str, name: str, error: type[Exception], value: Any) -> None:
    q = torch.randn(20, 2, 16, device=device)
    starts = torch.tensor([0, 20], dtype=torch.int32, device=device)
    lengths = {"max_seqlen_q": 20, "max_seqlen_k": 20, name: value}
    with pytest.raises(error, match=name):
        flashattn_ext.varlen_forward(q, q, q, starts, starts, **lengths)


@pytest.mark.parametrize(
    "window", [(-7, 3), (3, -2), (-9, -9), torch.tensor([-5, 3]), (torch.tensor(2), torch.tensor(-3))]
)
def test_flash_attn_takes_negative_sides_as_unbounded(device: str, window: Any) -> None:
    q, k, v = qkv(device)
    left, right = (max(int(side), -1) for side in window)
    expected = flashattn_ext.forward(q, k, v, window_size=(left, right))
    assert torch.equal(flashattn_ext.flash_attn_func(q, k, v, window_size=window), expected)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    out = flashattn_ext.flash_attn_varlen_func(*packed, starts, starts, 20, 20, window_size=window)
    assert torch.equal(out, expected.flatten(0, 1))


MODULE = [
    (TypeError, dict(head_dim=64.0)),
    (ValueError, dict(head_dim=0)),
    (TypeError, dict(dropout="0.1")),
    (ValueError, dict(dropout=float("nan"))),
    (TypeError, dict(causal="no")),
    (TypeError, dict(use_smooth_softmax=1)),
    (TypeError, dict(learnable_sink="yes")),
    (ValueError, dict(num_heads=0, learnable_sink=True)),
    (TypeError, dict(num_heads=2.0, learnable_sink=True)),
    (ValueError, dict(window_size=(-2, 0))),
    (ValueError, dict(window_size=(1, 2, 3))),
    (TypeError, dict(window_size=(1.5, 2))),
]


@pytest.mark.parametrize(("error", "options"), MODULE, ids=str)
def test_a_module_checks_its_arguments_when_it_is_made(error: type[Exception], options: dict[str, Any]) -> None:
    (name, *_) = options
    with pytest.raises(error, match=name):
        FlashAttention(**options)


def _packed_call() -> dict[str, Any]:
    rows, starts = torch.randn(3, 2, 8), packed_starts()[:2].clamp(max=3)
    return dict(q=rows, k=rows, v=rows, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=3, max_seqlen_k=3)


def _public_calls() -> dict[str, dict[str, Any]]:
    """A good call of every public function of tensors."""
    q = torch.randn(1, 3, 2, 8)
    packed = _packed_call()
    starts = {name: packed[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
    dense, cached = dict(q=q, k=q, v=q), dict(q=q, k_cache=q, v_cache=q)
    return {
        **{name: dense for name in ("forward", "supports", "attention_reference", "flash_attn_func", "flash_attention_npu")},
        "varlen_forward": packed, "flash_attn_varlen_func": packed,
        "backward": dict(dout=q, **dense, out=q, lse=torch.zeros(1, 2, 3)),
        "attention_weights": dict(q=q, k=q, rows=[0]),
        "flash_attn_qkvpacked_func": dict(qkv=torch.randn(1, 3, 3, 2, 8)),
        "flash_attn_kvpacked_func": dict(q=q, kv=torch.randn(1, 3, 2, 2, 8)),
        "flash_attn_varlen_qkvpacked_func": dict(qkv=torch.randn(3, 3, 2, 8), cu_seqlens=packed["cu_seqlens_q"], max_seqlen=3),
        "flash_attn_varlen_kvpacked_func": dict(q=packed["q"], kv=torch.randn(3, 2, 2, 8), **starts),
        "flash_attn_with_kvcache": cached, "kvcache_reference": cached,
        "quantize_fp8": dict(x=q, heads_dim=2), "t5_relative_bias": dict(table=torch.randn(8, 2), L=3),
    }  # fmt: skip


TENSOR_OPTIONS = {
    "sink", "alibi_slopes", "relative_bias", "bias", "descale_q", "descale_k", "descale_v", "dlse", "k", "v", "rotary_cos",
    "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table", "rows",
}  # fmt: skip


@pytest.mark.parametrize("function", _public_calls())
def test_every_tensor_that_is_none_or_a_list(function: str) -> None:
    """FlashAttention, the references and the packed spellings raised AttributeError."""
    call, good = getattr(flashattn_ext, function), _public_calls()[function]
    call(**good)
    tensors = [name for name, value in good.items() if isinstance(value, torch.Tensor) or name == "rows"]
    optional = TENSOR_OPTIONS & inspect.signature(call).parameters.keys() - {*good}
    assert tensors
    cases = [(name, value) for name in {*tensors, *optional} for value in (3.5, "x")]
    cases += [(name, None) for name in tensors if name != "dout"]
    for name, value in cases:
        with pytest.raises(TypeError, match=rf"\b{name}: expected "):
            call(**{**good, name: value})
