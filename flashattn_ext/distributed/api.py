"""distributed.attention: attention over a sequence that is split over ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .. import arguments, calls, names, ops
from ..options import AttentionOptions, CallOptions, CallTensors, keeps_centres
from . import groups
from .call import Settings, Tensors, check
from .exchange_ops import distributed_forward
from .groups import Group
from .head_exchange import HeadShares
from .local import EXTRAS, OF_FP8, RULES
from .sharding import checked_kind, checked_length

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("flashattn_ext.distributed")
_told: set[str] = set()

MODES = ("auto", "ulysses", "allgather", "ring")
# `auto` gathers keys and values up to this size on a rank, and uses the ring for more.
GATHERED_BYTES = 4 * 2**30


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mode: str = ..., cu_seqlens: Tensor | None = ..., seqlen: int | None = ...,
    cu_seqlens_k: Tensor | None = ..., seqlen_k: int | None = ..., sharding: str = ..., layout: str = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mode: str = ..., cu_seqlens: Tensor | None = ..., seqlen: int | None = ...,
    cu_seqlens_k: Tensor | None = ..., seqlen_k: int | None = ..., sharding: str = ..., layout: str = ..., return_lse: Literal[True], return_max_logits: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mode: str = ..., cu_seqlens: Tensor | None = ..., seqlen: int | None = ...,
    cu_seqlens_k: Tensor | None = ..., seqlen_k: int | None = ..., sharding: str = ..., layout: str = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mode: str = ..., cu_seqlens: Tensor | None = ..., seqlen: int | None = ...,
    cu_seqlens_k: Tensor | None = ..., seqlen_k: int | None = ..., sharding: str = ..., layout: str = ..., return_lse: Literal[True], return_max_logits: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = ..., mode: str = ..., cu_seqlens: Tensor | None = ..., seqlen: int | None = ...,
    cu_seqlens_k: Tensor | None = ..., seqlen_k: int | None = ..., sharding: str = ..., layout: str = ..., return_lse: bool = ..., return_max_logits: bool = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@calls.lists(AttentionOptions)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
    group: Group = None,
    mode: str = "auto",
    cu_seqlens: Tensor | None = None,
    seqlen: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlen_k: int | None = None,
    sharding: str = "zigzag",
    layout: str = "bshd",
    return_lse: bool = False,
    return_max_logits: bool = False,
    rng_seed: int | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Attention over a sequence that is split over ranks; differentiable. All ranks of the group must call it.

    Results and gradients equal flashattn_ext.forward (varlen_forward with cu_seqlens) on the whole sequence. With a given rng_seed the
    dropout mask is the same, bit for bit.

    Self-attention, or cross attention to keys of another sequence, of any length: both sequences are split in the same way, each over
    all ranks, and causal and windows are aligned at the last row and key of the whole, as in forward. Keys that every rank has as a
    whole need no exchange: call forward() on the rank's queries there.

    The other arguments are those of forward. They mean the same, for the whole sequence: mask is a Mask of all keys, with rows counted in
    the whole (packed: in their sequence), the same on every rank; sink, alibi_slopes and relative_bias are the same on every rank; bias
    has this rank's rows and all keys: [B or 1, Hq or 1, s or 1, Sk]. origin may be (batch, head).

    Args:
        q: this rank's queries [B, s, Hq, D] (layout "bhsd": [B, Hq, s, D]; with cu_seqlens [s, Hq, D]), as shard() splits them.
        k: this rank's keys [B, sk, Hk, D], as shard() splits them: in self-attention those of the same positions.
        v: this rank's values [B, sk, Hk, Dv], of the positions of k.
        group: the ranks that share the sequence: a process group, a DeviceMesh of one dimension, or None for all ranks.
        mode: what the ranks exchange. "ulysses": each rank gets all rows of some heads; Hq must be divisible by the number of
            ranks. "allgather": each rank gets the keys and values that its queries see, all at once. "ring": the same, from one
            rank after the other, so that no rank ever holds more than two parts of them. "auto" chooses and logs the reason (logger
            "flashattn_ext.distributed").
        cu_seqlens: int32 [n + 1], where packed sequences begin in the whole, as in varlen_forward. Best on the CPU: reading it from another
            device synchronises with that device.
        seqlen: number of positions of the whole sequence of queries. By default cu_seqlens[-1], or s times the number of ranks.
        cu_seqlens_k: int32 [n + 1], where the keys of the packed sequences begin, in cross attention; None: where the queries do.
        seqlen_k: number of positions of the whole sequence of keys. By default cu_seqlens_k[-1], or seqlen: cross attention needs one of them.
        sharding: "zigzag" or "contiguous", as passed to shard().
        layout: "bshd" or "bhsd", of q, k, v and the result.
        return_lse: also return lse [B, Hq, s] ([Hq, s] with cu_seqlens).
        return_max_logits: also return the largest logit of each head in the whole sequence, the same on every rank: float32 [B, Hq]
            ([n, Hq] with cu_seqlens), as in forward.

    Returns:
        out [B, s, Hq, Dv] of this rank's queries, in the layout and dtype of q, then lse and max_logits if requested.
        The gradients of tensors that are the same on every rank (sink, alibi_slopes, relative_bias, a bias with one row for all) are
        partial: their sum over the group is the gradient. DDP and FSDP reduce them like the gradients of other parameters.

    Raises:
        ValueError: a shape or a value is not as described, or differs between ranks. It is raised on every rank: the first call with given
            shapes and options compares the calls of all ranks, which synchronises them. The values of tensors are compared only with
            FLASHATTN_EXT_DISTRIBUTED_CHECK=1 in the environment, and then at every call.
        TypeError: a type or a dtype is not as described, on any rank.
        NotImplementedError: as in flashattn_ext.forward, on any rank; forward-mode derivatives; float8_e4m3fn; invariant=True.
        RuntimeError: torch.distributed is not initialised, or another rank has ended or did not join in time.

    Source: the exchange of heads is DeepSpeed Ulysses (Jacobs et al. 2023), the ring is Ring Attention (Liu et al. 2023).
    """
    if more:
        raise names.not_an_argument("attention", {}, more)
    pg = groups.resolved(group)
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    rng_seed, bhsd = arguments.seed(rng_seed), arguments.is_bhsd(layout)
    arguments.optional_tensors(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_k is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens: expected the starts of the packed queries beside cu_seqlens_k, got None")
    tensors, call_options = calls.convert("attention", q, k, v, calls.DENSE, "bshd", **options)
    tensors = calls.autocast(tensors)
    _check_tangents(tensors)
    _check_options(tensors, call_options)
    if bhsd and cu_seqlens is None:
        tensors = tensors._replace(
            q=tensors.q.transpose(1, 2), k=tensors.k.transpose(1, 2), v=tensors.v.transpose(1, 2)
        )
    kind, ranks = checked_kind(sharding), dist.get_world_size(pg)
    seqlen = _length("seqlen", seqlen, cu_seqlens, _rows(tensors.q) * ranks)
    # Not from the number of keys on this rank: ranks would take different lengths where parts are not equally long.
    seqlen_k = _length("seqlen_k", seqlen_k, cu_seqlens_k, seqlen)
    mode = mode if mode != "auto" else _chosen(tensors, seqlen_k, ranks)
    batch, head = _first_batch_and_head(call_options)
    needs_lse, returns_max_logits = (
        arguments.flag(name, value)
        for name, value in (("return_lse", return_lse), ("return_max_logits", return_max_logits))
    )
    # Centres for 16 bits only: with them a packed fp64 ring with dropout and slopes raised on one rank.
    settings = Settings(
        **{option.name: getattr(call_options, option.name) for option in RULES}, batch=batch, head=head, seqlen=seqlen,
        seqlen_k=seqlen_k, sharding=kind, mode=mode, group=groups.name_of(pg), needs_lse=needs_lse,
        keeps_centres=q.dtype.itemsize == 2 and keeps_centres(tensors, lambda bias: bias.requires_grad), returns_max_logits=returns_max_logits,
    )  # fmt: skip
    given = Tensors(
        tensors.q, tensors.k, tensors.v, cu_seqlens, cu_seqlens_k, *(getattr(tensors, option.name) for option in EXTRAS),
        tensors.q.new_empty(2, dtype=torch.int64),
    )  # fmt: skip
    if not torch.compiler.is_compiling() and call_options.dropout_p > 0:  # a call that is refused draws no seed
        check(given, settings)
    given = given._replace(rng_state=_rng_state(tensors.q, call_options.dropout_p, rng_seed))
    out, lse, *_, max_logits = distributed_forward(*given, *settings)
    if bhsd and cu_seqlens is None:
        out = out.transpose(1, 2)
    return calls.results(out, lse, max_logits, needs_lse, returns_max_logits)


def _check_tangents(tensors: CallTensors) -> None:
    """Refuses forward-mode derivatives, which torch.library's autograd would silently drop."""
    if any(t is not None and arguments.has_tangent(t) for t in tensors):
        raise NotImplementedError(
            "flashattn_ext.distributed has no forward-mode derivatives (jvp); use flashattn_ext.attention_reference (plain PyTorch) on one device"
        )


def _check_options(tensors: CallTensors, options: CallOptions) -> None:
    given = [name for name in OF_FP8 if getattr(options if name == "out_dtype" else tensors, name) is not None]
    if given or any(t.dtype == torch.float8_e4m3fn for t in tensors[:3]):
        raise NotImplementedError(
            f"{(*given, 'q')[0]}: float8_e4m3fn is not implemented in flashattn_ext.distributed; convert q, k and v to bfloat16"
        )
    if tensors.mask_lists is not None:
        raise NotImplementedError(
            "mask: a BlockMask is not implemented in flashattn_ext.distributed; use a Mask, whose keys have an interval of rows each"
        )
    if options.invariant:
        raise NotImplementedError(
            "invariant: expected False in flashattn_ext.distributed, got True: the partial results of ranks are added in an order that depends "
            "on the number of ranks; leave it out"
        )


def _first_batch_and_head(options: CallOptions) -> tuple[int, int]:
    origin = options.origin or [0, 0]
    if len(origin) != 2:
        raise ValueError(
            f"origin: expected None or (batch, head) for a sequence that is split over ranks, got {tuple(origin)}; rows and keys are "
            "placed by the sharding"
        )
    return origin[0], origin[1]


def _rows(t: Tensor) -> int:
    return int(t.shape[0 if t.dim() == 3 else 1])


def _length(name: str, given: int | None, cu_seqlens: Tensor | None, otherwise: int) -> int:
    if given is not None:
        return checked_length(name, given)
    if cu_seqlens is not None and cu_seqlens.numel():
        return int(cu_seqlens[-1])
    return otherwise


def _rng_state(q: Tensor, dropout_p: float, rng_seed: int | None) -> Tensor:
    """{seed, offset} of the dropout mask; empty where nothing is dropped."""
    state = ops.dropout_state(q, dropout_p, rng_seed)
    return torch.empty(0, dtype=torch.int64, device=q.device) if state is None else state


def _chosen(tensors: CallTensors, seqlen_k: int, ranks: int) -> str:
    """The mode that `auto` stands for. It depends only on sizes that are equal on all ranks, so that all ranks choose the same."""
    heads_q, heads_k = tensors.q.shape[-2], tensors.k.shape[-2]
    widths = tensors.k.shape[-1] + tensors.v.shape[-1]
    batch = tensors.q.shape[0] if tensors.q.dim() == 4 else 1
    gathered = batch * seqlen_k * heads_k * widths * tensors.k.element_size()
    if heads_k and heads_q % ranks == 0 and heads_q % heads_k == 0:
        repeated = len(HeadShares(heads_q, heads_k, ranks).keys(0)) * ranks
        mode, why = (
            "ulysses",
            f"{heads_q} query heads are divisible by {ranks} ranks; each rank gets {repeated // ranks} of {heads_k} KV heads",
        )
    elif gathered <= GATHERED_BYTES:
        mode, why = (
            "allgather",
            f"{heads_q} query heads are not divisible by {ranks} ranks, and all keys and values take {gathered:,} bytes",
        )
    else:
        mode, why = (
            "ring",
            f"all keys and values would take {gathered:,} bytes on every rank, more than {GATHERED_BYTES:,}",
        )
    if not torch.compiler.is_compiling():
        text = f"mode 'auto' is {mode!r}: {why}"
        if text not in _told:
            _told.add(text)
            _log.info(text)
    return mode
