"""The two ops that autograd, torch.compile and checkpointing see: the forward and the backward of a whole exchange, one node each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..options import BIASES, DIFFERENTIABLE, LEARNED, wanted
from .call import (
    SETTING_TYPES,
    TENSOR_TYPES,
    Settings,
    Tensors,
    call_of,
    check,
    extras_of,
    group_of,
    options_of,
    shares_of,
    sides_of,
)
from .communication import guarded
from .head_exchange import HeadExchange
from .key_exchange import KeyExchange
from .local import Gradients

_CALL = ", ".join(f"{kind} {name}" for name, kind in (TENSOR_TYPES | SETTING_TYPES).items())
# Further results that the backward reads: the centres of rows (empty unless keeps_centres), and in mode `ulysses` the exchanged q, k, v,
# out and lse with all rows of this rank's heads (empty in the other modes).
_KEPT = ("centres", "whole_q", "whole_k", "whole_v", "whole_out", "whole_lse")

_library = torch.library.Library("flashattn_ext", "FRAGMENT")
_KEPT_TENSORS = ", ".join(f"Tensor {name}" for name in _KEPT)
_NEEDS = ", ".join(f"bool needs_d{name}" for name in BIASES)
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in DIFFERENTIABLE)
_library.define(f"distributed_forward({_CALL}) -> (Tensor out, Tensor lse, {_KEPT_TENSORS}, Tensor max_logits)")
_library.define(
    f"distributed_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_KEPT_TENSORS}, {_NEEDS}, {_CALL}) -> ({_GRADIENTS})"
)
distributed_forward = torch.ops.flashattn_ext.distributed_forward.default
distributed_backward = torch.ops.flashattn_ext.distributed_backward.default


def needs_of(arguments: Sequence[Any]) -> Sequence[bool]:
    """For each of BIASES whether its gradient is needed: the arguments of the backward before those of the call."""
    last = len(arguments) - len(TENSOR_TYPES) - len(SETTING_TYPES)
    return arguments[last - len(BIASES) : last]


def _common(tensors: Tensors, settings: Settings) -> dict[str, Any]:
    return {
        "extras": extras_of(tensors),
        "rng_state": tensors.rng_state,
        "options": options_of(settings),
        **sides_of(tensors, settings)._asdict(),
        "is_packed": tensors.cu_seqlens is not None,
        "group": group_of(settings),
    }


def _key_exchange(tensors: Tensors, settings: Settings) -> KeyExchange:
    common = _common(tensors, settings)
    return KeyExchange(
        tensors.q, tensors.k, tensors.v, ring=settings.mode == "ring", returns_max_logits=settings.returns_max_logits, **common
    )  # fmt: skip


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, settings = call_of(arguments)
    check(tensors, settings)
    if settings.mode == "ulysses":
        exchange = HeadExchange(shares=shares_of(tensors, settings), **_common(tensors, settings))
        *results, max_logits = exchange.forward(
            tensors.q, tensors.k, tensors.v, settings.needs_lse, settings.keeps_centres, settings.returns_max_logits
        )
    else:
        out, lse, centres, max_logits = _key_exchange(tensors, settings).forward(settings.keeps_centres)
        results = [out, lse, centres, *(out.new_empty(0) for _ in _KEPT[1:])]
    if settings.returns_max_logits:
        group = group_of(settings)
        with guarded(group, "the largest logits"):
            dist.all_reduce(max_logits, dist.ReduceOp.MAX, group=group)
    return *results, max_logits


def _backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors, settings = call_of(arguments)
    (centres, *kept), needs = arguments[: len(_KEPT)], needs_of(arguments)
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
    tensors, settings = call_of(arguments)
    q, k, v = tensors[:3]
    statistics = torch.promote_types(q.dtype, torch.float32)
    *batch, rows, heads, head_dim = q.shape
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*batch, heads, rows), dtype=statistics)
    sequences = q.shape[0] if tensors.cu_seqlens is None else tensors.cu_seqlens.shape[0] - 1
    max_logits = q.new_empty((sequences, heads) if settings.returns_max_logits else 0, dtype=torch.float32)
    if settings.mode != "ulysses":
        centres = lse.new_empty((*lse.shape, ops.CENTRES) if settings.keeps_centres else 0)
        return out, lse, centres, *(q.new_empty(0) for _ in _KEPT[1:]), max_logits
    shares, whole = shares_of(tensors, settings), (*batch, settings.seqlen)
    keys = len(shares.repeated(0))  # every rank has as many
    return (
        out, lse if settings.needs_lse else lse.new_empty(0),
        lse.new_empty((*batch, shares.each, settings.seqlen, ops.CENTRES) if settings.keeps_centres else 0),
        q.new_empty((*whole, shares.each, head_dim)), k.new_empty((*batch, settings.seqlen_k, keys, head_dim)),
        v.new_empty((*batch, settings.seqlen_k, keys, v.shape[-1])), q.new_empty((*whole, shares.each, v.shape[-1])),
        q.new_empty((*batch, shares.each, settings.seqlen), dtype=statistics), max_logits,
    )  # fmt: skip


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, _ = call_of(arguments)
    is_wanted = [True, True, True, *wanted(tensors, needs_of(arguments))]
    return tuple(
        torch.empty_like(getattr(tensors, name), memory_format=torch.contiguous_format)
        if each
        else tensors.q.new_empty(0)
        for name, each in zip(DIFFERENTIABLE, is_wanted, strict=True)
    )


torch.library.register_fake("flashattn_ext::distributed_forward", _fake_forward, lib=_library)
torch.library.register_fake("flashattn_ext::distributed_backward", _fake_backward, lib=_library)


# --- autograd -----------------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    tensors, settings = call_of(inputs)
    ctx.settings = settings
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    output = output[:-1]  # the backward does not read the largest logits
    if settings.mode == "ulysses":  # its backward reads the exchanged tensors, and only the shapes of the others
        tensors = tensors._replace(q=_shape_of(tensors.q), k=_shape_of(tensors.k), v=_shape_of(tensors.v))
        output = [_shape_of(output[0]), _shape_of(output[1]), *output[2:]]
    ctx.save_for_backward(*tensors, *output)


def _shape_of(t: Tensor) -> Tensor:
    """A tensor of the same shape that takes the memory of one element."""
    return t.new_empty(()).expand(t.shape)


def _autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_kept: Any) -> tuple[Any, ...]:
    results: dict[str, Tensor | None] = dict.fromkeys((*Tensors._fields, *Settings._fields))
    if dout is not None or dlse is not None:
        saved = ctx.saved_tensors
        tensors, output = Tensors(*saved[: len(TENSOR_TYPES)]), saved[len(TENSOR_TYPES) :]
        needed = dict(zip(Tensors._fields, ctx.needs_input_grad, strict=False))
        needs = [needed[name] for name in BIASES]
        dq, dk, dv, *others = distributed_backward(dout, dlse, *output, *needs, *tensors, *ctx.settings)
        results |= {"q": dq, "k": dk, "v": dv}
        for name, gradient, each in zip(LEARNED, others, wanted(tensors, needs), strict=True):
            results[name] = gradient if each else None
    return tuple(results.values())


torch.library.register_autograd(
    "flashattn_ext::distributed_forward", _autograd_backward, setup_context=_setup_context, lib=_library
)


def _no_double_backward(_ctx: Any, *_gradients: Any) -> Any:
    raise RuntimeError(
        "flashattn_ext.distributed has no double backward; use flashattn_ext.attention_reference (plain PyTorch, differentiable any "
        "number of times) on one device for second derivatives"
    )


torch.library.register_autograd("flashattn_ext::distributed_backward", _no_double_backward, lib=_library)
