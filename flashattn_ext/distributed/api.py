"""distributed.attention: attention over a sequence that is split over ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .. import api, arguments, ops
from ..autograd import CallOptions, CallTensors, keeps_centres
from ..mask import Mask
from . import groups
from .call import Settings, Tensors
from .exchange_ops import distributed_forward
from .groups import Group
from .head_exchange import HeadShares
from .sharding import Sharding, checked_kind

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("flashattn_ext.distributed")
_told: set[str] = set()

MODES = ("auto", "ulysses", "allgather", "ring")
# `auto` gathers keys and values up to so many bytes on a rank, and passes them round in a ring beyond.
GATHERED_BYTES = 4 * 2**30


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mode: str = ..., cu_seqlens: Tensor | None = ..., seqlen: int | None = ...,
    sharding: str = ..., layout: str = ..., return_lse: Literal[False] = ..., **options: Unpack[arguments.AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mode: str = ..., cu_seqlens: Tensor | None = ..., seqlen: int | None = ...,
    sharding: str = ..., layout: str = ..., return_lse: Literal[True], **options: Unpack[arguments.AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    mode: str = "auto",
    cu_seqlens: Tensor | None = None,
    seqlen: int | None = None,
    sharding: str = "zigzag",
    layout: str = "bshd",
    return_lse: bool = False,
    **options: Unpack[arguments.AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention over a sequence of which every rank has a part; differentiable. All ranks of the group call it.

    Results and gradients are those of flashattn_ext.forward (of varlen_forward with cu_seqlens) on the whole sequence, dropout with a
    given rng_seed included, bit for bit the same mask.

    Args:
        q: this rank's queries [B, s, Hq, D] (layout "bhsd": [B, Hq, s, D]; with cu_seqlens [s, Hq, D]), those that shard() gives it.
        k, v: keys [B, s, Hk, D] and values [B, s, Hk, Dv] of the same positions.
        group: the ranks that share the sequence: a process group, a DeviceMesh of one dimension, or None for all ranks.
        mode: who sends what. "ulysses": each rank gets all rows of some heads; Hq must divide by the ranks. "allgather": each rank
            gets the keys and values that its queries see. "ring": the same, one rank after the other, so that no rank ever has
            more than two parts of them. "auto" chooses, and logs why (logger "flashattn_ext.distributed").
        cu_seqlens: int32 [n + 1], where packed sequences begin in the whole, as in varlen_forward. On the CPU; elsewhere reading it waits
            for the device.
        seqlen: positions of the whole sequence. By default cu_seqlens[-1], else as many on every rank as on this one.
        sharding: "zigzag" or "contiguous", as shard() was given.
        layout: "bshd" or "bhsd", of q, k, v and the result.
        return_lse: also return lse [B, Hq, s] ([Hq, s] with cu_seqlens).
        options: those of flashattn_ext.forward, with the same meaning for the whole sequence. mask is a Mask of all keys, with rows
            counted in the whole (packed: in their sequence), the same on every rank; sink, alibi_slopes and relative_bias are the same
            on every rank; bias has this rank's rows and all keys: [B or 1, Hq or 1, s or 1, S]. origin may be (batch, head).

    Returns:
        out [B, s, Hq, Dv] of this rank's queries, in the layout and dtype of q, or (out, lse).
        The gradients of tensors that are the same on every rank (sink, alibi_slopes, relative_bias, a bias without rows) are this rank's
        share: their sum over the group is the gradient, as it is for the weights of a model, which DDP and FSDP add up.

    Raises:
        ValueError, TypeError, NotImplementedError: naming the argument. On every rank, the first time that a call has these shapes and
            options: then the ranks compare their calls, which waits for all of them.
        RuntimeError: torch.distributed is not initialised, or another rank has ended or is late.
    """
    pg = groups.resolved(group)
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    named: dict[str, Any] = {**options}
    rng_seed, bhsd = arguments.seed(named.pop("rng_seed", None)), arguments.is_bhsd(layout)
    arguments.optional_tensors(cu_seqlens=cu_seqlens)
    tensors, call_options = _call(q, k, v, named)
    _check_tangents(tensors)
    if bhsd and cu_seqlens is None:
        tensors = tensors._replace(
            q=tensors.q.transpose(1, 2), k=tensors.k.transpose(1, 2), v=tensors.v.transpose(1, 2)
        )
    of = Sharding(_length(tensors.q, cu_seqlens, seqlen, pg), dist.get_world_size(pg), checked_kind(sharding))
    mode = mode if mode != "auto" else _chosen(tensors, of)
    settings = Settings(
        softmax_scale=call_options.softmax_scale, softcap=call_options.softcap, causal=call_options.causal,
        window_left=call_options.window_left, window_right=call_options.window_right, dropout_p=call_options.dropout_p,
        smooth_softmax=call_options.smooth_softmax, deterministic=call_options.deterministic,
        batch=_place(call_options)[0], head=_place(call_options)[1], seqlen=of.seqlen, sharding=of.kind, mode=mode,
        group=groups.name_of(pg), needs_lse=arguments.flag("return_lse", return_lse), keeps_centres=keeps_centres(tensors),
    )  # fmt: skip
    given = Tensors(
        tensors.q, tensors.k, tensors.v, cu_seqlens, tensors.sink, tensors.alibi_slopes, tensors.relative_bias, tensors.bias,
        tensors.mask_intervals, _rng_state(tensors.q, call_options.dropout_p, rng_seed),
    )  # fmt: skip
    out, lse, *_ = distributed_forward(*given, *settings)
    if bhsd and cu_seqlens is None:
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[CallTensors, CallOptions]:
    """The arguments in the form of autograd.py, after its checks of types; unknown names raise."""
    named = {name: options.pop(name, None) for name in ("sink", "alibi_slopes", "relative_bias", "bias")}
    mask: Mask | None = options.pop("mask", None)
    tensors = api._autocast(api._tensors(q, k, v, None, None, **named, mask=mask))
    numbers: dict[str, Any] = {
        "causal": False, "window_size": (-1, -1), "softmax_scale": None, "softcap": 0.0, "dropout_p": 0.0,
        "smooth_softmax": False, "deterministic": False, "origin": None,
    }  # fmt: skip
    for name in options:
        if name not in numbers:
            raise TypeError(
                f"attention() got an unexpected keyword argument {name!r}; accepted are {', '.join([*numbers, *named])}"
            )
    return tensors, api._options(q, layout="bshd", **{**numbers, **options})


