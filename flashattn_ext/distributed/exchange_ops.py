"""The two ops that autograd, torch.compile and checkpointing see: a whole exchange, forward and backward, each as one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .call import (
    Settings,
    Tensors,
    check,
    documents_of,
    extras_of,
    group_of,
    options_of,
    sharding_of,
    shares_of,
)
from .head_exchange import HeadExchange
from .key_exchange import KeyExchange
from .local import Gradients

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? sink, Tensor? alibi_slopes, Tensor? relative_bias, Tensor? bias, "
    "Tensor? mask_intervals, Tensor rng_state"
)
_SETTINGS = (
    "float softmax_scale, float softcap, bool causal, SymInt window_left, SymInt window_right, float dropout_p, "
    "bool smooth_softmax, bool deterministic, SymInt batch, SymInt head, SymInt seqlen, str sharding, str mode, str group, "
    "bool needs_lse, bool keeps_centres"
)
# What the backward is given beside: the centres of the rows that it reads (empty unless keeps_centres), and of `ulysses` all rows of
# this rank's heads, empty tensors in the other modes.
_KEPT = ("centres", "whole_q", "whole_k", "whole_v", "whole_out", "whole_lse")

_library = torch.library.Library("flashattn_ext", "FRAGMENT")
_library.define(
    f"distributed_forward({_TENSORS}, {_SETTINGS}) -> (Tensor out, Tensor lse, {', '.join(f'Tensor {n}' for n in _KEPT)})"
)
_library.define(
    f"distributed_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {', '.join(f'Tensor {n}' for n in _KEPT)}, "
    f"bool needs_dalibi_slopes, bool needs_drelative_bias, bool needs_dbias, {_TENSORS}, {_SETTINGS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dalibi_slopes, Tensor drelative_bias, Tensor dbias)"
)
distributed_forward = torch.ops.flashattn_ext.distributed_forward.default
distributed_backward = torch.ops.flashattn_ext.distributed_backward.default


def _common(tensors: Tensors, settings: Settings) -> dict[str, Any]:
    return {
        "extras": extras_of(tensors),
        "rng_state": tensors.rng_state,
        "options": options_of(settings),
        "sharding": sharding_of(settings),
        "documents": documents_of(tensors, settings),
        "group": group_of(settings),
    }


def _key_exchange(tensors: Tensors, settings: Settings) -> KeyExchange:
    common = _common(tensors, settings)
    return KeyExchange(tensors.q, tensors.k, tensors.v, ring=settings.mode == "ring", **common)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, settings = Tensors(*arguments[:10]), Settings(*arguments[10:])
    check(tensors, settings)
    if settings.mode == "ulysses":
        exchange = HeadExchange(shares=shares_of(tensors, settings), **_common(tensors, settings))
        return exchange.forward(tensors.q, tensors.k, tensors.v, settings.needs_lse, settings.keeps_centres)
    out, lse, centres = _key_exchange(tensors, settings).forward(settings.keeps_centres)
    return out, lse, centres, *(out.new_empty(0) for _ in _KEPT[1:])


def _backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (centres, *kept), needs, rest = arguments[:6], arguments[6:9], arguments[9:]
    tensors, settings = Tensors(*rest[:10]), Settings(*rest[10:])
    if settings.mode == "ulysses":
        exchange = HeadExchange(shares=shares_of(tensors, settings), **_common(tensors, settings))
        gradients = exchange.backward(dout, dlse, kept, centres if settings.keeps_centres else None, needs)
    else:
        gradients = _key_exchange(tensors, settings).backward(
            dout, dlse, out, lse, centres if settings.keeps_centres else None, needs
        )  # fmt: skip
    return _without_none(gradients, tensors.q)


def _without_none(gradients: Gradients, q: Tensor) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0) if gradient is None else gradient.contiguous() for gradient in gradients)


_library.impl("distributed_forward", _forward, "CompositeExplicitAutograd")
_library.impl("distributed_backward", _backward, "CompositeExplicitAutograd")


# --- shapes, for torch.compile ------------------------------------------------------------------------------------------


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, settings = Tensors(*arguments[:10]), Settings(*arguments[10:])
    q, k, v = tensors[:3]
    statistics = torch.promote_types(q.dtype, torch.float32)
    *batch, rows, heads, head_dim = q.shape
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*batch, heads, rows), dtype=statistics)
    if settings.mode != "ulysses":
        centres = lse.new_empty((*lse.shape, ops.CENTRES) if settings.keeps_centres else 0)
        return out, lse, centres, *(q.new_empty(0) for _ in _KEPT[1:])
    shares, whole = shares_of(tensors, settings), (*batch, settings.seqlen)
    keys = len(shares.repeated(0))  # as many on every rank
    return (
        out, lse if settings.needs_lse else lse.new_empty(0),
        lse.new_empty((*batch, shares.each, settings.seqlen, ops.CENTRES) if settings.keeps_centres else 0),
        q.new_empty((*whole, shares.each, head_dim)), k.new_empty((*whole, keys, head_dim)),
        v.new_empty((*whole, keys, v.shape[-1])), q.new_empty((*whole, shares.each, v.shape[-1])),
        q.new_empty((*batch, shares.each, settings.seqlen), dtype=statistics),
    )  # fmt: skip


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    needs, tensors = arguments[10:13], Tensors(*arguments[13:23])
    given = (tensors.sink, tensors.alibi_slopes, tensors.relative_bias, tensors.bias)
    wanted = (tensors.sink is not None, *needs)
    return tuple(
        tensors.q.new_empty(t.shape, dtype=t.dtype) if t is not None and needed else tensors.q.new_empty(0)
        for t, needed in zip((*tensors[:3], *given), (True, True, True, *wanted), strict=True)
    )


torch.library.register_fake("flashattn_ext::distributed_forward", _fake_forward, lib=_library)
torch.library.register_fake("flashattn_ext::distributed_backward", _fake_backward, lib=_library)


# --- autograd -----------------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    tensors, settings = Tensors(*inputs[:10]), Settings(*inputs[10:])
    ctx.settings = settings
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    if settings.mode == "ulysses":  # its backward reads what was exchanged; of the rest it wants no more than shapes
        tensors = tensors._replace(q=_shape_of(tensors.q), k=_shape_of(tensors.k), v=_shape_of(tensors.v))
        output = [_shape_of(output[0]), _shape_of(output[1]), *output[2:]]
    ctx.save_for_backward(*tensors, *output)


def _shape_of(t: Tensor) -> Tensor:
    """A tensor of that shape in the memory of one element."""
    return t.new_empty(()).expand(t.shape)


def _autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_kept: Any) -> tuple[Any, ...]:
    nothing = (None,) * len(Settings._fields)
    if dout is None and dlse is None:
        return (None,) * len(Tensors._fields) + nothing
    saved = ctx.saved_tensors
    tensors, output = Tensors(*saved[:10]), saved[10:]
    needed = Tensors(*ctx.needs_input_grad[:10])
    needs = needed.alibi_slopes, needed.relative_bias, needed.bias
    gradients = distributed_backward(dout, dlse, *output, *needs, *tensors, *ctx.settings)
    dq, dk, dv, dsink, *dbiases = gradients
    dbiases = [gradient if need else None for gradient, need in zip(dbiases, needs, strict=True)]
    return dq, dk, dv, None, None if tensors.sink is None else dsink, *dbiases, None, None, *nothing


torch.library.register_autograd(
    "flashattn_ext::distributed_forward", _autograd_backward, setup_context=_setup_context, lib=_library
)


def _no_double_backward(_ctx: Any, *_gradients: Any) -> Any:
    raise RuntimeError(
        "flashattn_ext.distributed has no double backward; use flashattn_ext.attention_reference (plain PyTorch, differentiable any "
        "number of times) on one device for second derivatives"
    )


torch.library.register_autograd("flashattn_ext::distributed_backward", _no_double_backward, lib=_library)
