"""The TypeError for an argument that a public function does not have: it says which argument of the function is meant.

A function takes `*more` and `**unknown`, which cost a good call nothing, and raises not_an_argument() where they are not empty.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import arguments
from .mask import Mask

Function = TypeVar("Function", bound=Callable[..., Any])

_CATCH_ALLS = ("more", "unknown")

_MASK = "a flashattn_ext.Mask"
_BIAS = "a tensor that is added to the scores, -inf where a key is hidden"
# What other packages call an argument, and the names that it may have here; a function has one of them, or for masks both.
_CAUSAL, _MASKS, _SCALE = ("causal",), ("mask", "bias"), ("softmax_scale",)
_DROPOUT, _SINK, _WINDOW = ("dropout_p", "dropout"), ("sink", "learnable_sink"), ("window_size",)
_LSE, _SEED = ("return_lse", "return_softmax_lse", "return_attn_probs"), ("rng_seed",)
_OURS: dict[str, tuple[str, ...]] = {
    "is_causal": _CAUSAL, "attn_mask": _MASKS, "attention_mask": _MASKS, "key_padding_mask": _MASKS, "block_mask": _MASKS,
    "mask": _MASKS, "attn_bias": ("bias",), "scale": _SCALE, "sm_scale": _SCALE, "scaling": _SCALE, "dropout": _DROPOUT,
    "dropout_p": _DROPOUT, "p_dropout": _DROPOUT, "p": _DROPOUT, "s_aux": _SINK, "sinks": _SINK, "learnable_sink": _SINK, "sink": _SINK,
    "attention_sink": _SINK, "sliding_window": _WINDOW, "window": _WINDOW, "logits_soft_cap": ("softcap",), "soft_cap": ("softcap",),
    "logit_cap": ("softcap",), "return_softmax_lse": _LSE, "return_attn_probs": _LSE, "return_lse": _LSE, "need_weights": _LSE,
    "seed": _SEED, "generator": _SEED, "slopes": ("alibi_slopes",), "page_table": ("block_table",), "block_tables": ("block_table",),
    "seqused_k": ("cache_seqlens",), "head_size": ("head_dim",), "embed_dim": ("head_dim",), "input_layout": ("layout",),
}  # fmt: skip
# Names without an argument here, and what to do instead.
_INSTEAD = {
    "enable_gqa": "leave it out: k and v with fewer heads than q are grouped-query attention",
    "score_mod": "there are no score functions here: use softcap, alibi_slopes, relative_bias or bias",
    "cu_seqlens_q": "flashattn_ext.varlen_forward takes packed sequences",
    "cu_seqlens_k": "flashattn_ext.varlen_forward takes packed sequences",
    "cu_seqlens": "flashattn_ext.varlen_forward takes packed sequences, with cu_seqlens_q and cu_seqlens_k",
    "softmax_scale": "scale q instead: the module's scale is 1 / sqrt(head_dim)",
}
# Alternatives, in calls with a KV cache, to the biases that only forward() takes. Error messages append them to the hint that names forward().
_BIASES = {"attn_bias", "bias", "relative_bias"}
_WITH_A_CACHE = {"flash_attn_with_kvcache", "kvcache_reference"}
_BESIDE_A_CACHE = (
    ", with the keys of the cache as k and v; beside a cache, drafts in a tree are mask=Mask.tree(parents), a Mask of the last n keys of "
    "every sequence, and other terms of a score are alibi_slopes and softcap"
)
_VALUES = {
    "mask": _MASK,
    "bias": _BIAS,
    "window_size": "(left, right), the numbers of keys seen to either side",
    "sink": "[Hq], a logit per head",
    "learnable_sink": "True, with num_heads, for a parameter `sink` that starts at 0",
    "rng_seed": "an int",
}


class _Names(NamedTuple):
    """The arguments of a function."""

    positional: list[str]  # those that may be positional
    all: list[str]


_names: dict[str, _Names] = {}


def shown(function: Function) -> Function:
    """Hides `*more` and `**unknown` from inspect.signature() and help(), and calls known()."""
    signature = inspect.signature(function)
    own = [parameter for name, parameter in signature.parameters.items() if name not in _CATCH_ALLS]
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    known(function)
    return function


def known(function: Callable[..., Any], others: Iterable[str] = ()) -> None:
    """Tells not_an_argument() the arguments of a function, and others that it takes as **options."""
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [parameter.name for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY]
    name = function.__qualname__.removesuffix(".__init__")
    _names[name] = _Names(positional, list(dict.fromkeys([*(parameter.name for parameter in own), *others])))


def not_an_argument(function: str, unknown: Mapping[str, Any], more: Sequence[Any] = ()) -> TypeError:
    """The error of a call with unknown keyword arguments, or with more positional arguments than the function has.

    Args:
        function: its name, of a method with its class, as in __qualname__.
        unknown: the keyword arguments.
        more: the positional arguments after the last one that may be positional.
    """
    parameters = _names[function]
    if more:
        number, value = len(parameters.positional), more[0]
        return TypeError(
            f"{function}() takes {number} positional arguments ({', '.join(parameters.positional)}), got {number + len(more)}: pass the "
            f"others by name. Argument {number + 1} is {'None' if value is None else arguments.described(value)}"
            + (f": {hint}" if (hint := _by_value(value, parameters.all)) else "")
        )
    said = "; ".join(
        f"{name!r}: {_meant(name, parameters.all)}{_BESIDE_A_CACHE * (function in _WITH_A_CACHE and name in _BIASES)}"
        for name in unknown
    )
    return TypeError(f"{function}() got an unexpected keyword argument {said}")


def _meant(name: str, parameters: list[str]) -> str:
    ours = [other for other in _OURS.get(name, ()) if other in parameters]
    if ours:
        return f"here it is {_with_values(ours)}"
    if name in _INSTEAD:
        return _INSTEAD[name]
    of_forward = [other for other in (*_OURS.get(name, ()), name) if other in _names["forward"].all]
    if of_forward:
        return f"flashattn_ext.forward takes {_with_values(list(dict.fromkeys(of_forward)))}"
    close = difflib.get_close_matches(name, parameters, 1)
    return f"did you mean {close[0]}?" if close else f"the arguments are {', '.join(parameters)}"


def _by_value(value: Any, parameters: list[str]) -> str:
    """What a positional argument of this type is in other packages, as arguments of a function with these parameters."""
    meant: tuple[str, ...] = ()
    if value is None:
        return "leave it out"
    if isinstance(value, Mask):
        meant = ("mask",)
    elif isinstance(value, bool):
        meant = _CAUSAL
    elif isinstance(value, (int, float)):  # flash_attn_func's dropout_p, then its softmax_scale
        meant = ("dropout_p", "softmax_scale")
    elif isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.bool):
        meant = _MASKS  # the attn_mask of scaled_dot_product_attention
    elif isinstance(value, Tensor):
        return _INSTEAD["cu_seqlens"]
    return _with_values([name for name in meant if name in parameters])


def _with_values(names: list[str]) -> str:
    return " or ".join(name + (f" ({_VALUES[name]})" if name in _VALUES else "") for name in names)
