"""Tensors [B, H, S, D] in forward(), which reads [B, S, H, D]: a warning where rows that see no key give it away."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers import cu_seqlens, run_python
from torch import Tensor

import flashattn_ext
from flashattn_ext import Mask


def heads_first(device: str = "cpu", heads: int = 8, kv_heads: int = 2, S: int = 6) -> list[Tensor]:
    """q [B, Hq, S, D], k and v [B, Hk, S, D]."""
    return [torch.randn(2, H, S, 16, device=device) for H in (heads, kv_heads, kv_heads)]


def told(function: Any, *arguments: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments, **options)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "layout" in str(w.message)]


def module(*tensors: Tensor, **options: Any) -> Tensor:
    return flashattn_ext.FlashAttention(16, **options)(*tensors)


@pytest.mark.parametrize("function", [flashattn_ext.forward, flashattn_ext.flash_attn_func, module])
def test_it_is_told_once_and_names_the_layout(device: str, function: Any) -> None:
    tensors = heads_first(device)
    with pytest.warns(UserWarning, match=r'first 6 of 8 queries see none of the 2 keys.*pass layout="bhsd"') as caught:
        for _ in range(3):
            function(*tensors, causal=True)
    assert [w.filename for w in caught] == [__file__]  # of the user's call


def test_it_follows_what_the_call_does() -> None:
    q, k, v = heads_first()
    with pytest.warns(UserWarning, match="first 6 of 8"):
        out = flashattn_ext.forward(q, k, v, causal=True)
    assert not out[:, :6].any() and out[:, 6:].any()


def test_a_warning_as_an_error_stops_the_call_before_it_draws() -> None:
    tensors, before = heads_first(), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="layout"):
            flashattn_ext.forward(*tensors, causal=True, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


SILENT: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "not causal": ({}, {}),
    "the layout is given": ({}, {"causal": True, "layout": "bhsd"}),
    "a window": ({}, {"causal": True, "window_size": (3, 0)}),
    "a right bound": ({}, {"causal": True, "window_size": (-1, 0)}),
    "a Mask": ({}, {"causal": True, "mask": Mask.chunked(2, 8, 2)}),
    "a bias": ({}, {"causal": True, "bias": torch.zeros(1, 1, 8, 2)}),
    "a bias of heads": ({}, {"causal": True, "sink": torch.zeros(6)}),
    "slopes": ({}, {"causal": True, "alibi_slopes": torch.zeros(6)}),
    "a relative bias": ({}, {"causal": True, "relative_bias": torch.zeros(6, 3)}),
    "an origin": ({}, {"causal": True, "origin": (0, 0, 4, 0)}),
    "as many queries as keys": ({"heads": 4, "kv_heads": 4}, {"causal": True}),
    "more keys": ({"heads": 2, "kv_heads": 8}, {"causal": True}),
    "no KV heads of these": ({"heads": 7, "kv_heads": 2}, {"causal": True}),
    "no keys": ({"heads": 7, "kv_heads": 0}, {"causal": True}),
}


@pytest.mark.parametrize("name", SILENT)
def test_calls_that_mean_what_they_say(device: str, name: str) -> None:
    shape, options = SILENT[name]
    given = {key: value.to(device) if isinstance(value, (Tensor, Mask)) else value for key, value in options.items()}
    assert told(flashattn_ext.forward, *heads_first(device, **shape), **given) == []


def test_grouped_heads_that_are_read_as_such() -> None:
    """[B, S, H, D] of a call with more queries than keys and grouped heads cannot be [B, H, S, D] of a causal one."""
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 2, 2, 16)
    assert told(flashattn_ext.forward, q, k, k, causal=True) == []


def test_packed_and_nested_calls() -> None:
    q, k = torch.randn(8, 2, 16), torch.randn(2, 2, 16)
    starts_q, starts_k = cu_seqlens([8], "cpu"), cu_seqlens([2], "cpu")
    assert told(flashattn_ext.varlen_forward, q, k, k, starts_q, starts_k, 8, 2, causal=True) == []
    a, b = (
        torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in sizes], layout=torch.jagged)
        for sizes in ((8, 4), (2, 2))
    )
    assert told(flashattn_ext.forward, a, b, b, causal=True) == []


def test_torch_compile_has_one_graph() -> None:
    torch._dynamo.reset()
    tensors = heads_first()
    compiled = torch.compile(flashattn_ext.forward, fullgraph=True, backend="aot_eager")
    dynamic = torch.compile(flashattn_ext.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = flashattn_ext.forward(*tensors, causal=True)
        assert torch.equal(compiled(*tensors, causal=True), expected)
        assert torch.equal(dynamic(*tensors, causal=True), expected)


def test_a_process_that_warns_by_default_shows_the_users_line() -> None:
    shown = run_python(
        """
        import torch, flashattn_ext
        q, k = torch.randn(2, 8, 6, 16), torch.randn(2, 2, 6, 16)
        for _ in range(3):
            flashattn_ext.forward(q, k, k, causal=True)
        """
    )
    assert shown.returncode == 0 and shown.stderr.count("UserWarning: flashattn_ext: with causal=True") == 1, (
        shown.stderr
    )
