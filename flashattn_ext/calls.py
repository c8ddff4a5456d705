"""From the keyword arguments of the public functions to the arguments of the ops, and from the ops' results to theirs.

convert() has the keyword arguments that the public functions share, with their defaults: they take them as **options and pass them on.
Their types are in options.py, for type checkers; lists() shows both in help().
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import arguments, names, ops
from .block_mask import BlockMask, checked_intervals, checked_mask
from .mask import Mask
from .options import CallOptions, CallTensors

Function = TypeVar("Function", bound=Callable[..., Any])

# Converts the tensors of a call with at least one DTensor: all to DTensors. The package sets it (__init__.py), because this module
# imports no integration.
dtensors_together: Callable[..., Iterable[Tensor | None]] | None = None

DENSE = (None, None, 0, 0)  # the cu_seqlens and max_seqlen of a call that is not packed


def convert(
    function: str, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], layout: Any, /, *,
    causal: Any = False, window_size: Any = (-1, -1), softmax_scale: Any = None, softcap: Any = 0.0, alibi_slopes: Any = None,
    relative_bias: Any = None, bias: Any = None, mask: Any = None, dropout_p: Any = 0.0, smooth_softmax: Any = False,
    sink: Any = None, deterministic: Any = False, invariant: Any = False, origin: Any = None, descale_q: Any = None,
    descale_k: Any = None, descale_v: Any = None, out_dtype: Any = None, **unknown: Any,
) -> tuple[CallTensors, CallOptions]:  # fmt: skip
    """Checks the keyword arguments of the public function with this name, and converts them to the arguments of the ops.

    lengths: those of lengths_of(), or DENSE. The results are made by position, and a value of the usual type costs no call of a
    function: a call by keywords and functions would take a twentieth of the host time of a small call.
    """
    if unknown:
        raise names.not_an_argument(function, unknown)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    if not (
        sink is None and alibi_slopes is None and relative_bias is None and bias is None
        and descale_q is None and descale_k is None and descale_v is None
    ):  # fmt: skip
        arguments.optional_tensors(
            sink=sink, alibi_slopes=alibi_slopes, relative_bias=relative_bias, bias=bias,
            descale_q=descale_q, descale_k=descale_k, descale_v=descale_v,
        )  # fmt: skip
    intervals = extremes = lists = bits = None
    if mask is not None:
        if isinstance(checked_mask(mask), Mask):
            intervals, extremes = mask.intervals, mask.extremes()
        else:
            lists, bits = blocks_of(mask, q, k, lengths, layout)
    left, right = arguments.window(window_size)
    tensors = (CallTensors if type(q) is type(k) is type(v) is Tensor else _tensors_of)(
        q, k, v, cu_seqlens_q, cu_seqlens_k, sink, alibi_slopes, relative_bias, bias, intervals, extremes,
        descale_q, descale_k, descale_v, lists, bits,
    )  # fmt: skip
    return tensors, CallOptions(
        max_seqlen_q,
        max_seqlen_k,
        False if layout == "bshd" else arguments.is_bhsd(layout),
        arguments.scale(softmax_scale, q),
        softcap if type(softcap) is float else arguments.number("softcap", softcap),
        causal if causal is True or causal is False else arguments.flag("causal", causal),
        left,
        right,
        dropout_p if type(dropout_p) is float else arguments.number("dropout_p", dropout_p),
        smooth_softmax
        if smooth_softmax is True or smooth_softmax is False
        else arguments.flag("smooth_softmax", smooth_softmax),
        (
            deterministic
            if deterministic is True or deterministic is False
            else arguments.flag("deterministic", deterministic)
        )
        or torch.are_deterministic_algorithms_enabled(),
        invariant if invariant is True or invariant is False else arguments.flag("invariant", invariant),
        None if origin is None else arguments.origin(origin),
        None if out_dtype is None else arguments.dtype("out_dtype", out_dtype),
    )


def lists(*options: type) -> Callable[[Function], Function]:
    """Makes inspect.signature() and help() list these options in place of **options, with the defaults that convert() has.

    options: TypedDicts of options.py. names.not_an_argument() gets to know the arguments as well.
    """
    types = {name: annotation for each in options for name, annotation in each.__annotations__.items()}
    shared = [
        parameter.replace(annotation=getattr(types[name], "__forward_arg__", types[name]))
        for name, parameter in inspect.signature(convert).parameters.items()
        if name in types
    ]

    def decorated(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        positional = [parameter for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY]
        others = [parameter for parameter in shared if parameter.name not in signature.parameters]
        listed = [*positional, *others, *own[len(positional) :]]
        function.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
        return names.shown(function)

    return decorated


def lengths_of(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: Any, max_seqlen_k: Any
) -> tuple[Any, ...]:
    return (
        cu_seqlens_q, cu_seqlens_k, arguments.integer("max_seqlen_q", max_seqlen_q), arguments.integer("max_seqlen_k", max_seqlen_k),
    )  # fmt: skip


def intervals_of(mask: Any) -> tuple[Tensor, Tensor]:
    """The tensors of a Mask that the ops take."""
    checked = checked_intervals(mask, "a call with a KV cache")
    return checked.intervals, checked.extremes()


def blocks_of(mask: BlockMask, q: Any, k: Any, lengths: tuple[Any, ...], layout: Any) -> tuple[Tensor, Tensor]:
    """The tensors of a BlockMask that the ops take, if it has the sizes of the call: they know the lists alone.

    Raises:
        ValueError: the mask has other sizes.
    """
    if lengths[0] is None and isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4:
        rows, heads = (2, 1) if layout == "bhsd" else (1, 2)
        B, Hq, Hk, Sq, Sk = q.shape[0], q.shape[heads], k.shape[heads], q.shape[rows], k.shape[rows]
        if mask.shape[2:] != (Sq, Sk) or mask.shape[0] not in (1, B) or mask.shape[1] not in (1, Hk, Hq):
            raise ValueError(
                f"mask: expected a BlockMask of shape [{B} or 1, 1 or {Hk} or {Hq}, {Sq}, {Sk}] (batch, heads, rows, keys) for q of shape "
                f"{list(q.shape)} and k of shape {list(k.shape)}, got one of shape {list(mask.shape)}"
            )
    return mask.lists, mask.bits


def _tensors_of(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> CallTensors:
    arguments.tensors(q=q, k=k, v=v)
    return _with_dtensors(CallTensors(q, k, v, *others))


def _with_dtensors(tensors: CallTensors) -> CallTensors:
    """The tensors of a call; if one of them is a DTensor, all are converted to DTensors."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not any(isinstance(t, distributed.DTensor) for t in tensors):
        return tensors
    assert dtensors_together is not None
    return CallTensors(*dtensors_together(*tensors))


