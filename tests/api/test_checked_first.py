"""Everything about a call is checked before anything of it runs: before a cache is written, and before a seed is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_ext
from flashattn_ext.integrations import sdpa
from flashattn_ext.options import CallOptions

NO_FLAG = [1, "yes", None, 0.0]


def dense(function: Callable[..., Any]) -> Callable[..., Any]:
    q = torch.randn(1, 4, 2, 16)
    return lambda **options: function(q, q, q, **options)


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    q, starts = torch.randn(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    return lambda **options: function(q, q, q, starts, starts, 4, 4, **options)


def drawing(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: call(dropout_p=0.5, **options)


def appending(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call that writes to its caches; it fails if it has done so."""

    def call(**options: Any) -> Any:
        caches, new = [torch.zeros(1, 8, 2, 16) for _ in range(2)], torch.ones(1, 1, 2, 16)
        try:
            return function(new, *caches, new, new, cache_seqlens=3, **options)
        except Exception:
            assert not any(cache.any() for cache in caches), "the caches were written"
            raise

    return call


def paged(**options: Any) -> Any:
    q, pages = torch.zeros(1, 2, 16), torch.zeros(1, 16, 2, 16)
    starts, table = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    return flashattn_ext.flash_attn_varlen_func(q, pages, pages, starts, starts, 1, 1, block_table=table, **options)


# Every flag of every public call.
FLAGS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "forward": (
        drawing(dense(flashattn_ext.forward)),
        ("causal", "smooth_softmax", "deterministic", "invariant", "return_lse", "return_max_logits"),
    ),
    "varlen_forward": (
        drawing(packed(flashattn_ext.varlen_forward)),
        ("causal", "smooth_softmax", "deterministic", "invariant", "return_lse", "return_max_logits"),
    ),
    "supports": (dense(flashattn_ext.supports), ("causal", "deterministic", "return_lse", "return_max_logits")),
    "attention_reference": (
        dense(flashattn_ext.attention_reference), ("causal", "smooth_softmax", "return_lse", "return_max_logits")
    ),
    "flash_attn_func": (
        drawing(dense(flashattn_ext.flash_attn_func)), ("causal", "deterministic", "return_attn_probs")
    ),
    "flash_attn_varlen_func": (
        drawing(packed(flashattn_ext.flash_attn_varlen_func)), ("causal", "deterministic", "return_attn_probs")
    ),
    "flash_attn_varlen_func, paged": (paged, ("causal", "deterministic", "return_attn_probs")),
    "flash_attention_npu": (dense(flashattn_ext.flash_attention_npu), ("causal",)),
    "flash_attn_with_kvcache": (
        appending(flashattn_ext.flash_attn_with_kvcache),
        ("causal", "rotary_interleaved", "return_softmax_lse", "smooth_softmax", "return_max_logits", "invariant"),
    ),
    "kvcache_reference": (
        appending(flashattn_ext.kvcache_reference), ("causal", "rotary_interleaved", "smooth_softmax", "return_max_logits")
    ),
    "FlashAttention": (
        flashattn_ext.FlashAttention, ("causal", "use_smooth_softmax", "learnable_sink", "invariant")
    ),
    "FlashAttention.forward": (
        dense(flashattn_ext.FlashAttention(16, dropout=0.5).train()), ("return_max_logits",)
    ),
    "sdpa.activate": (sdpa.activate, ("report",)),
    "Mask.show": (flashattn_ext.Mask.chunked(2, 4, 4).show, ("figure",)),
    "Mask.from_flashmask": (
        lambda **options: flashattn_ext.Mask.from_flashmask(torch.zeros(1, 1, 4, 1, dtype=torch.int32), **options), ("causal",)
    ),
    "t5_relative_bias": (lambda **options: flashattn_ext.t5_relative_bias(torch.zeros(8, 2), 3, **options), ("bidirectional",)),
}  # fmt: skip


@pytest.mark.parametrize("value", NO_FLAG, ids=str)
@pytest.mark.parametrize(("call", "flag"), [(call, flag) for call, (_, flags) in FLAGS.items() for flag in flags])
def test_a_flag_is_checked_before_anything_runs(call: str, flag: str, value: Any) -> None:
    function, _ = FLAGS[call]
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=f"^{flag}: expected True or False, got "):
        function(**{flag: value})
    assert torch.equal(torch.get_rng_state(), before), "a seed was drawn"
    assert not sdpa._is_active()


def test_other_options_of_the_reference_of_caches() -> None:
    call = appending(flashattn_ext.kvcache_reference)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_splits'"):
        call(num_splits=3)
    with pytest.raises(ValueError, match="window_size"):
        call(window_size=3)


# Calls that the CPU backend refuses after the checks of their arguments.
REFUSED: dict[str, dict[str, Any]] = {
    "invariant with an origin": {"invariant": True, "origin": (0, 0, 4, 4)},
    "invariant with an origin, largest logits": {"invariant": True, "origin": (0, 0, 4, 4), "return_max_logits": True},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_refused_call_draws_no_seed(name: str, requires_grad: bool) -> None:
    q = torch.randn(1, 4, 2, 16, requires_grad=requires_grad)
    before = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match="invariant"):
        flashattn_ext.forward(q, q, q, dropout_p=0.5, **REFUSED[name])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_refused_function_draws_no_seed() -> None:
    q = torch.randn(1, 4, 2, 16)

    def apply(v: Tensor, **options: Any) -> Any:
        called = CallOptions(softmax_scale=0.25, dropout_p=0.5, **options)
        return flashattn_ext.FlashAttentionFunction.apply(q, q, v, *[None] * 8, None, called, False)

    before = torch.get_rng_state()
    for error, v, options in (
        (ValueError, q[:, :2], {}),
        (ValueError, q, {"softcap": -1.0}),
        (NotImplementedError, q, {"invariant": True, "origin": [0, 0, 4, 4]}),
    ):
        with pytest.raises(error):
            apply(v, **options)
        assert torch.equal(torch.get_rng_state(), before)
    apply(q)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_that_runs_draws_one_seed(requires_grad: bool) -> None:
    q = torch.randn(1, 4, 2, 16, requires_grad=requires_grad)
    torch.manual_seed(1)
    out = flashattn_ext.forward(q, q, q, dropout_p=0.5)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    torch.randint(1, 2**63 - 1, (2,))
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(1)
    assert torch.equal(flashattn_ext.forward(q, q, q, dropout_p=0.5, return_lse=True)[0], out)
