"""One call of attention over several ranks, in the form that the ops take, and its checks before any communication."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..options import CallOptions, CallTensors
from . import groups
from .agreement import agree
from .head_exchange import HeadShares
from .local import EXTRAS, RULES, Extras
from .plan import Side
from .sharding import Sharding, check_length

if TYPE_CHECKING:
    from ..options import Record


# The arguments of the ops over ranks and their types: dense tensors are [B, rows of this rank, heads, head_dim].
TENSOR_TYPES = {
    "q": "Tensor",
    "k": "Tensor",
    "v": "Tensor",
    "cu_seqlens": "Tensor?",  # [n + 1], for the whole sequence; on the CPU, reading it does not synchronise
    "cu_seqlens_k": "Tensor?",  # those of the keys; None if they are those of the queries
    **{option.name: option.type for option in EXTRAS},
    "rng_state": "Tensor",
}
SETTING_TYPES = {
    **{option.name: "float" if option.type == "Scalar" else option.type for option in RULES},
    "batch": "SymInt",  # place of the call in a larger one
    "head": "SymInt",
    "seqlen": "SymInt",  # positions of the whole sequence of queries
    "seqlen_k": "SymInt",  # and of the whole sequence of keys
    "sharding": "str",
    "mode": "str",  # "ulysses", "allgather" or "ring"
    "group": "str",
    "needs_lse": "bool",
    "keeps_centres": "bool",  # whether forward returns the centres of rows, for the gradients of biases (options.py)
    "returns_max_logits": "bool",
}

if TYPE_CHECKING:

    class Tensors(Record):
        q: Tensor
        k: Tensor
        v: Tensor
        rng_state: Tensor

    class Settings(Record): ...

else:
    Tensors = namedtuple("Tensors", TENSOR_TYPES)
    Tensors.__doc__ = "The tensors of a call in the order of the ops' schemas."
    Settings = namedtuple("Settings", SETTING_TYPES)
    Settings.__doc__ = "The arguments of a call that are not tensors, in the order of the ops' schemas."


def call_of(arguments: Sequence[Any]) -> tuple[Tensors, Settings]:
    """The last arguments of an op over ranks."""
    tensors, settings = len(TENSOR_TYPES), len(SETTING_TYPES)
    first = len(arguments) - tensors - settings
    return Tensors(*arguments[first : first + tensors]), Settings(*arguments[first + tensors :])


def group_of(settings: Settings) -> Any:
    return groups.named(settings.group)


def sharding_of(s: Settings) -> Sharding:
    """How the queries are split."""
    return Sharding(s.seqlen, dist.get_world_size(group_of(s)), s.sharding)


def sharding_of_keys(s: Settings) -> Sharding:
    return replace(sharding_of(s), seqlen=s.seqlen_k)


def shares_of(tensors: Tensors, s: Settings) -> HeadShares:
    return HeadShares(tensors.q.shape[-2], tensors.k.shape[-2], dist.get_world_size(group_of(s)))


def options_of(s: Settings) -> CallOptions:
    return CallOptions()._replace(
        **{option.name: getattr(s, option.name) for option in RULES}, origin=[s.batch, s.head]
    )


def extras_of(tensors: Tensors) -> Extras:
    return Extras(*(getattr(tensors, option.name) for option in EXTRAS))


class Sides(NamedTuple):
    queries: Side
    keys: Side


def sides_of(tensors: Tensors, s: Settings) -> Sides:
    """Where the queries and the keys of the whole call are."""
    of, of_keys = sharding_of(s), sharding_of_keys(s)
    if tensors.cu_seqlens is None:
        return Sides(Side(of, (0, of.seqlen)), Side(of_keys, (0, of_keys.seqlen)))
    queries = _documents("cu_seqlens", tensors.cu_seqlens, of)
    if tensors.cu_seqlens_k is None:
        return Sides(Side(of, queries), Side(of_keys, _documents("cu_seqlens", tensors.cu_seqlens, of_keys)))
    keys = _documents("cu_seqlens_k", tensors.cu_seqlens_k, of_keys)
    if len(keys) != len(queries):
        raise ValueError(
            f"cu_seqlens_k: expected the length of cu_seqlens ({len(queries)}), got {len(keys)}; a sequence without keys is an empty one"
        )
    return Sides(Side(of, queries), Side(of_keys, keys))


def starts_of_keys(tensors: Tensors) -> Tensor | None:
    """cu_seqlens of the keys, None for a dense call."""
    starts: Tensor | None = tensors.cu_seqlens if tensors.cu_seqlens_k is None else tensors.cu_seqlens_k
    return starts


def _documents(name: str, cu_seqlens: Tensor, of: Sharding) -> tuple[int, ...]:
    """The start of each packed sequence, then the end of the last."""
    starts = tuple(cu_seqlens.tolist())
    if not starts or starts[0] != 0 or starts[-1] > of.seqlen or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"{name}: expected starts from 0 that do not decrease and end within the {of.seqlen} positions of the whole, got "
            f"{list(starts[:8])}{'...' * (len(starts) > 8)}"
        )
    return starts


# --- checks -------------------------------------------------------------------------------------------------------------


def check(tensors: Tensors, s: Settings) -> None:
    """Raises on every rank if one rank's call is wrong or the calls differ; checked once for each signature (agreement.py)."""
    agree(group_of(s), _description(tensors, s), _contents(tensors, s), lambda: _check_own(tensors, s))
    _check_lengths(tensors, s)


