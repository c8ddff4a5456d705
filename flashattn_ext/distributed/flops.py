"""FLOP formulas of the ops over ranks, for torch.utils.flop_counter: a rank counts its share of the FLOPs of the whole call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .. import flops
from ..options import CallTensors
from .call import Settings, Tensors, call_of, group_of, options_of, starts_of_keys
from .exchange_ops import distributed_backward, distributed_forward

_FORWARD, _BACKWARD = distributed_forward.overloadpacket, distributed_backward.overloadpacket


def _whole_call(tensors: Tensors, settings: Settings) -> tuple[Any, ...]:
    """The arguments that the single-device ops have in common, for the whole sequence, as tensors without values."""

    def whole(t: Tensor, seqlen: int) -> Tensor:
        shape = list(t.shape)
        shape[-3] = seqlen
        return torch.empty(shape, dtype=t.dtype, device="meta")

    q, k, v = whole(tensors.q, settings.seqlen), *(whole(t, settings.seqlen_k) for t in (tensors.k, tensors.v))
    starts_q, starts_k = tensors.cu_seqlens, starts_of_keys(tensors)
    call = CallTensors(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, mask_intervals=tensors.mask_intervals)
    return *call, *options_of(settings)._replace(max_seqlen_q=settings.seqlen, max_seqlen_k=settings.seqlen_k)


def _flops(arguments: tuple[Any, ...], counted: int) -> int:
    tensors, settings = call_of(arguments)
    names = [a.name for a in torch.ops.flashattn_ext.forward.default._schema.arguments]
    call = _whole_call(tensors, settings)
    rest = [None] * (len(names) - len(call))
    pairs = flops.Call(torch.ops.flashattn_ext.forward.default, (*call, *rest)).pairs()
    of_q, of_v = (1, 1) if counted == 2 else (3, 2)
    width = of_q * tensors.q.shape[-1] + of_v * tensors.v.shape[-1]
    return int(2 * pairs * width) // dist.get_world_size(group_of(settings))


def _forward_flops(*arguments: Any, out_val: Any = None) -> int:
    return _flops(arguments, 2)


def _backward_flops(*arguments: Any, out_val: Any = None) -> int:
    return _flops(arguments, 5)


for _op, _formula in ((_FORWARD, _forward_flops), (_BACKWARD, _backward_flops)):
    if _op not in flop_registry:
        register_flop_formula(_op, get_raw=True)(_formula)
