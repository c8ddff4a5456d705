"""FlashAttentionFunction: ties the forward op to the backward op, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops


class CallOptions(NamedTuple):
    """What a call says beside its tensors, in the order of the ops' schemas (csrc/attn_call.h)."""

    max_seqlen_q: int
    max_seqlen_k: int
    bhsd: bool
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    dropout_p: float
    smooth_softmax: bool
    deterministic: bool


class _Gradients(torch.autograd.Function):
    """The backward op as a node of its own, so that differentiating it says what to do instead."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return ops.backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            "flashattn_ext has no double backward; use flashattn_ext.attention_reference (plain "
            "PyTorch, differentiable any number of times) for second derivatives"
        )


class FlashAttentionFunction(torch.autograd.Function):
    """apply(q, k, v, cu_seqlens_q, cu_seqlens_k, sink, rng_seed, options) -> (out, lse).

    Shapes and errors are those of flashattn_ext.forward and varlen_forward, which are the way to
    call this; `options` is a CallOptions.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
        sink: Tensor | None, rng_seed: int | None, options: CallOptions,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k, sink)
        out, lse, rng_state = ops.forward(*inputs, *options, rng_seed)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, lse, rng_state)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 8
        *inputs, out, lse, rng_state = ctx.saved_tensors
        # The node costs as much as a small kernel; without create_graph nothing can be differentiated again.
        gradients: Callable[..., Any] = _Gradients.apply if torch.is_grad_enabled() else ops.backward
        dq, dk, dv, dsink = gradients(*inputs, *ctx.options, dout, dlse, out, lse, rng_state)
        sink = inputs[-1]
        return dq, dk, dv, None, None, None if sink is None else dsink, None, None
