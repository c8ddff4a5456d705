"""Python handles of the ops of csrc/ops/ops.cpp and csrc/ops/decode_op.cpp, and the one op that is written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _C


def _op(name: str) -> Callable[..., Any]:
    """The overload `call` of an op, as a function of its positional arguments."""
    op, eager = getattr(torch.ops.flashattn_ext, name).call, _C.eager_op(f"flashattn_ext::{name}")
    is_compiling = torch.compiler.is_compiling

    def call(*arguments: Any) -> Any:
        if is_compiling():
            return op(*arguments)
        results = eager(*arguments)
        return op(*arguments) if results is None else results

    return call


forward, backward, dropout_mask = _op("forward"), _op("backward"), _op("dropout_mask")
jvp, second = _op("jvp"), _op("second")  # docs/derivatives.md
decode, decode_append = _op("decode"), _op("decode_append")
# These take the state of the dropout mask instead of a seed, so that several calls can share it.
pure_forward = torch.ops.flashattn_ext.forward.default
pure_backward = torch.ops.flashattn_ext.backward.default
rng_state = torch.ops.flashattn_ext.rng_state.default
supports = torch.ops.flashattn_ext.supports.default
mask_extremes: Callable[[Tensor], Tensor] = torch.ops.flashattn_ext.mask_extremes.default

CENTRES = 3  # numbers in the centres of a row, kCentres in csrc/rules/bias.h

_library = torch.library.Library("flashattn_ext", "FRAGMENT")


def _as_tensor(value: Any) -> Tensor:
    """A number that torch.compile keeps symbolic, as a float64 tensor on the CPU, by a multiplication that its backends can compile."""
    tensor: Tensor = torch.ones((), dtype=torch.float64) * value
    return tensor


_library.impl("as_tensor", _as_tensor, "CompositeImplicitAutograd")


def symbolic_numbers(options: tuple[Any, ...]) -> list[Tensor]:
    """The argument `scalars` of a pure op: all float options as tensors if torch.compile keeps any of them symbolic, else empty."""
    if not any(isinstance(option, torch.SymFloat) for option in options):
        return []
    return [_as_tensor(option) for option in options if isinstance(option, (float, torch.SymFloat))]


def dropout_state(q: Tensor, dropout_p: float, rng_seed: int | None) -> Tensor | None:
    """{seed, offset} of the dropout mask of a call, drawn from torch's generator without a seed; None without dropout."""
    if not dropout_p > 0:
        return None
    state: Tensor
    if rng_seed is None:
        state = torch.randint(1, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    else:
        state = rng_state(q, rng_seed)
    return state


def place_of_work(device: torch.device) -> tuple[int, int]:
    """The current stream of a CUDA device and its graph capture, 0 if there is none; (0, 0) for other devices."""
    if device.type != "cuda":
        return 0, 0
    place: tuple[int, int] = _C.cuda_stream_and_capture(device.index)
    return place
