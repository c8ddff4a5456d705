"""What a call is made of, in the order of the ops, which know their derivatives themselves (csrc/autograd.cpp)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops


class CallTensors(NamedTuple):
    """The tensors of a call, in the order of the ops' schemas (csrc/attn_call.h)."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    sink: Tensor | None
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    bias: Tensor | None
    mask_intervals: Tensor | None
    mask_extremes: Tensor | None

    def biases(self) -> tuple[Tensor | None, ...]:
        """Those whose gradients the backward computes on demand."""
        return self.alibi_slopes, self.relative_bias, self.bias


class CallOptions(NamedTuple):
    """What a call says beside its tensors, in the order of the ops' schemas, after the tensors."""

    max_seqlen_q: int
    max_seqlen_k: int
    bhsd: bool
    softmax_scale: float
    softcap: float
    causal: bool
    window_left: int
    window_right: int
    dropout_p: float
    smooth_softmax: bool
    deterministic: bool
    origin: list[int] | None


def keeps_centres(tensors: CallTensors) -> bool:
    """Whether the backward wants the centres of rows (csrc/bias.h), without which 16-bit gradients of slopes and relative biases are coarse."""
    biases = (tensors.alibi_slopes, tensors.relative_bias)
    return tensors.q.dtype.itemsize == 2 and any(t is not None and t.requires_grad for t in biases)


class FlashAttentionFunction(torch.autograd.Function):
    """apply(*tensors, rng_seed, options) -> (out, lse), for code that asks for a torch.autograd.Function.

    Shapes and errors are those of flashattn_ext.forward and varlen_forward, which are the way to call this; `tensors` are those of
    CallTensors, `options` is a CallOptions. The op knows its own derivative (csrc/autograd.cpp), so there is no forward and no backward
    here, and torch.compile, which looks for them, breaks the graph at apply.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, rng_seed, options = arguments
        out, lse = ops.forward(*tensors, *options, rng_seed)
        return out, lse
