"""Arguments of other packages: the TypeError says which argument of ours is meant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_ext
from flashattn_ext import FlashAttention, Mask, names


def dense() -> list[torch.Tensor]:
    return [torch.randn(1, 3, 2, 8) for _ in range(3)]


def packed() -> list[Any]:
    starts = torch.tensor([0, 3], dtype=torch.int32)
    return [*(torch.randn(3, 2, 8) for _ in range(3)), starts, starts, 3, 3]


def backward() -> list[torch.Tensor]:
    q = torch.randn(1, 3, 2, 8)
    return [q, q, q, q, q, torch.zeros(1, 2, 3)]


def kv_packed() -> list[torch.Tensor]:
    return [torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 2, 8)]


# Public calls, what a good call passes by position, and whether a further positional argument is named.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]], bool]] = {
    "forward": (flashattn_ext.forward, dense, True),
    "varlen_forward": (flashattn_ext.varlen_forward, packed, True),
    "backward": (flashattn_ext.backward, backward, True),
    "supports": (flashattn_ext.supports, dense, True),
    "attention_reference": (flashattn_ext.attention_reference, dense, True),
    "attention_weights": (flashattn_ext.attention_weights, lambda: [*dense()[:2], [0]], True),
    "FlashAttention.forward": (FlashAttention(8), dense, True),
    "FlashAttention": (FlashAttention, lambda: [], False),
    "flash_attn_func": (flashattn_ext.flash_attn_func, dense, False),
    "flash_attn_qkvpacked_func": (flashattn_ext.flash_attn_qkvpacked_func, lambda: [torch.randn(1, 3, 3, 2, 8)], False),
    "flash_attn_kvpacked_func": (flashattn_ext.flash_attn_kvpacked_func, kv_packed, False),
    "flash_attn_varlen_func": (flashattn_ext.flash_attn_varlen_func, packed, False),
    "flash_attn_varlen_qkvpacked_func": (
        flashattn_ext.flash_attn_varlen_qkvpacked_func, lambda: [torch.randn(3, 3, 2, 8), packed()[3], 3], False
    ),
    "flash_attn_varlen_kvpacked_func": (
        flashattn_ext.flash_attn_varlen_kvpacked_func, lambda: [packed()[0], torch.randn(3, 2, 2, 8), *packed()[3:]], False
    ),
    "flash_attention_npu": (flashattn_ext.flash_attention_npu, dense, False),
    "flash_attn_with_kvcache": (flashattn_ext.flash_attn_with_kvcache, dense, False),
    "kvcache_reference": (flashattn_ext.kvcache_reference, lambda: [*dense(), None, None], True),
    "dropout_mask": (flashattn_ext.dropout_mask, lambda: [1, 1, 2, 2, 0.5, 3], False),
}  # fmt: skip

# What users type, and the arguments that are meant, of which a call has at least one or does not take such a thing.
TYPED = {
    "is_causal": ("causal",),
    "attn_mask": ("mask", "bias"),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "attn_bias": ("bias",),
    "sliding_window": ("window_size",),
    "logits_soft_cap": ("softcap",),
    "slopes": ("alibi_slopes",),
    "dropout": ("dropout_p", "dropout"),
    "s_aux": ("sink", "learnable_sink"),
    "learnable_sink": ("sink",),
    "sinks": ("sink", "learnable_sink"),
}


def takes(call: str) -> set[str]:
    return set(names._names[call].all)


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("call", CALLS)
def test_the_argument_of_ours_is_named(call: str, name: str) -> None:
    function, make, _ = CALLS[call]
    good, meant = make(), [other for other in TYPED[name] if other in takes(call)]
    function(*good)
    if name in takes(call):
        return
    with pytest.raises(TypeError, match=re.escape(f"{call}() got an unexpected keyword argument '{name}': ")) as raised:
        function(*good, **{name: None})
    for other in meant:
        assert re.search(rf"here it is .*\b{other}\b", str(raised.value)), raised.value


@pytest.mark.parametrize("name", ["attn_bias", "bias", "relative_bias"])
@pytest.mark.parametrize("call", ["flash_attn_with_kvcache", "kvcache_reference"])
def test_what_is_taken_beside_a_cache_in_place_of_a_bias(call: str, name: str) -> None:
    function, make, _ = CALLS[call]
    words = r"forward takes .*bias.*; beside a cache, drafts in a tree are mask=Mask\.tree\(parents\), .* alibi_slopes and softcap"
    with pytest.raises(TypeError, match=words):
        function(*make(), **{name: torch.zeros(1)})


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [
        ("flash_attn_func", "s_aux", "sink"),
        ("flash_attn_func", "attn_mask", "mask"),
        ("flash_attn_func", "relative_bias", "relative_bias"),
        ("flash_attention_npu", "dropout", "dropout_p"),
        ("flash_attention_npu", "sink", "sink"),
        ("flash_attn_with_kvcache", "bias", "bias"),
        ("FlashAttention", "attn_mask", "mask"),
        ("FlashAttention.forward", "is_causal", "causal"),
        ("attention_weights", "dropout_p", "dropout_p"),
    ],
)
def test_what_another_function_takes_is_said(call: str, name: str, meant: str) -> None:
    function, make, _ = CALLS[call]
    with pytest.raises(TypeError, match=rf"'{name}': flashattn_ext\.forward takes {meant}\b"):
        function(*make(), **{name: None})


@pytest.mark.parametrize(
    "call", ["forward", "varlen_forward", "flash_attn_func", "flash_attn_with_kvcache", "supports"]
)
def test_enable_gqa_is_left_out(call: str) -> None:
    function, make, _ = CALLS[call]
    with pytest.raises(TypeError, match="'enable_gqa': leave it out: k and v with fewer heads"):
        function(*make(), enable_gqa=True)


@pytest.mark.parametrize("call", [call for call, (_, _, is_named) in CALLS.items() if is_named])
@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (torch.ones(3, 3).bool(), ("mask", "bias")),
        (torch.zeros(3, 3), ("mask", "bias")),
        (Mask(torch.zeros(1, 1, 3, 2, dtype=torch.int32)), ("mask",)),
        (True, ("causal",)),
        (0.1, ("dropout_p", "softmax_scale")),
        (torch.tensor([0, 3], dtype=torch.int32), ("varlen_forward",)),
    ],
    ids=["bool mask", "mask", "Mask", "bool", "float", "int32"],
)
def test_one_positional_argument_more(call: str, value: Any, meant: tuple[str, ...]) -> None:
    function, make, _ = CALLS[call]
    good = make()
    count = len(good) + 1
    with pytest.raises(TypeError, match=re.escape(f"{call}() takes {count - 1} positional arguments (")) as raised:
        function(*good, value)
    message = str(raised.value)
    assert f"got {count}: pass the others by name. Argument {count} is " in message
    for other in meant:
        assert other not in takes(call) or re.search(rf"Argument {count} is .*: .*\b{other}\b", message), message


def test_none_in_the_place_of_attn_mask() -> None:
    with pytest.raises(TypeError, match="Argument 4 is None: leave it out"):
        flashattn_ext.forward(*dense(), None)


def test_several_names_at_once_and_typing_errors() -> None:
    with pytest.raises(TypeError, match=r"'is_causal': here it is causal; 'scale': here it is softmax_scale"):
        flashattn_ext.forward(*dense(), is_causal=True, scale=1.0)
    with pytest.raises(TypeError, match=r"'causl': did you mean causal\?"):
        flashattn_ext.varlen_forward(*packed(), causl=True)
    with pytest.raises(TypeError, match=r"'zzz': the arguments are q, k, v, causal, window_size"):
        flashattn_ext.forward(*dense(), zzz=1)


@pytest.mark.parametrize("call", CALLS)
def test_signatures_and_help_show_no_catch_all(call: str) -> None:
    function = CALLS[call][0].forward if call == "FlashAttention.forward" else CALLS[call][0]
    kinds = {
        parameter.kind for parameter in inspect.signature(function).parameters.values() if parameter.name != "options"
    }
    assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_every_public_call_is_listed() -> None:
    """A new public function with options belongs into CALLS."""
    with_options = {
        name
        for name in flashattn_ext.__all__
        if callable(function := getattr(flashattn_ext, name))
        and "softmax_scale" in inspect.signature(function).parameters
    }
    assert with_options <= CALLS.keys()


def test_names_under_torch_compile() -> None:
    """The catch-alls break no graph."""
    torch._dynamo.reset()
    q, k, v = dense()
    compiled = torch.compile(lambda *t: flashattn_ext.forward(*t, causal=True), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), flashattn_ext.forward(q, k, v, causal=True))