def _check_tangents(tensors: CallTensors) -> None:
    """Forward-mode derivatives, which torch.library's autograd would lose in silence."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "flashattn_ext.distributed has no forward-mode derivatives (jvp); use flashattn_ext.attention_reference (plain PyTorch) on one device"
        )


def _place(options: CallOptions) -> tuple[int, int]:
    origin = options.origin or [0, 0]
    if len(origin) != 2:
        raise ValueError(
            f"origin: expected None or (batch, head) for a sequence that is split over ranks, got {tuple(origin)}; rows and keys are "
            "placed by the sharding"
        )
    return origin[0], origin[1]


def _length(q: Tensor, cu_seqlens: Tensor | None, seqlen: int | None, group: Any) -> int:
    if seqlen is not None:
        return arguments.integer("seqlen", seqlen)
    if cu_seqlens is not None and cu_seqlens.numel():
        return int(cu_seqlens[-1])
    return int(q.shape[0 if q.dim() == 3 else 1]) * dist.get_world_size(group)


def _rng_state(q: Tensor, dropout_p: float, rng_seed: int | None) -> Tensor:
    """{seed, offset} of the dropout mask; empty where nothing is dropped."""
    state = ops.dropout_state(q, dropout_p, rng_seed)
    return torch.empty(0, dtype=torch.int64, device=q.device) if state is None else state


def _chosen(tensors: CallTensors, of: Sharding) -> str:
    """The exchange that `auto` means, the same on every rank: it depends on nothing but sizes that all ranks share."""
    heads_q, heads_k, ranks = tensors.q.shape[-2], tensors.k.shape[-2], of.ranks
    widths = tensors.k.shape[-1] + tensors.v.shape[-1]
    batch = tensors.q.shape[0] if tensors.q.dim() == 4 else 1
    gathered = batch * of.seqlen * heads_k * widths * tensors.k.element_size()
    if heads_k and heads_q % ranks == 0 and heads_q % heads_k == 0:
        repeated = len(HeadShares(heads_q, heads_k, ranks).keys(0)) * ranks
        mode, why = (
            "ulysses",
            f"{heads_q} query heads divide by {ranks} ranks; each gets {repeated // ranks} of {heads_k} key heads",
        )
    elif gathered <= GATHERED_BYTES:
        mode, why = (
            "allgather",
            f"{heads_q} query heads do not divide by {ranks} ranks, and all keys and values are {gathered:,} bytes",
        )
    else:
        mode, why = (
            "ring",
            f"all keys and values would be {gathered:,} bytes on every rank, more than {GATHERED_BYTES:,}",
        )
    if not torch.compiler.is_compiling():
        text = f"mode 'auto' is {mode!r}: {why}"
        if text not in _told:
            _told.add(text)
            _log.info(text)
    return mode
