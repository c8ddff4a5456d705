"""How a sequence is split over the ranks of a group: which rows a rank has, and the conversion between the whole and the parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import arguments
from .groups import Group, resolved

GRANULE = 64  # rows: the GPU kernels draw dropout for 16 rows and 64 keys at once, and their tiles end at such rows
KINDS = ("zigzag", "contiguous")


class Span(NamedTuple):
    """Positions [begin, end) of the whole sequence, and the row of a buffer where they start."""

    begin: int
    end: int
    at: int

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Sharding:
    """A sequence of `seqlen` positions in equal chunks of whole granules; the last chunks may be shorter or empty.

    "contiguous": rank r has chunk r of `ranks`. "zigzag": rank r has the chunks r and 2 ranks - 1 - r of 2 ranks, an early and a
    late one, so that causal attention is balanced over the ranks.
    """

    seqlen: int
    ranks: int
    kind: str = "zigzag"

    @cached_property
    def chunk(self) -> int:
        count = self.ranks * (2 if self.kind == "zigzag" else 1)
        return -(-self.seqlen // (count * GRANULE)) * GRANULE

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank, in ascending order, without empty chunks."""
        chunks = (rank, 2 * self.ranks - 1 - rank) if self.kind == "zigzag" else (rank,)
        spans, at = [], 0
        for chunk in chunks:
            begin, end = (min(edge * self.chunk, self.seqlen) for edge in (chunk, chunk + 1))
            if begin < end:
                spans.append(Span(begin, end, at))
                at += end - begin
        return tuple(spans)

    def length(self, rank: int) -> int:
        return sum(span.length for span in self.spans(rank))

    def lengths(self) -> list[int]:
        return [self.length(rank) for rank in range(self.ranks)]

    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        parts = [whole.narrow(dim, span.begin, span.length) for span in self.spans(rank)]
        return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0).clone()

    def put(self, whole: Tensor, part: Tensor, dim: int, rank: int) -> None:
        """Copies the part of a rank to its positions in the whole."""
        for span in self.spans(rank):
            whole.narrow(dim, span.begin, span.length).copy_(part.narrow(dim, span.at, span.length))


def checked_kind(sharding: Any) -> str:
    if sharding not in KINDS:
        raise ValueError(f"sharding: expected one of {KINDS}, got {sharding!r}")
    return str(sharding)


def shard(x: Tensor, *, group: Group = None, dim: int = 1, sharding: str = "zigzag") -> Tensor:
    """This rank's part of a tensor that every rank has as a whole: tokens, labels, positions, or q, k and v themselves.

    Args:
        x: the whole; dimension `dim` is the sequence.
        group: ranks that share the sequence: a process group, a DeviceMesh of one dimension, or None for all ranks.
        dim: the dimension of the sequence, 1 for [B, S, ...], 0 for packed sequences [total, ...].
        sharding: "zigzag" gives a rank an early and a late part of the sequence, so that causal attention is the same work on
            every rank; "contiguous" gives it one part. Parts begin at multiples of 64 positions, so that ranks may have different
            lengths, and the last ranks may get nothing of a short sequence.

    Returns:
        A new tensor; dimension `dim` has shard_lengths(S, ...)[rank] entries. Its gradient flows to the rows of x that it contains.

    Raises:
        ValueError: `sharding` or `group` is not as described.
        TypeError: x is not a tensor.
        RuntimeError: torch.distributed is not initialised.
    """
    arguments.tensors(x=x)
    group = resolved(group)
    dim = _dimension(x, dim)
    of = Sharding(x.shape[dim], dist.get_world_size(group), checked_kind(sharding))
    return of.part(x, dim, dist.get_rank(group))


def shard_lengths(seqlen: int, *, group: Group = None, sharding: str = "zigzag") -> list[int]:
    """How many positions of a sequence each rank has.

    Args:
        seqlen: number of positions of the whole sequence.
        group: as in shard().
        sharding: as in shard().

    Returns:
        A number for each rank, in the order of the ranks.

    Raises:
        ValueError: `seqlen`, `sharding` or `group` is not as described.
        TypeError: seqlen is not an integer.
        RuntimeError: torch.distributed is not initialised.
    """
    return Sharding(
        checked_length("seqlen", seqlen), dist.get_world_size(resolved(group)), checked_kind(sharding)
    ).lengths()


def unshard(
    x: Tensor, *, group: Group = None, dim: int = 1, seqlen: int | None = None, sharding: str = "zigzag"
) -> Tensor:
    """The whole tensor on every rank: the inverse of shard().

    Args:
        x: this rank's part.
        group: as in shard().
        dim: as in shard().
        seqlen: number of positions of the whole; None if all ranks have the same number.
        sharding: as in shard().

    Returns:
        The whole. Every rank is assumed to compute the same from it, so that the gradient of x is this rank's part of the
        gradient of the whole, not a sum over ranks.

    Raises:
        ValueError: the length of x is not the one that shard() gives this rank, or `sharding` or `group` is not as described.
        TypeError: x is not a tensor.
        RuntimeError: torch.distributed is not initialised.
    """
    arguments.tensors(x=x)
    group = resolved(group)
    ranks = dist.get_world_size(group)
    dim = _dimension(x, dim)
    seqlen = x.shape[dim] * ranks if seqlen is None else checked_length("seqlen", seqlen)
    of = Sharding(seqlen, ranks, checked_kind(sharding))
    check_length("x", x.shape[dim], of, dist.get_rank(group))
    whole: Tensor = _Unshard.apply(x, of, dim, group)  # type: ignore[no-untyped-call]
    return whole


def checked_length(name: str, given: Any) -> int:
    length = arguments.integer(name, given)
    if length < 0:
        raise ValueError(f"{name}: expected at least 0, got {length}")
    return length


def _dimension(x: Tensor, dim: Any) -> int:
    """dim counted from the front."""
    index = arguments.integer("dim", dim)
    if not -x.dim() <= index < x.dim():
        raise ValueError(f"dim: expected a dimension of x of shape {list(x.shape)}, got {index}")
    return index % x.dim()


def check_length(name: str, length: int, of: Sharding, rank: int) -> None:
    if length != of.length(rank):
        raise ValueError(
            f"{name}: expected {of.length(rank)} of the {of.seqlen} positions of the sequence on rank {rank} of {of.ranks} "
            f"({of.kind} sharding gives the ranks {of.lengths()}), got {length}; split with shard(), and pass seqlen= with the length of "
            f"the whole where ranks have different lengths{', and seqlen_k= where keys are of another sequence' * (name in ('k', 'v'))}"
        )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Sharding, dim: int, group: Any) -> Tensor:
        from .communication import guarded

        ctx.of, ctx.dim, ctx.rank = of, dim, dist.get_rank(group)
        whole = x.new_empty([*x.shape[:dim], of.seqlen, *x.shape[dim + 1 :]])
        parts = _padded_parts(x, of, dim, ctx.rank)
        with guarded(group, "unshard"):
            dist.all_gather(parts, parts[ctx.rank].clone(), group=group)
        for rank, part in enumerate(parts):
            of.put(whole, part, dim, rank)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.of.part(gradient, ctx.dim, ctx.rank), None, None, None


def _padded_parts(x: Tensor, of: Sharding, dim: int, rank: int) -> Sequence[Any]:
    """One buffer for each rank, padded to the longest part as all_gather requires, with this rank's part filled in."""
    longest = max(of.lengths())
    parts = [x.new_zeros([*x.shape[:dim], longest, *x.shape[dim + 1 :]]) for _ in range(of.ranks)]
    parts[rank].narrow(dim, 0, x.shape[dim]).copy_(x)
    return parts
