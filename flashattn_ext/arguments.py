"""What the public functions accept: their options for type checkers, and as an integer, a number or a flag whatever Python
itself would take for one.

Each function names its argument in the error. Values that torch.compile keeps symbolic pass through.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .mask import Mask

LAYOUTS = ("bshd", "bhsd")
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1  # of 64-bit integers


class SharedOptions(TypedDict, total=False):
    """What forward, varlen_forward, backward and attention_reference take beside their tensors."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    mask: Mask | None
    dropout_p: float
    smooth_softmax: bool
    sink: Tensor | None
    rng_seed: int | None
    origin: tuple[int, ...] | None


class BiasOptions(TypedDict, total=False):
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    bias: Tensor | None


class AttentionOptions(SharedOptions, BiasOptions, total=False):
    """What forward and varlen_forward take."""

    deterministic: bool


class ReferenceOptions(SharedOptions, BiasOptions, total=False):
    """What attention_reference takes."""


class BackwardOptions(SharedOptions, total=False):
    """What backward takes, the biases aside: they decide what it returns."""

    dlse: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    layout: str
    deterministic: bool


def tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def optional_tensors(**given: Any) -> None:
    tensors(**{name: value for name, value in given.items() if value is not None})


def integer(name: str, value: Any) -> int:
    """Whatever has __index__, but no bool: Python's and numpy's integers, integer tensors of one element."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError(f"{name}: expected an int, got a bool")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: expected an int, got {described(value)}") from None
    if not _LEAST <= value <= _MOST:
        raise ValueError(f"{name}: expected a 64-bit signed integer, got {value}")
    checked: int = value  # or symbolic
    return checked


def number(name: str, value: Any) -> float:
    """Whatever has __float__, but no bool: Python's and numpy's numbers, tensors of one element."""
    if type(value) is float:
        return value
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name}: expected a number, got {described(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number within the range of a float, got {value}") from None
    except (TypeError, ValueError, RuntimeError):  # a tensor of more elements, say
        raise TypeError(f"{name}: expected a number, got {described(value)}") from None


def flag(name: str, value: Any) -> bool:
    """A bool, or a value whose dtype is bool: numpy's, a tensor of one element."""
    if type(value) is bool:
        return value
    if str(getattr(value, "dtype", None)).endswith("bool") and getattr(value, "ndim", None) == 0:
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {described(value)}")


def window(value: Any) -> tuple[int, int]:
    sides = value if type(value) is tuple else list(value) if isinstance(value, Iterable) else ()
    if len(sides) != 2:
        raise ValueError(f"window_size: expected a pair (left, right) with -1 for unbounded, got {value!r}")
    return integer("window_size", sides[0]), integer("window_size", sides[1])


def seed(value: Any) -> int | None:
    return None if value is None else integer("rng_seed", value)


def origin(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, Iterable) or len(numbers := list(value)) not in (2, 4):
        raise ValueError(f"origin: expected None, (batch, head) or (batch, head, row, key), got {value!r}")
    return [integer("origin", number) for number in numbers]


def is_bhsd(layout: Any) -> bool:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    return bool(layout == "bhsd")


def scale(value: Any, q: Tensor) -> float:
    """softmax_scale, by default 1 / sqrt(head_dim)."""
    if value is not None:
        return number("softmax_scale", value)
    head_dim = q.size(-1) if q.dim() else 0
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def described(value: Any) -> str:
    kind = type(value).__name__
    return (
        f"{kind} of shape {tuple(value.shape)} and dtype {value.dtype}"
        if isinstance(value, Tensor)
        else f"{kind} {value!r}"
    )
