"""The rows `--set derivatives` of `bench cuda`: forward mode and second derivatives (docs/derivatives.md), timed as functions of
q, k, v and the gradient of the output. Contestants: ours, PyTorch's math backend, and the package jvp_flash_attention.

FLOP are the products of visible scores, as in bench_cases.py: with `D` columns of q and k and `Dv` of v, J has three products of D
and two of Dv, and H seven and three.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashattn_ext import ops
from flashattn_ext.options import CallOptions, CallTensors

# What a row computes -> the products of D and of Dv columns. The last one is a forward, a backward, J and H.
DERIVATIVES = {
    "J": (3, 2),
    "forward & J": (4, 3),
    "H": (7, 3),
    "double backward": (14, 8),
}
ALONE = ("J", "H")  # calls of our ops, which no other contestant has


def timed(
    what: str, attention: Callable[..., Tensor], causal: bool, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Callable[[], Any]:
    """The timed function of a row: `attention` is a contestant. The tangents are random, the same in every call."""
    inputs, generator = (q, k, v), torch.Generator(q.device).manual_seed(1)
    tangents = [torch.randn(t.shape, generator=generator, device=t.device, dtype=t.dtype) for t in inputs]
    leaves = [t.detach().requires_grad_() for t in (*inputs, dout)]

    def forward_and_tangent() -> Sequence[Tensor]:
        with forward_ad.dual_level(), torch.no_grad():
            duals = [forward_ad.make_dual(t, tangent) for t, tangent in zip(inputs, tangents, strict=True)]
            return list(forward_ad.unpack_dual(attention(*duals)))

    def double_backward() -> Sequence[Tensor]:
        gradients = torch.autograd.grad(attention(*leaves[:3]), leaves[:3], leaves[3], create_graph=True)
        return torch.autograd.grad(gradients, leaves, tangents)

    if what in ALONE:
        return _op_alone(what, causal, inputs, tangents, dout)
    return forward_and_tangent if what == "forward & J" else double_backward


@torch.no_grad()
def _op_alone(
    what: str, causal: bool, inputs: Sequence[Tensor], tangents: Sequence[Tensor], dout: Tensor
) -> Callable[[], Any]:
    call = *CallTensors(*inputs), *CallOptions(causal=causal, softmax_scale=1 / math.sqrt(inputs[0].shape[-1]))
    out, lse, words, *_ = ops.pure_forward(*call, None, True, False, False, [])
    directions = *tangents, *[None] * 4  # no biases
    first = torch.no_grad()(functools.partial(ops.jvp, *call, out, lse, words, None, *directions))
    if what == "J":
        return first
    needs = [False] * 3
    second = functools.partial(ops.second, *call, out, lse, words, None, dout, None, *first(), *directions, *needs)
    return torch.no_grad()(second)
