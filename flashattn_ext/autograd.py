"""FlashAttentionFunction: ties the forward op to the backward op, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class _Gradients(torch.autograd.Function):
    """The backward op as a node of its own, so that differentiating it says what to do instead."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return ops.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """There is nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            "flashattn_ext has no double backward; use flashattn_ext.attention_reference (plain "
            "PyTorch, differentiable any number of times) for second derivatives"
        )


def _input_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of apply()'s arguments."""
    if dout is None and dlse is None:
        return (None,) * (len(CallTensors._fields) + 2)
    *saved, out, lse, centres, rng_state = ctx.saved_tensors
    tensors = CallTensors(*saved)
    needs = CallTensors(*ctx.needs_input_grad[: len(CallTensors._fields)]).biases()
    # The node costs as much as a small kernel; without create_graph nothing can be differentiated again.
    gradients: Callable[..., Any] = _Gradients.apply if torch.is_grad_enabled() else ops.backward
    centres = centres if ctx.keeps_centres else None
    dq, dk, dv, dsink, *dbiases = gradients(*tensors, *ctx.options, dout, dlse, out, lse, centres, *needs, rng_state)
    dbiases = [gradient if needed else None for gradient, needed in zip(dbiases, needs, strict=True)]
    return dq, dk, dv, None, None, None if tensors.sink is None else dsink, *dbiases, None, None, None, None


def _keeps_centres(tensors: Iterable[Tensor | None], transformed: bool) -> bool:
    """Whether the backward wants the centres of rows (csrc/bias.h), without which 16-bit gradients of slopes and relative biases are coarse."""
    call = CallTensors(*tensors)  # type: ignore[arg-type]
    biases = [t for t in (call.alibi_slopes, call.relative_bias) if t is not None]
    return call.q.dtype.itemsize == 2 and (bool(biases) if transformed else any(t.requires_grad for t in biases))


class FlashAttentionFunction(torch.autograd.Function):
    """apply(*tensors, rng_seed, options) -> (out, lse).

    Shapes and errors are those of flashattn_ext.forward and varlen_forward, which are the way to
    call this; `tensors` are those of CallTensors, `options` is a CallOptions.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, rng_seed, options = arguments
        ctx.keeps_centres = _keeps_centres(tensors, transformed=False)
        out, lse, centres, rng_state = ops.forward(*tensors, *options, rng_seed, ctx.keeps_centres)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse, centres, rng_state)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _input_gradients(ctx, dout, dlse)


class TransformedFunction(torch.autograd.Function):
    """FlashAttentionFunction in the form that torch.func's transforms (grad, vjp, vmap) ask for, which costs every call more.

    apply(*tensors, rng_seed, options) -> (out, lse, centres of rows, state of the dropout mask), otherwise as
    FlashAttentionFunction.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *tensors, rng_seed, options = arguments
        out, lse, centres, rng_state = ops.forward(
            *tensors, *options, rng_seed, _keeps_centres(tensors, transformed=True)
        )
        return out, lse, centres, rng_state

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _rng_seed, ctx.options = inputs
        ctx.keeps_centres = _keeps_centres(tensors, transformed=True)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[-2:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_others: Any) -> tuple[Tensor | None, ...]:
        return _input_gradients(ctx, dout, dlse)
