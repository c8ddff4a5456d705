"""FlashAttentionFunction: ties the forward op to the backward op, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops


class CallOptions(NamedTuple):
    """What a call says beside its tensors, in the order of the ops' schemas."""

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


def backward_op(
    dout, dlse, q, k, v, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k, sink, o: CallOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return ops.backward(
        dout, dlse, q, k, v, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k, o.max_seqlen_q,
        o.max_seqlen_k, o.bhsd, o.softmax_scale, o.causal, o.window_left, o.window_right,
        o.dropout_p, o.smooth_softmax, sink, o.deterministic,
    )  # fmt: skip


class _Gradients(torch.autograd.Function):
    """The backward op as a node of its own, so that differentiating it says what to do instead."""

    @staticmethod
    def forward(ctx: Any, dout, dlse, q, k, v, out, lse, rng_state, cu_q, cu_k, sink, options):
        return backward_op(dout, dlse, q, k, v, out, lse, rng_state, cu_q, cu_k, sink, options)

    @staticmethod
    def backward(ctx: Any, *_gradients):
        raise RuntimeError(
            "flashattn_ext has no double backward; use flashattn_ext.attention_reference (plain "
            "PyTorch, differentiable any number of times) for second derivatives"
        )


class FlashAttentionFunction(torch.autograd.Function):
    """apply(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, rng_seed, options) -> (out, lse).

    Shapes and errors are those of flashattn_ext.forward and varlen_forward, which are the way to
    call this; `options` is a CallOptions.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, sink, cu_seqlens_q, cu_seqlens_k, rng_seed, o: CallOptions):
        out, lse, rng_state = ops.forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, o.max_seqlen_q, o.max_seqlen_k, o.bhsd,
            o.softmax_scale, o.causal, o.window_left, o.window_right, o.dropout_p, rng_seed,
            o.smooth_softmax, sink,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, out, lse, rng_state)
        ctx.options = o
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):
        if dout is None and dlse is None:
            return (None,) * 8
        q, k, v, sink, cu_seqlens_q, cu_seqlens_k, out, lse, rng_state = ctx.saved_tensors
        # The node costs as much as a small kernel; without create_graph nothing can be differentiated again.
        gradients = _Gradients.apply if torch.is_grad_enabled() else backward_op
        dq, dk, dv, dsink = gradients(
            dout, dlse, q, k, v, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k, sink, ctx.options
        )
        return dq, dk, dv, None if sink is None else dsink, None, None, None, None
