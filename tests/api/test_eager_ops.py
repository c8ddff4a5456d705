"""Ops called without torch's argument parser: the same results, and torch's own path where it is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import flashattn_ext
from flashattn_ext import _C, ops
from flashattn_ext.options import CallOptions, CallTensors

OPTIONS = CallOptions(softmax_scale=0.25, causal=True, origin=[1, 2])
ARGUMENTS = (*CallTensors._fields, *CallOptions._fields, "rng_seed", "return_max_logits")


def tensors(device: str) -> CallTensors:
    q, k, v = (torch.randn(2, 5, 3, 8, device=device) for _ in range(3))
    return CallTensors(q, k, v, *[None] * 8)


def test_results_are_those_of_the_op(device: str) -> None:
    call = (*tensors(device), *OPTIONS, None, False)
    got, expected = _C.eager_op("flashattn_ext::forward")(*call), torch.ops.flashattn_ext.forward.call(*call)
    assert type(got) is tuple and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    state = ops.rng_state(call[0], 3)
    mask = (state, 1, 2, 3, 4, 0.5, None)
    assert torch.equal(_C.eager_op("flashattn_ext::dropout_mask")(*mask), ops.dropout_mask(*mask))


class Marked(Tensor):
    """A subclass with __torch_function__, which torch must call."""


@pytest.mark.parametrize(
    "argument,value",
    [
        ("q", torch.zeros(2, 5, 3, 8).as_subclass(Marked)),
        ("softmax_scale", torch.tensor(0.25)),
        ("rng_seed", 1 << 63),
        ("origin", [1 << 63, 0]),
        ("origin", (1, 2)),
    ],
    ids=["subclass", "number in a tensor", "large", "large in a list", "tuple"],
)
def test_other_values_are_left_to_torch(argument: str, value: Any) -> None:
    """Among them an integer beyond 64 bits, which torch refuses."""
    call: list[Any] = [*tensors("cpu"), *OPTIONS, None, False]
    eager = _C.eager_op("flashattn_ext::forward")
    assert eager(*call) is not None
    call[ARGUMENTS.index(argument)] = value
    if argument != "softmax_scale":  # a tensor given as a scalar reaches the op, which refuses it
        assert eager(*call) is None
    if argument not in ("q", "origin"):
        with pytest.raises((RuntimeError, TypeError, OverflowError)):
            ops.forward(*call)


def test_another_number_of_arguments_is_refused_by_torch() -> None:
    call = (*tensors("cpu"), *OPTIONS, None, False)
    assert _C.eager_op("flashattn_ext::forward")(*call, None) is None
    with pytest.raises(RuntimeError, match=f"expected at most {len(ARGUMENTS)} argument"):
        ops.forward(*call, None)


def test_modes_see_the_op(device: str) -> None:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v, *_ = tensors(device)
    with Mode():
        flashattn_ext.forward(q, k, v)
    assert torch.ops.flashattn_ext.forward.call in seen


def test_errors_are_those_of_the_op() -> None:
    q, k, v, *_ = tensors("cpu")
    with pytest.raises(ValueError, match="k: expected the head_dim of q"):
        flashattn_ext.forward(q, k[..., :4], v)
    with pytest.raises(TypeError, match="v: expected the dtype of q"):
        flashattn_ext.forward(q, k, v.double())
