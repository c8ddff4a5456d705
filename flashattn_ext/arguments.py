"""Checks of the arguments of public functions: they take whatever Python accepts as an integer, a number or a flag.

Every error names the argument. Values that torch.compile keeps symbolic pass through.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("bshd", "bhsd")
# A softcap of at least this size is off, because c * tanh(s / c) equals s in every dtype. See kUncapped in csrc/rules/score.h.
UNCAPPED = 2.0**60
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1  # range of a 64-bit integer
_UNBOUNDED = -1  # an unbounded side of a window; Python has one object for it
is_compiling = torch.compiler.is_compiling


def tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def optional_tensors(**given: Any) -> None:
    tensors(**{name: value for name, value in given.items() if value is not None})


def integer(name: str, value: Any) -> int:
    """Any value with __index__ except a bool: Python's and numpy's integers, integer tensors of one element.

    Inside torch.compile the range is left to the compiler: a comparison would need the value of a number from .item().
    """
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError(f"{name}: expected an int, got a bool")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: expected an int, got {described(value)}") from None
    if not (is_compiling() or _LEAST <= value <= _MOST):
        raise ValueError(f"{name}: expected a 64-bit signed integer, got {value}")
    checked: int = value  # or symbolic
    return checked


def number(name: str, value: Any) -> float:
    """Any value with __float__ except a bool: Python's and numpy's numbers, tensors of one element that need no gradient."""
    if type(value) is float:
        return value
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name}: expected a number, got {described(value)}")
    if isinstance(value, Tensor) and (has_tangent(value) or (value.requires_grad and torch.is_grad_enabled())):
        raise TypeError(
            f"{name}: expected a number, got {described(value)} that requires a gradient, which it would not get; "
            f"{_DIFFERENTIABLE.get(name, '')}pass {name}.detach() for a constant"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number within the range of a float, got {value}") from None
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements, for example
        raise TypeError(f"{name}: expected a number, got {described(value)}") from None


# What to make learnable instead of an argument that gets no gradient.
_DIFFERENTIABLE = {"softmax_scale": "scale q instead (q * temperature, and softmax_scale as a number), or "}


def has_tangent(value: Tensor) -> bool:
    """Whether this tensor has a tangent of forward-mode differentiation."""
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None


def flag(name: str, value: Any) -> bool:
    """A bool, or a value with dtype bool: a numpy bool or a tensor of one element."""
    if type(value) is bool:
        return value
    if str(getattr(value, "dtype", None)).endswith("bool") and getattr(value, "ndim", None) == 0:
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {described(value)}")


def dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    raise TypeError(f"{name}: expected a torch.dtype or None, got {described(value)}")


def window(value: Any) -> tuple[int, int]:
    sides = value if type(value) is tuple else list(value) if isinstance(value, Iterable) else ()
    if len(sides) != 2:
        raise ValueError(f"window_size: expected a pair (left, right) with -1 for unbounded, got {value!r}")
    left, right = sides
    if left is _UNBOUNDED and right is _UNBOUNDED:  # the default
        return left, right
    if (
        type(left) is int
        and type(right) is int
        and (is_compiling() or (_LEAST <= left <= _MOST and _LEAST <= right <= _MOST))
    ):
        return left, right
    return integer("window_size", left), integer("window_size", right)


def flash_attn_window(value: Any) -> tuple[int, int]:
    """window() with every negative side as -1, because flash-attn takes any negative number as unbounded."""
    left, right = window(value)
    if is_compiling():  # a comparison would need the value of a number from .item(); Dynamo makes max() symbolic
        return max(left, -1), max(right, -1)
    return left if left > -1 else -1, right if right > -1 else -1


def seed(value: Any) -> int | None:
    return None if value is None else integer("rng_seed", value)


def origin(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, Iterable) or len(numbers := list(value)) not in (2, 4, 5):
        raise ValueError(
            f"origin: expected None, (batch, head) or (batch, head, row, key), the latter with shift as a fifth or without, got {value!r}"
        )
    return [integer("origin", number) for number in numbers]


def is_bhsd(layout: Any) -> bool:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    return bool(layout == "bhsd")


def scale(value: Any, q: Tensor) -> float:
    """softmax_scale, by default 1 / sqrt(head_dim)."""
    if value is not None:
        return number("softmax_scale", value)
    shape = q.shape
    head_dim = shape[-1] if shape else 0
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast casts to on the device of q; None if it is off there."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    dtype: torch.dtype = torch.get_autocast_dtype(kind)
    return dtype


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` as autocast casts it: floating-point tensors are cast, except float64, and fp8, whose values are not its elements alone."""
    return t.to(dtype) if t.is_floating_point() and t.dtype not in (torch.float64, torch.float8_e4m3fn) else t


def described(value: Any) -> str:
    kind = type(value).__name__
    return (
        f"{kind} of shape {tuple(value.shape)} and dtype {value.dtype}"
        if isinstance(value, Tensor)
        else f"{kind} {value!r}"
    )
