"""FlashAttentionFunction: attention as a torch.autograd.Function. The derivatives of the ops themselves are in
csrc/autograd/autograd.cpp and csrc/autograd/derivative_autograd.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops, tensor_cache
from .options import BIASES, DIFFERENTIABLE, CallOptions, CallTensors, differentiable, keeps_centres


class _HiddenFromDynamo:
    """A static method of an autograd.Function that torch.compile does not see.

    Dynamo breaks the graph at a Function that defines jvp (torch 2.13), although it never needs the method: it traces forward and
    backward alone if gradients are wanted, and otherwise the ops in forward, which have a forward mode of their own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, _instance: Any, _owner: Any = None) -> Callable[..., Any]:
        is_dynamo = torch._guards.CompileContext.try_get() is not None
        inherited: Callable[..., Any] = torch.autograd.Function.jvp
        return inherited if is_dynamo else self._function


def _call_tensors(given: Sequence[Tensor | None]) -> CallTensors:
    """From the tensors that apply takes. The lists of a BlockMask have three dimensions where the intervals of a Mask have four, but in
    packed calls, which take no BlockMask."""
    tensors = CallTensors(*given)
    first, second = tensors.mask_intervals, tensors.mask_extremes
    if first is None or tensors.cu_seqlens_q is not None or first.dim() != 3:
        return tensors
    return tensors._replace(mask_intervals=None, mask_extremes=None, mask_lists=first, mask_bits=second)


class FlashAttentionFunction(torch.autograd.Function):
    """Attention as a torch.autograd.Function, for code that needs one: apply(*tensors, rng_seed, options, return_max_logits).

    flashattn_ext.forward and varlen_forward compute the same bits and are faster, because their autograd node is written in C++
    (csrc/autograd/autograd.cpp). One kind of call differs: for few queries with alibi_slopes they run the kernels of decoding, which sum in
    another order, unless the slopes need a gradient; here they are taken to need one. This class calls the same ops,
    torch.ops.flashattn_ext.forward, backward and jvp; torch.compile and the transforms of torch.func trace it, and it has the
    derivatives of docs/derivatives.md.

    apply returns (out, lse, max_logits, lse_words, centres, rng_state). out, lse and max_logits are as in forward; max_logits is
    empty without return_max_logits. out and lse are differentiable, the others have no gradient. The last three are for the
    backward: lse_words are the log-sum-exp of each row in two words, [B, Hq, Sq, 2] or [Hq, total_q, 2] in the dtype of lse
    (csrc/rules/lse_words.h); the centres of rows are [B, Hq, Sq, 3] or [Hq, total_q, 3] in the dtype of lse (csrc/rules/bias.h), empty except
    in calls with slopes or a relative bias, on GPUs in 16 bits; rng_state is int64 [2], empty without dropout.

    Args of apply, all of them by position:
        q, k, v, cu_seqlens_q, cu_seqlens_k, sink, alibi_slopes, relative_bias, bias, mask_intervals, mask_extremes: the fields of
            CallTensors but for the descales of fp8, which has no derivative, with the shapes and dtypes of forward, or with cu_seqlens_q
            and cu_seqlens_k of varlen_forward. Unused tensors are None. A Mask is passed as its `intervals` and the result of its method `extremes`, a
            BlockMask in their place as its `lists` and `bits`. Unlike forward, apply does not take
            nested tensors or a mix of DTensors and plain tensors, and torch.autocast does not cast its arguments. On GPUs and NPUs, an
            origin with dropout must have a row that is a multiple of 16 and a key that is a multiple of 64.
        rng_seed: 64-bit seed of the dropout mask; None draws from the device's default generator.
        options: a CallOptions. Its softmax_scale is a number: None does not stand for 1 / sqrt(D) here. max_seqlen_q and
            max_seqlen_k are 0 in a dense call, window_left and window_right are -1 where unbounded, and `bhsd` is the layout.
        return_max_logits: as in forward.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: as in forward, naming the argument.
    """

    # No *args: torch.compile counts the named arguments to tell that forward takes no ctx.
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, sink: Tensor | None,
        alibi_slopes: Tensor | None, relative_bias: Tensor | None, bias: Tensor | None, mask_intervals: Tensor | None,
        mask_extremes: Tensor | None, rng_seed: int | None, options: CallOptions, return_max_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        tensors = _call_tensors(
            (
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                sink,
                alibi_slopes,
                relative_bias,
                bias,
                mask_intervals,
                mask_extremes,
            )
        )
        if (
            rng_seed is None
            and not torch.compiler.is_compiling()
            and options.dropout_p > 0
            and tensor_cache.has_values(q)
        ):
            ops.supports(
                *tensors, *options, False, False, False, return_max_logits
            )  # a call that is refused draws no seed
        rng_state = ops.dropout_state(q, options.dropout_p, rng_seed)
        # Under torch.func, forward cannot know whether the gradients of slopes and relative biases are needed.
        keeps = keeps_centres(tensors, lambda _: True)
        out, lse, lse_words, centres, max_logits = ops.pure_forward(
            *tensors, *options, rng_state, True, keeps, return_max_logits, ops.symbolic_numbers(options)
        )
        kept_state = q.new_empty(0, dtype=torch.int64) if rng_state is None else rng_state
        return out, lse, max_logits, lse_words, centres, kept_state

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _rng_seed, ctx.options, _return_max_logits = inputs
        out, lse, max_logits, *kept = output
        ctx.save_for_backward(*tensors, out, lse, *kept)
        if not torch.compiler.is_compiling():  # torch.compile does not support save_for_forward and jvp
            ctx.save_for_forward(*tensors, out, lse, *kept)
        ctx.mark_non_differentiable(max_logits, *kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_unused: None) -> tuple[Tensor | None, ...]:
        *saved, out, lse, lse_words, centres, rng_state = ctx.saved_tensors
        results = dict.fromkeys(CallTensors._fields[: len(saved)])
        if dout is not None or dlse is not None:
            needed = dict(zip(CallTensors._fields, ctx.needs_input_grad, strict=False))
            gradients = ops.backward(
                *_call_tensors(saved), *ctx.options, dout, dlse, out, lse, lse_words, centres if centres.numel() else None, *[needed[name] for name in BIASES],
                rng_state if rng_state.numel() else None,
            )  # fmt: skip
            results |= {
                name: gradient if needed[name] else None
                for name, gradient in zip(DIFFERENTIABLE, gradients, strict=True)
            }
        return *results.values(), None, None, None

    @_HiddenFromDynamo
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, out, lse, lse_words, _centres, rng_state = ctx.saved_tensors
        given = differentiable(CallTensors(*tangents[: len(saved)]))
        if all(tangent is None for tangent in given):
            return (None,) * 6
        # torch disables forward mode here, at every level of torch.func: tangents of outer levels would be lost silently.
        with forward_ad._set_fwd_grad_enabled(True):
            tensors = [
                t if tangent is None else forward_ad.unpack_dual(t).primal
                for t, tangent in zip(saved, tangents, strict=False)
            ]
            tout, tlse = ops.jvp(
                *_call_tensors(tensors),
                *ctx.options,
                out,
                lse,
                lse_words,
                rng_state if rng_state.numel() else None,
                *given,
            )
        return tout, tlse, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # The ops have rules and derivatives of their own. A generated rule has no jvp for arguments that hold numbers, as options do.
        results = torch.vmap(FlashAttentionFunction.forward, in_dims, randomness=info.randomness)(*arguments)
        return results, (0,) * len(results)
