"""From the keyword arguments of the public functions to the arguments of the ops, and from the ops' results to theirs.

An argument that users pass under its own name is converted by its type in csrc/call/options.def. Those that come from another keyword
(window_size, layout, mask) or have a rule of their own (softmax_scale, deterministic, origin) are named in _EXPRESSIONS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import arguments, names, ops  # noqa: F401 - the functions that converter() makes raise errors of names
from .mask import checked_mask
from .options import OPTIONS, CallOptions, CallTensors, Option

# Converts the tensors of a call with at least one DTensor: all to DTensors. The package sets it (__init__.py), because this module
# imports no integration.
dtensors_together: Callable[..., Iterable[Tensor | None]] | None = None

# The arguments of the ops that users do not pass under the same name and type, as expressions of the parameters of _TEMPLATE.
_EXPRESSIONS = {
    "cu_seqlens_q": "cu_seqlens_q",
    "cu_seqlens_k": "cu_seqlens_k",
    "mask_intervals": "intervals",
    "mask_extremes": "extremes",
    "max_seqlen_q": "max_seqlen_q",
    "max_seqlen_k": "max_seqlen_k",
    "bhsd": "(False if layout == 'bshd' else arguments.is_bhsd(layout))",
    "softmax_scale": "arguments.scale(softmax_scale, q)",
    "window_left": "left",
    "window_right": "right",
    "deterministic": "{flag} or torch.are_deterministic_algorithms_enabled()",
    "origin": "None if origin is None else arguments.origin(origin)",
}
DENSE = (None, None, 0, 0)  # the cu_seqlens and max_seqlens of a call that is not packed
# A keyword argument of each type as an argument of an op. A value of the usual type costs no call of a function.
_CONVERSIONS = {
    "SymInt": "arguments.integer({name!r}, {name})",
    "Scalar": "({name} if type({name}) is float else arguments.number({name!r}, {name}))",
    "bool": "({name} if {name} is True or {name} is False else arguments.flag({name!r}, {name}))",
    "ScalarType?": "(None if {name} is None else arguments.dtype({name!r}, {name}))",
}
_TEMPLATE = """
def {function}(
    {leading}, lengths, layout, /, *, mask=None, window_size=(-1, -1), softmax_scale=None, {parameters}
):{refusal}
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    if not ({no_tensors}):
        arguments.optional_tensors({named_tensors})
    intervals, extremes = (None, None) if mask is None else _intervals_of(mask)
    left, right = arguments.{window}(window_size)
    return {result}
"""
_OF_A_CALL = (
    "CallTensors(q, k, v, {tensors}) if type(q) is type(k) is type(v) is Tensor else _tensors_of(q, k, v, {tensors}), "
    "CallOptions({numbers})"
)


def converter(
    function: str,
    options: Sequence[Option] = OPTIONS,
    leading: str = "q, k, v",
    result: str = _OF_A_CALL,
    window: str = "window",
    takes_unknown: bool = False,
) -> Callable[..., Any]:
    """Makes the converter of a public function: it checks the keyword arguments and returns (CallTensors, CallOptions).

    The converter takes q, k, v, lengths and layout by position; lengths are those of lengths_of(), or DENSE. It is compiled from text,
    as in namedtuple: a loop over the options would take a fifth of the host time of a small call. Other ops give their `options`, the
    names of the tensors that they take first, the `result`, and the function of arguments.py that reads `window_size`. takes_unknown:
    the public function passes all of its keyword arguments on; the converter refuses those that it does not know (names.py).
    """
    own = [option for option in options if option.name not in _EXPRESSIONS]
    parameters = ["deterministic=False", "origin=None"] if options is OPTIONS else []
    unknown = ["**unknown"] if takes_unknown else []
    expressions = _EXPRESSIONS | {
        "deterministic": _EXPRESSIONS["deterministic"].format(flag=_CONVERSIONS["bool"].format(name="deterministic"))
    }
    tensors = [option.name for option in own if option.type == "Tensor?"]
    values = {
        option.name: expressions.get(option.name)
        or (option.name if option.name in tensors else _CONVERSIONS[option.type].format(name=option.name))
        for option in options
    }
    text = _TEMPLATE.format(
        function=function,
        leading=leading,
        window=window,
        parameters=", ".join([*parameters, *(f"{option.name}={option.default!r}" for option in own), *unknown]),
        refusal=f"\n    if unknown:\n        raise names.not_an_argument({function!r}, unknown)"
        if takes_unknown
        else "",
        no_tensors=" and ".join(f"{name} is None" for name in tensors),
        named_tensors=", ".join(f"{name}={name}" for name in tensors),
        result=result.format(
            tensors=", ".join(values[option.name] for option in options if option.type == "Tensor?"),
            numbers=", ".join(values[option.name] for option in options if option.type != "Tensor?"),
        ),
    )
    made: dict[str, Any] = {}
    exec(compile(text, __file__, "exec"), globals(), made)  # torch.compile reads the globals of this module
    converted: Callable[..., Any] = made[function]
    return converted


def lengths_of(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: Any, max_seqlen_k: Any
) -> tuple[Any, ...]:
    return (
        cu_seqlens_q, cu_seqlens_k, arguments.integer("max_seqlen_q", max_seqlen_q), arguments.integer("max_seqlen_k", max_seqlen_k),
    )  # fmt: skip


def _intervals_of(mask: Any) -> tuple[Tensor, Tensor]:
    checked = checked_mask(mask)
    return checked.intervals, checked.extremes()


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
                f"{name.removesuffix('_intervals')}: expected the device of q ({q.device}), got {t.device}"
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
