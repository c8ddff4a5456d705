"""The rows `--set derivatives` of `bench cuda`: forward mode and second derivatives (docs/derivatives.md), timed as functions of
q, k, v and the gradient of the output. Contestants: ours, PyTorch's math backend, and the package jvp_flash_attention.

FLOP are the products of visible scores, as in bench_cases.py: with `D` columns of q and k and `Dv` of v, J has three products of D
and two of Dv, and H seven and three.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashattn_ext import ops
from flashattn_ext.options import CallOptions, CallTensors

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# What a row computes -> the products of D and of Dv columns. The last one is a forward, a backward, J and H.
DERIVATIVES = {
    "J": (3, 2),
    "forward & J": (4, 3),
    "H": (7, 3),
    "double backward": (14, 8),
}
ALONE = ("J", "H")  # calls of our ops, which no other contestant has


def jvp_flash_attention() -> Callable[..., Tensor] | None:
    """Attention of the package jvp_flash_attention, which computes with dual numbers; None where it cannot be imported."""
    with contextlib.suppress(Exception):  # a package built for another torch fails in many ways: it counts as absent
        return importlib.import_module("jvp_flash_attention.jvp_attention").JVPAttn.fwd_dual
    return None


def random_tangents(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Random tangents, which are the same in every call."""
    generator = torch.Generator(tensors[0].device).manual_seed(1)
    return [torch.randn(t.shape, generator=generator, device=t.device, dtype=t.dtype) for t in tensors]


def timed(
    what: str, attention: Attention, causal: bool, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Callable[[], Any]:
    """The timed function of a row: `attention` is a contestant."""
    inputs = (q, k, v)
    tangents = random_tangents(inputs)
    if what in ALONE:
        return _op_alone(what, causal, inputs, tangents, dout)
    if what == "forward & J":

        def forward_and_tangent() -> Sequence[Tensor]:
            with forward_ad.dual_level(), torch.no_grad():
                duals = [forward_ad.make_dual(t, tangent) for t, tangent in zip(inputs, tangents, strict=True)]
                return list(forward_ad.unpack_dual(attention(*duals)))

        return forward_and_tangent

    leaves = [t.detach().requires_grad_() for t in (*inputs, dout)]

    def double_backward() -> Sequence[Tensor]:
        gradients = torch.autograd.grad(attention(*leaves[:3]), leaves[:3], leaves[3], create_graph=True)
        return torch.autograd.grad(gradients, leaves, tangents)

    return double_backward


def _op_alone(
    what: str, causal: bool, inputs: Sequence[Tensor], tangents: Sequence[Tensor], dout: Tensor
) -> Callable[[], Any]:
    call = CallTensors(*inputs), CallOptions(causal=causal, softmax_scale=1 / math.sqrt(inputs[0].shape[-1]))
    of_biases = [None] * 4
    with torch.no_grad():
        out, lse, *_ = ops.pure_forward(*call[0], *call[1], None, False, False, [])

    def first() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return ops.jvp(*call[0], *call[1], out, lse, None, *tangents, *of_biases)

    if what == "J":
        return first
    tout, tlse = first()

    def second() -> Sequence[Tensor]:
        with torch.no_grad():
            needs = [False] * 3
            return ops.second(
                *call[0], *call[1], out, lse, None, dout, None, tout, tlse, *tangents, *of_biases, *needs
            )[:3]

    return second
