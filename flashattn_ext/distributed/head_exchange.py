"""The exchange `ulysses`: every rank hands over rows of all heads for all rows of some heads, and attends as if it were alone.

Query heads are shared out evenly. A rank gets the key heads that its query heads read; where these do not group evenly there, a key head
is repeated after it has arrived, never on the way.

Source: DeepSpeed-Ulysses (Jacobs et al. 2023, "System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import CallOptions, CallTensors
from . import local
from .communication import all_to_all
from .local import Extras, Gradients
from .sharding import Sharding


@dataclass(frozen=True)
class HeadShares:
    """Which heads each rank attends with."""

    heads_q: int
    heads_k: int
    ranks: int

    @property
    def each(self) -> int:
        """Query heads of a rank."""
        return self.heads_q // self.ranks

    def queries(self, rank: int) -> range:
        return range(rank * self.each, (rank + 1) * self.each)

    def keys(self, rank: int) -> range:
        """The key heads that its query heads read."""
        group = self.heads_q // self.heads_k
        first, last = rank * self.each, (rank + 1) * self.each - 1
        return range(first // group, last // group + 1)

    def repeated(self, rank: int) -> list[int]:
        """For each key head of the rank's own call, which of keys(rank) it is."""
        group = self.heads_q // self.heads_k
        alike = math.gcd(group, self.each)  # neighbouring query heads that read one key head, wherever a rank begins
        begin = self.keys(rank).start
        return [head // group - begin for head in self.queries(rank)[::alike]]


@dataclass
class HeadExchange:
    """One call on this rank; fields as in KeyExchange (key_exchange.py), packed sequences by the starts of all of them."""

    extras: Extras
    rng_state: Tensor
    options: CallOptions
    sharding: Sharding
    documents: tuple[int, ...] | None
    group: Any
    shares: HeadShares

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        self.ranks = self.sharding.ranks
        self.row_dim = 1 if self.documents is None else 0

    # --- exchanges ------------------------------------------------------------------------------------------------------
    # A tensor is [B, rows, heads, width], packed without the B. Pieces of one message are flat and follow each other.

    def _shape(self, like: Tensor, rows: int, heads: int) -> list[int]:
        return [*like.shape[: self.row_dim], rows, heads, like.shape[-1]]

    def _to_heads(self, tensors: Sequence[Tensor], are_keys: Sequence[bool]) -> list[Tensor]:
        """This rank's rows of all heads -> all rows of this rank's heads."""
        pieces, sent_sizes = [], []
        for rank in range(self.ranks):
            size = 0
            for t, of_keys in zip(tensors, are_keys, strict=True):
                heads = self._heads(rank, of_keys)
                piece = t.narrow(self.row_dim + 1, heads.start, len(heads))
                pieces.append(piece)
                size += piece.numel()
            sent_sizes.append(size)
        shapes = [
            [
                self._shape(t, length, len(self._heads(self.rank, of_keys)))
                for t, of_keys in zip(tensors, are_keys, strict=True)
            ]
            for length in self.sharding.lengths()
        ]
        received = self._exchange(pieces, sent_sizes, shapes)
        whole = [
            t.new_empty(self._shape(t, self.sharding.seqlen, len(self._heads(self.rank, of_keys))))
            for t, of_keys in zip(tensors, are_keys, strict=True)
        ]
        for rank, parts in enumerate(received):
            for target, part in zip(whole, parts, strict=True):
                self.sharding.put(target, part, self.row_dim, rank)
        return whole

    def _to_rows(self, tensors: Sequence[Tensor], are_keys: Sequence[bool], heads: Sequence[int]) -> list[Tensor]:
        """All rows of this rank's heads -> this rank's rows of all `heads`; heads that several ranks had are summed up."""
        pieces, sent_sizes = [], []
        for rank in range(self.ranks):
            size = 0
            for t in tensors:
                for span in self.sharding.spans(rank):
                    piece = t.narrow(self.row_dim, span.begin, span.length)
                    pieces.append(piece)
                    size += piece.numel()
            sent_sizes.append(size)
        spans = self.sharding.spans(self.rank)
        shapes = [
            [
                self._shape(t, span.length, len(self._heads(rank, of_keys)))
                for t, of_keys in zip(tensors, are_keys, strict=True)
                for span in spans
            ]
            for rank in range(self.ranks)
        ]
        received = self._exchange(pieces, sent_sizes, shapes)
        rows, results = self.sharding.length(self.rank), []
        for index, (t, of_keys, count) in enumerate(zip(tensors, are_keys, heads, strict=True)):
            sums = of_keys and self.shares.heads_k % self.ranks != 0
            statistics = torch.promote_types(t.dtype, torch.float32)
            make = t.new_zeros if sums else t.new_empty
            result = make(self._shape(t, rows, count), dtype=statistics if sums else t.dtype)
            for rank, parts in enumerate(received):
                of_rank = self._heads(rank, of_keys)
                target = result.narrow(self.row_dim + 1, of_rank.start, len(of_rank))
                for span, part in zip(spans, parts[index * len(spans) :], strict=False):
                    of_span = target.narrow(self.row_dim, span.at, span.length)
                    of_span.add_(part) if sums else of_span.copy_(part)
            results.append(result.to(t.dtype))
        return results

    def _heads(self, rank: int, of_keys: bool) -> range:
        return self.shares.keys(rank) if of_keys else self.shares.queries(rank)

    def _exchange(
        self, pieces: list[Tensor], sent_sizes: list[int], shapes: list[list[list[int]]]
    ) -> list[list[Tensor]]:
        """`pieces` in the order of the ranks that they go to, `shapes` of what comes from each rank -> those tensors."""
        sent, at = pieces[0].new_empty(sum(sent_sizes)), 0
        for piece in pieces:
            sent[at : at + piece.numel()].view(piece.shape).copy_(piece)
            at += piece.numel()
        sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        received = all_to_all(
            sent, sent_sizes, [sum(of_rank) for of_rank in sizes], self.group, "the exchange of heads"
        )
        parts = received.split([size for of_rank in sizes for size in of_rank])
        results, at = [], 0
        for of_rank in shapes:
            results.append([part.view(shape) for part, shape in zip(parts[at:], of_rank, strict=False)])
            at += len(of_rank)
        return results

    # --- the call of this rank ------------------------------------------------------------------------------------------

    def _expanded(self, t: Tensor) -> Tensor:
        """Keys or values of the key heads of this rank, repeated where its query heads do not group evenly."""
        repeated = self.shares.repeated(self.rank)
        if repeated == list(range(t.shape[self.row_dim + 1])):
            return t
        return t.index_select(self.row_dim + 1, torch.tensor(repeated, device=t.device))

    def _unexpanded(self, gradient: Tensor) -> Tensor:
        repeated, count = self.shares.repeated(self.rank), len(self.shares.keys(self.rank))
        if repeated == list(range(count)):
            return gradient
        total = gradient.new_zeros(
            self._shape(gradient, self.sharding.seqlen, count), dtype=torch.promote_types(gradient.dtype, torch.float32)
        )
        for index, head in enumerate(repeated):  # not index_add_, whose order on a GPU varies
            total.select(self.row_dim + 1, head).add_(gradient.select(self.row_dim + 1, index))
        return total.to(gradient.dtype)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[CallTensors, CallOptions]:
        heads, extras = self.shares.queries(self.rank), self.extras
        mine = slice(heads.start, heads.stop)
        intervals = extras.mask_intervals
        if intervals is not None and intervals.shape[-3] == self.shares.heads_q:
            intervals = intervals.narrow(-3, heads.start, len(heads))
        elif intervals is not None and intervals.shape[-3] == self.shares.heads_k:
            of_calls = [head + self.shares.keys(self.rank).start for head in self.shares.repeated(self.rank)]
            intervals = intervals.index_select(-3, torch.tensor(of_calls, device=intervals.device))
        extras = Extras(
            None if extras.sink is None else extras.sink[mine],
            None if extras.alibi_slopes is None else extras.alibi_slopes[..., mine],
            None if extras.relative_bias is None else extras.relative_bias[mine],
            bias, intervals,
        )  # fmt: skip
        sequences = None
        if self.documents is not None:
            lengths = [end - begin for begin, end in zip(self.documents, self.documents[1:], strict=False)]
            sequences = local.packed(lengths, lengths, q.device)
        batch, head = self.options.origin or (0, 0)
        origin = [batch, head + heads.start]
        options = local.with_lengths(self.options._replace(origin=origin), sequences)
        return local.call_tensors(q, k, v, extras, sequences), options

    def _bias_of_heads(self) -> Tensor | None:
        """The bias of all rows and this rank's heads."""
        bias = self.extras.bias
        if bias is None or bias.shape[2] == 1:
            return self._own_heads(bias)
        # As a tensor [B, rows, heads, keys]. Where all heads share it, every rank gets all of it.
        rows = bias.transpose(1, 2)
        rows = rows.expand(-1, -1, self.ranks, -1) if bias.shape[1] == 1 else rows
        each = 1 if bias.shape[1] == 1 else self.shares.each
        exchange = self._with_shares(HeadShares(each * self.ranks, each * self.ranks, self.ranks))
        (whole,) = exchange._to_heads([rows], [False])
        return whole.transpose(1, 2)

    def _own_heads(self, bias: Tensor | None) -> Tensor | None:
        if bias is None or bias.shape[1] == 1:
            return bias
        heads = self.shares.queries(self.rank)
        return bias.narrow(1, heads.start, len(heads))

    def _gradient_of_bias(self, gradient: Tensor) -> Tensor:
        """From all rows and this rank's heads to the shape of the bias; of what ranks share, this rank's share."""
        bias = self.extras.bias
        assert bias is not None
        if bias.shape[2] == 1:
            total = torch.zeros_like(bias)
            own = self._own_heads(total)
            assert own is not None
            own.copy_(gradient)
            return total
        each = 1 if bias.shape[1] == 1 else self.shares.each
        exchange = self._with_shares(HeadShares(each * self.ranks, each * self.ranks, self.ranks))
        (rows,) = exchange._to_rows([gradient.transpose(1, 2)], [False], [each * self.ranks])
        if bias.shape[1] == 1:
            rows = rows.sum(2, keepdim=True, dtype=torch.promote_types(rows.dtype, torch.float32)).to(bias.dtype)
        return rows.transpose(1, 2)

    def _with_shares(self, shares: HeadShares) -> HeadExchange:
        return HeadExchange(
            self.extras, self.rng_state, self.options, self.sharding, self.documents, self.group, shares
        )  # fmt: skip

    # --- forward and backward -------------------------------------------------------------------------------------------

    def forward(self, q: Tensor, k: Tensor, v: Tensor, needs_lse: bool, keeps_centres: bool) -> tuple[Tensor, ...]:
        """out and lse of this rank's rows (lse empty unless it is needed), and what the backward wants."""
        q, k, v = self._to_heads([q, k, v], [False, True, True])
        k, v = self._expanded(k), self._expanded(v)
        tensors, options = self._call(q, k, v, self._bias_of_heads())
        out, lse, centres = local.forward(tensors, options, self.rng_state, keeps_centres)
        (rows,) = self._to_rows([out], [False], [self.shares.heads_q])
        return rows, self._lse_of_rows(lse) if needs_lse else lse.new_empty(0), centres, q, k, v, out, lse

    def _lse_of_rows(self, lse: Tensor) -> Tensor:
        (rows,) = self._to_rows([lse.transpose(-1, -2).unsqueeze(-1)], [False], [self.shares.heads_q])
        return rows.squeeze(-1).transpose(-1, -2).contiguous()

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        saved: Sequence[Tensor],
        centres: Tensor | None,
        needs: tuple[bool, bool, bool],
    ) -> Gradients:
        """saved: what forward returned after the centres."""
        q, k, v, out, lse = saved
        if dout is not None:
            (dout,) = self._to_heads([dout], [False])
        if dlse is not None:
            (dlse,) = self._to_heads([dlse.transpose(-1, -2).unsqueeze(-1)], [False])
            dlse = dlse.squeeze(-1).transpose(-1, -2)
        tensors, options = self._call(q, k, v, self._bias_of_heads())
        of_heads = local.backward(tensors, options, self.rng_state, dout, dlse, out, lse, centres, needs)
        dk, dv = self._unexpanded(of_heads.k), self._unexpanded(of_heads.v)
        heads = self.shares.heads_q, self.shares.heads_k, self.shares.heads_k
        dq, dk, dv = self._to_rows([of_heads.q, dk, dv], [False, True, True], heads)
        return Gradients(dq, dk, dv, *self._of_extras(of_heads))

    def _of_extras(self, of_heads: Gradients) -> list[Tensor | None]:
        """Gradients of per-head tensors: those of other heads are for other ranks to add."""
        heads = self.shares.queries(self.rank)
        results: list[Tensor | None] = []
        for name, dim in (("sink", 0), ("alibi_slopes", -1), ("relative_bias", 0)):
            given, gradient = getattr(self.extras, name), getattr(of_heads, name)
            if given is None or gradient is None:
                results.append(None)
                continue
            total = torch.zeros_like(given)
            total.narrow(dim, heads.start, len(heads)).copy_(gradient)
            results.append(total)
        return [*results, None if of_heads.bias is None else self._gradient_of_bias(of_heads.bias)]
