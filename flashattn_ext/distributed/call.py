"""One call of attention over several ranks, in the form in which the ops receive it; and what must hold before anything is sent."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..autograd import CallOptions, CallTensors
from . import groups
from .agreement import agree
from .head_exchange import HeadShares
from .local import Extras
from .sharding import Sharding, check_length


class Tensors(NamedTuple):
    """The tensors of a call in the order of the ops' schemas; dense ones [B, rows of this rank, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None  # [n + 1], of the whole; on the CPU nothing waits for it
    sink: Tensor | None
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    bias: Tensor | None
    mask_intervals: Tensor | None
    rng_state: Tensor


class Settings(NamedTuple):
    """What a call says beside its tensors, in the order of the ops' schemas."""

    softmax_scale: float
    softcap: float
    causal: bool
    window_left: int
    window_right: int
    dropout_p: float
    smooth_softmax: bool
    deterministic: bool
    batch: int  # place of the call in a larger one
    head: int
    seqlen: int  # positions of the whole sequence
    sharding: str
    mode: str  # "ulysses", "allgather" or "ring"
    group: str
    needs_lse: bool
    keeps_centres: bool  # of rows, for the gradients of biases (autograd.py)


def group_of(settings: Settings) -> Any:
    return groups.named(settings.group)


def sharding_of(s: Settings) -> Sharding:
    return Sharding(s.seqlen, dist.get_world_size(group_of(s)), s.sharding)


def shares_of(tensors: Tensors, s: Settings) -> HeadShares:
    return HeadShares(tensors.q.shape[-2], tensors.k.shape[-2], dist.get_world_size(group_of(s)))


def options_of(s: Settings) -> CallOptions:
    return CallOptions(
        max_seqlen_q=0, max_seqlen_k=0, bhsd=False, softmax_scale=s.softmax_scale, softcap=s.softcap, causal=s.causal,
        window_left=s.window_left, window_right=s.window_right, dropout_p=s.dropout_p, smooth_softmax=s.smooth_softmax,
        deterministic=s.deterministic, origin=[s.batch, s.head],
    )  # fmt: skip


def extras_of(tensors: Tensors) -> Extras:
    return Extras(tensors.sink, tensors.alibi_slopes, tensors.relative_bias, tensors.bias, tensors.mask_intervals)


def documents_of(tensors: Tensors, s: Settings) -> tuple[int, ...] | None:
    """Where packed sequences begin, and the end of the last; None for a dense call."""
    if tensors.cu_seqlens is None:
        return None
    starts = tuple(tensors.cu_seqlens.tolist())
    if not starts or starts[0] != 0 or starts[-1] > s.seqlen or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"cu_seqlens: expected starts from 0 that do not decrease and end within the {s.seqlen} positions of the whole, got "
            f"{list(starts[:8])}{'...' * (len(starts) > 8)}"
        )
    return starts


# --- checks -------------------------------------------------------------------------------------------------------------


def check(tensors: Tensors, s: Settings) -> None:
    """Raises on all ranks what is wrong on one, and where ranks differ; compares them once for each kind of call."""
    agree(group_of(s), _description(tensors, s), lambda: _check_own(tensors, s))
    _check_lengths(tensors, s)


def _description(tensors: Tensors, s: Settings) -> dict[str, Any]:
    """What all ranks must have in common."""
    described: dict[str, Any] = s._asdict()
    del described["group"]
    for name, t in tensors._asdict().items():
        if t is None or name == "rng_state":
            continue
        shape = list(t.shape)
        if name == "cu_seqlens":
            shape = ["n"]  # another number with every batch
        elif name in ("q", "k", "v") and len(shape) > 2:
            shape[-3] = "rows"
        elif name == "bias" and len(shape) == 4 and shape[2] != 1:
            shape[2] = "rows"
        described[name] = f"a {t.device.type} tensor of {t.dtype} [{', '.join(map(str, shape))}]"
    return described


def _check_lengths(tensors: Tensors, s: Settings) -> None:
    of, rank = sharding_of(s), dist.get_rank(group_of(s))
    for name in ("q", "k", "v"):
        check_length(name, getattr(tensors, name).shape[-3], of, rank)


def _check_own(tensors: Tensors, s: Settings) -> None:
    rank_wanted = 4 if tensors.cu_seqlens is None else 3
    for name in ("q", "k", "v"):
        t: Tensor = getattr(tensors, name)
        if t.dim() != rank_wanted:
            shape = (
                "[batch, seqlen, heads, head_dim]" if rank_wanted == 4 else "[total, heads, head_dim] with cu_seqlens"
            )
            raise ValueError(f"{name}: expected {rank_wanted} dimensions {shape}, got shape {tuple(t.shape)}")
    _check_lengths(tensors, s)
    ranks, heads_q = dist.get_world_size(group_of(s)), tensors.q.shape[-2]
    _check_whole_call(tensors, s)
    if s.mode == "ulysses" and heads_q % ranks:
        raise ValueError(
            f"mode: 'ulysses' shares out the query heads, and {heads_q} do not divide by {ranks} ranks; use 'allgather' or 'ring'"
        )


def _check_whole_call(tensors: Tensors, s: Settings) -> None:
    """What the op of one device says to such a call of the whole sequence; nothing is computed."""

    def whole(name: str, rows_dim: int | None = None) -> Tensor | None:
        t = getattr(tensors, name)
        if t is None:
            return None
        shape = list(t.shape)
        if rows_dim is not None and (name != "bias" or (len(shape) == 4 and shape[2] != 1)):
            if name == "bias" and shape[2] != tensors.q.shape[-3]:
                raise ValueError(
                    f"bias: expected the {tensors.q.shape[-3]} rows of this rank, or 1, in dimension 2, got {shape[2]} in shape {shape}"
                )
            shape[rows_dim] = s.seqlen
        return torch.empty(shape, dtype=t.dtype, device="meta")

    for name, t in tensors._asdict().items():
        if t is not None and name != "cu_seqlens" and t.device != tensors.q.device:
            raise ValueError(f"{name}: expected the device of q ({tensors.q.device}), got {t.device}")
    if s.dropout_p >= 1:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {s.dropout_p}")
    starts, intervals = whole("cu_seqlens"), whole("mask_intervals")
    q, k, v = whole("q", -3), whole("k", -3), whole("v", -3)
    extremes = None if intervals is None else ops.mask_extremes(intervals)
    state = torch.empty(tensors.rng_state.shape, dtype=torch.int64, device="meta")
    call = CallTensors(
        q, k, v, starts, starts, whole("sink"), whole("alibi_slopes"), whole("relative_bias"), whole("bias", 2), intervals, extremes  # type: ignore[arg-type]
    )  # fmt: skip
    options = options_of(s)._replace(max_seqlen_q=s.seqlen, max_seqlen_k=s.seqlen)
    ops.pure_forward(*call, *options, state, False, [])