def _description(tensors: Tensors, s: Settings) -> dict[str, Any]:
    """The names and values that must be the same on all ranks."""
    described: dict[str, Any] = s._asdict()
    del described["group"]
    for name, t in tensors._asdict().items():
        if t is None or name == "rng_state":
            continue
        shape = list(t.shape)
        if name in ("cu_seqlens", "cu_seqlens_k"):
            shape = ["n"]  # the number of sequences changes with every batch
        elif name in ("q", "k", "v") and len(shape) > 2:
            shape[-3] = "rows" if name == "q" else "keys"
        elif name == "bias" and len(shape) == 4 and 1 in sharding_of(s).lengths():
            shape[2] = (
                "rows or 1"  # a rank with one query cannot tell the two apart; HeadExchange compares with the other ranks
            )
        elif name == "bias" and len(shape) == 4 and shape[2] != 1:
            shape[2] = "rows"
        described[name] = f"a {t.device.type} tensor of {t.dtype} [{', '.join(map(str, shape))}]"
    return described


def _contents(tensors: Tensors, s: Settings) -> dict[str, Tensor]:
    """The tensors whose values must be the same on all ranks. A bias with one row for each query is not among them."""
    names = ("cu_seqlens", "cu_seqlens_k", *(option.name for option in EXTRAS if option.name != "bias"))
    shared = {name: getattr(tensors, name) for name in names}
    bias = tensors.bias
    if bias is not None and bias.dim() == 4 and bias.shape[2] == 1 and 1 not in sharding_of(s).lengths():
        shared["bias"] = bias
    return {name: t for name, t in shared.items() if t is not None}


def _check_lengths(tensors: Tensors, s: Settings) -> None:
    of_keys, rank = sharding_of_keys(s), dist.get_rank(group_of(s))
    check_length("q", tensors.q.shape[-3], sharding_of(s), rank)
    check_length("k", tensors.k.shape[-3], of_keys, rank)
    check_length("v", tensors.v.shape[-3], of_keys, rank)


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
            f"mode: 'ulysses' needs a number of query heads divisible by the {ranks} ranks, got {heads_q}; use 'allgather' or 'ring'"
        )


def _check_whole_call(tensors: Tensors, s: Settings) -> None:
    """Runs the checks of the single-device op on a call with the whole sequence, on the meta device."""

    def whole(name: str, rows_dim: int | None = None, rows: int = s.seqlen) -> Tensor | None:
        t = getattr(tensors, name)
        if t is None:
            return None
        shape = list(t.shape)
        if rows_dim is not None and (name != "bias" or (len(shape) == 4 and shape[2] != 1)):
            if name == "bias" and shape[2] != tensors.q.shape[-3]:
                raise ValueError(
                    f"bias: expected the {tensors.q.shape[-3]} rows of this rank, or 1, in dimension 2, got {shape[2]} in shape {shape}"
                )
            shape[rows_dim] = rows
        return torch.empty(shape, dtype=t.dtype, device="meta")

    for name, t in tensors._asdict().items():
        if t is not None and not name.startswith("cu_seqlens") and t.device != tensors.q.device:
            raise ValueError(f"{name}: expected the device of q ({tensors.q.device}), got {t.device}")
    if s.dropout_p >= 1:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {s.dropout_p}")
    starts = whole("cu_seqlens")
    starts_k = starts if tensors.cu_seqlens_k is None else whole("cu_seqlens_k")
    extras = {option.name: whole(option.name, 2 if option.name == "bias" else None) for option in EXTRAS}
    intervals = extras["mask_intervals"]
    extremes = None if intervals is None else ops.mask_extremes(intervals)
    state = torch.empty(tensors.rng_state.shape, dtype=torch.int64, device="meta")
    q, k, v = whole("q", -3), whole("k", -3, s.seqlen_k), whole("v", -3, s.seqlen_k)
    call = CallTensors(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts_k, **extras, mask_extremes=extremes)
    options = options_of(s)._replace(max_seqlen_q=s.seqlen, max_seqlen_k=s.seqlen_k)
    ops.pure_forward(*call, *options, state, False, False, False, [])
