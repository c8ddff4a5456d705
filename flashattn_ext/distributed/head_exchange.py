"""The exchange `ulysses`: an all-to-all trades a rank's rows of all heads for all rows of some heads; attention is then local.

Query heads are split evenly over the ranks. A rank gets the KV heads that its query heads read. Where its query heads do not form even
groups (GQA), KV heads are repeated after the transfer, so that no repeated head is sent.

Source: DeepSpeed-Ulysses (Jacobs et al. 2023, "System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..options import CallOptions, CallTensors
from . import local
from .communication import all_to_all, guarded
from .local import EXTRAS, Extras, Gradients
from .plan import Side
from .sharding import Sharding


@dataclass(frozen=True)
class HeadShares:
    """Which query heads and KV heads each rank computes."""

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
        """The KV heads that the query heads of this rank read."""
        group = self.heads_q // self.heads_k
        first, last = rank * self.each, (rank + 1) * self.each - 1
        return range(first // group, last // group + 1)

    def repeated(self, rank: int) -> list[int]:
        """For each KV head of the rank's own call, its index in keys(rank)."""
        group = self.heads_q // self.heads_k
        alike = math.gcd(group, self.each)  # consecutive query heads that read one KV head, on every rank
        begin = self.keys(rank).start
        return [head // group - begin for head in self.queries(rank)[::alike]]


@dataclass
class HeadExchange:
    """One call on this rank; fields as in KeyExchange (key_exchange.py)."""

    extras: Extras
    rng_state: Tensor
    options: CallOptions
    queries: Side
    keys: Side
    is_packed: bool
    group: Any
    shares: HeadShares

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        self.ranks = self.queries.sharding.ranks
        self.row_dim = 0 if self.is_packed else 1

    # --- exchanges ------------------------------------------------------------------------------------------------------
    # Tensors are [B, rows, heads, width], packed ones without the B. A message is the concatenation of flattened pieces.

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
                self._shape(t, self._sharding(of_keys).length(rank), len(self._heads(self.rank, of_keys)))
                for t, of_keys in zip(tensors, are_keys, strict=True)
            ]
            for rank in range(self.ranks)
        ]
        received = self._exchange(pieces, sent_sizes, shapes)
        whole = [
            t.new_empty(self._shape(t, self._sharding(of_keys).seqlen, len(self._heads(self.rank, of_keys))))
            for t, of_keys in zip(tensors, are_keys, strict=True)
        ]
        for rank, parts in enumerate(received):
            for target, part, of_keys in zip(whole, parts, are_keys, strict=True):
                self._sharding(of_keys).put(target, part, self.row_dim, rank)
        return whole

    def _to_rows(self, tensors: Sequence[Tensor], are_keys: Sequence[bool], heads: Sequence[int]) -> list[Tensor]:
        """All rows of this rank's heads -> this rank's rows of all `heads`; heads that several ranks computed are summed."""
        pieces, sent_sizes = [], []
        for rank in range(self.ranks):
            size = 0
            for t, of_keys in zip(tensors, are_keys, strict=True):
                for span in self._sharding(of_keys).spans(rank):
                    piece = t.narrow(self.row_dim, span.begin, span.length)
                    pieces.append(piece)
                    size += piece.numel()
            sent_sizes.append(size)
        shapes = [
            [
                self._shape(t, span.length, len(self._heads(rank, of_keys)))
                for t, of_keys in zip(tensors, are_keys, strict=True)
                for span in self._sharding(of_keys).spans(self.rank)
            ]
            for rank in range(self.ranks)
        ]
        received = self._exchange(pieces, sent_sizes, shapes)
        results, first = [], 0  # `first` counts the pieces of the tensors before in what a rank has sent
        for t, of_keys, count in zip(tensors, are_keys, heads, strict=True):
            sharding = self._sharding(of_keys)
            rows, spans = sharding.length(self.rank), sharding.spans(self.rank)
            sums = of_keys and self.shares.heads_k % self.ranks != 0
            statistics = torch.promote_types(t.dtype, torch.float32)
            make = t.new_zeros if sums else t.new_empty
            result = make(self._shape(t, rows, count), dtype=statistics if sums else t.dtype)
            for rank, parts in enumerate(received):
                of_rank = self._heads(rank, of_keys)
                target = result.narrow(self.row_dim + 1, of_rank.start, len(of_rank))
                for span, part in zip(spans, parts[first:], strict=False):
                    of_span = target.narrow(self.row_dim, span.at, span.length)
                    of_span.add_(part) if sums else of_span.copy_(part)
            results.append(result.to(t.dtype))
            first += len(spans)
        return results

    def _sharding(self, of_keys: bool) -> Sharding:
        return (self.keys if of_keys else self.queries).sharding

    def _heads(self, rank: int, of_keys: bool) -> range:
        return self.shares.keys(rank) if of_keys else self.shares.queries(rank)

    def _exchange(
        self, pieces: list[Tensor], sent_sizes: list[int], shapes: list[list[list[int]]]
    ) -> list[list[Tensor]]:
        """Sends `pieces`, in the order of the destination ranks; returns the received tensors, with `shapes` for each source rank."""
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
        """Keys or values of this rank's KV heads, repeated where its query heads do not form even groups."""
        repeated = self.shares.repeated(self.rank)
        if repeated == list(range(t.shape[self.row_dim + 1])):
            return t
        return t.index_select(self.row_dim + 1, torch.tensor(repeated, device=t.device))

    def _unexpanded(self, gradient: Tensor) -> Tensor:
        repeated, count = self.shares.repeated(self.rank), len(self.shares.keys(self.rank))
        if repeated == list(range(count)):
            return gradient
        total = gradient.new_zeros(
            self._shape(gradient, self.keys.sharding.seqlen, count),
            dtype=torch.promote_types(gradient.dtype, torch.float32),
        )
        for index, head in enumerate(repeated):  # index_add_ is not deterministic on GPUs
            total.select(self.row_dim + 1, head).add_(gradient.select(self.row_dim + 1, index))
        return total.to(gradient.dtype)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[CallTensors, CallOptions]:
        heads, extras = self.shares.queries(self.rank), self.extras
        intervals = extras.mask_intervals
        if intervals is not None and intervals.shape[-3] == self.shares.heads_q:
            intervals = intervals.narrow(-3, heads.start, len(heads))
        elif intervals is not None and intervals.shape[-3] == self.shares.heads_k:
            of_calls = [head + self.shares.keys(self.rank).start for head in self.shares.repeated(self.rank)]
            intervals = intervals.index_select(-3, torch.tensor(of_calls, device=intervals.device))
        of_heads = {name: t.narrow(dim, heads.start, len(heads)) for name, dim, t in self._per_head()}
        extras = extras._replace(**of_heads, bias=bias, mask_intervals=intervals)
        sequences = None
        if self.is_packed:
            sequences = local.packed(self.queries.lengths(), self.keys.lengths(), q.device)
        batch, head = self.options.origin or (0, 0)
        origin = [batch, head + heads.start]
        options = local.with_lengths(self.options._replace(origin=origin), sequences)
        return local.call_tensors(q, k, v, extras, sequences), options

    def _per_head(self) -> list[tuple[str, int, Tensor]]:
        """The given tensors with an entry for each query head: their names and the dimension of the heads."""
        dims = {"heads": 0, "batch_heads": -1}
        named = [(option.name, dims[option.dims]) for option in EXTRAS if option.dims in dims]
        return [(name, dim, t) for name, dim in named if (t := getattr(self.extras, name)) is not None]

    def _bias_of_heads(self) -> Tensor | None:
        """The bias of all rows and this rank's heads."""
        bias = self.extras.bias
        if bias is None or not self._bias_has_rows:
            return self._own_heads(bias)
        # Exchanged as a tensor [B, rows, heads, keys]. A bias with one head for all is sent to every rank.
        rows = bias.transpose(1, 2)
        rows = rows.expand(-1, -1, self.ranks, -1) if bias.shape[1] == 1 else rows
        each = 1 if bias.shape[1] == 1 else self.shares.each
        exchange = self._with_shares(HeadShares(each * self.ranks, each * self.ranks, self.ranks))
        (whole,) = exchange._to_heads([rows], [False])
        return whole.transpose(1, 2)

    @cached_property
    def _bias_has_rows(self) -> bool:
        """Whether the bias has a row for each query, rather than one row for all queries.

        A rank with exactly one query cannot tell from its own bias. Where there may be such a rank, all ranks exchange their shapes.
        """
        bias = self.extras.bias
        assert bias is not None
        has_rows = bool(bias.shape[2] != 1)
        lengths = self.queries.sharding.lengths()
        if 1 not in lengths:
            return has_rows
        tells = lengths[self.rank] != 1
        answers = torch.tensor([tells and has_rows, tells and not has_rows], dtype=torch.int32, device=bias.device)
        with guarded(self.group, "asking whether bias has rows"):
            dist.all_reduce(answers, dist.ReduceOp.MAX, group=self.group)
        has_rows, has_one_for_all = bool(answers[0]), bool(answers[1])
        if has_rows and has_one_for_all:
            raise ValueError(
                "bias: expected the rows of each rank on every rank of the group, or one row for all queries on every rank; got both"
            )
        return has_rows

    def _own_heads(self, bias: Tensor | None) -> Tensor | None:
        if bias is None or bias.shape[1] == 1:
            return bias
        heads = self.shares.queries(self.rank)
        return bias.narrow(1, heads.start, len(heads))

    def _gradient_of_bias(self, gradient: Tensor) -> Tensor:
        """The gradient for all rows and this rank's heads -> the shape of the bias; a partial sum where ranks share an entry."""
        bias = self.extras.bias
        assert bias is not None
        if not self._bias_has_rows:
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
            self.extras, self.rng_state, self.options, self.queries, self.keys, self.is_packed, self.group, shares
        )  # fmt: skip

    # --- forward and backward -------------------------------------------------------------------------------------------

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, needs_lse: bool, keeps_centres: bool, returns_max_logits: bool
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """out and lse of this rank's rows (lse is empty unless needed), the tensors that the backward needs, and the largest logits.

        The largest logits of other ranks' heads are -inf.
        """
        q, k, v = self._to_heads([q, k, v], [False, True, True])
        k, v = self._expanded(k), self._expanded(v)
        tensors, options = self._call(q, k, v, self._bias_of_heads())
        out, lse, centres, of_heads = local.forward(tensors, options, self.rng_state, keeps_centres, returns_max_logits)
        max_logits = of_heads
        if returns_max_logits:
            heads = self.shares.queries(self.rank)
            max_logits = of_heads.new_full((of_heads.shape[0], self.shares.heads_q), -math.inf)
            max_logits[:, heads.start : heads.stop] = of_heads
        (rows,) = self._to_rows([out], [False], [self.shares.heads_q])
        return rows, self._lse_of_rows(lse) if needs_lse else lse.new_empty(0), centres, q, k, v, out, lse, max_logits

    def _lse_of_rows(self, lse: Tensor) -> Tensor:
        (rows,) = self._to_rows([lse.transpose(-1, -2).unsqueeze(-1)], [False], [self.shares.heads_q])
        return rows.squeeze(-1).transpose(-1, -2).contiguous()

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        saved: Sequence[Tensor],
        centres: Tensor | None,
        needs: Sequence[bool],
    ) -> Gradients:
        """saved: the results of forward after the centres."""
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
        dbias = None if of_heads.bias is None else self._gradient_of_bias(of_heads.bias)
        return of_heads._replace(q=dq, k=dk, v=dv, bias=dbias, **self._of_all_heads(of_heads))

    def _of_all_heads(self, of_heads: Gradients) -> dict[str, Tensor]:
        """Gradients of per-head tensors; they are 0 for the heads of other ranks, which add their own."""
        heads = self.shares.queries(self.rank)
        results = {}
        for name, dim, given in self._per_head():
            gradient = getattr(of_heads, name, None)
            if gradient is None:
                continue
            results[name] = torch.zeros_like(given)
            results[name].narrow(dim, heads.start, len(heads)).copy_(gradient)
        return results