def autocast(tensors: CallTensors) -> CallTensors:
    """The tensors cast as scaled_dot_product_attention casts them inside torch.autocast; float64 and fp8 are not cast.

    A float32 bias keeps its dtype, and so do the tensors that the kernels read in the dtype of the softmax statistics.
    """
    dtype = arguments.autocast_dtype(tensors.q)
    if dtype is None:
        return tensors
    q, k, v = (arguments.cast(t, dtype) for t in tensors[:3])
    bias = tensors.bias
    if bias is not None and bias.dtype != torch.float32:
        bias = arguments.cast(bias, dtype)
    return tensors._replace(q=q, k=k, v=v, bias=bias)


def check(tensors: CallTensors, options: CallOptions) -> None:
    """Runs the checks of the op `forward` where no kernel of it follows.

    Raises:
        ValueError, TypeError, NotImplementedError: as the op on any device.
    """
    q = tensors.q
    for name, t in tensors._asdict().items():
        if t is not None and t.device != q.device:
            raise ValueError(
                f"{name.removesuffix('_intervals').removesuffix('_lists')}: expected the device of q ({q.device}), got {t.device}"
            )
    # On the meta device every dtype and head dim is at home, and the tensors take no memory.
    on_meta = (None if t is None else torch.empty((), dtype=t.dtype, device="meta").expand(t.shape) for t in tensors)
    ops.supports(*on_meta, *options, False, False, False, False)


def results(
    out: Tensor, lse: Tensor, max_logits: Tensor, return_lse: bool, return_max_logits: bool
) -> Tensor | tuple[Tensor, ...]:
    """The results that a call requested."""
    if return_lse:
        return (out, lse, max_logits) if return_max_logits else (out, lse)
    return (out, max_logits) if return_max_logits else out
