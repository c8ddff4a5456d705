"""The exchanges `allgather` and `ring`: queries stay, keys and values travel to those who see them, and their gradients travel back.

Forward, for every step of the plan (plan.py):   keys of the next step on their way | calls of this step, merged by their lse
Backward, the same steps again:                  keys of the next step on their way | calls of this step | gradients on their way back

A row whose keys came in several calls has out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i), in float32, and so have its
centres (csrc/bias.h). The backward of each call is given the merged ones, so that its weights are those of the whole row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..autograd import CallOptions, CallTensors
from . import local
from .communication import Transfer
from .local import Extras, Gradients
from .plan import Part, Plan, Rules, Step, plan_of
from .sharding import Sharding


@dataclass
class KeyExchange:
    """One call on this rank: q [B, s, Hq, D], k [B, s, Hk, D], v [B, s, Hk, Dv] of its positions, packed without the B."""

    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    rng_state: Tensor
    options: CallOptions  # of the whole; origin: (batch, head)
    sharding: Sharding
    documents: tuple[int, ...] | None  # packed sequences: where they begin, and the end of the last
    group: Any
    ring: bool

    def __post_init__(self) -> None:
        self.row_dim = self.q.dim() - 3
        options, extras = self.options, self.extras
        rules = Rules(
            options.window_left, 0 if options.causal else options.window_right, options.causal,
            extras.alibi_slopes is not None or extras.relative_bias is not None,
            extras.bias is not None or extras.mask_intervals is not None, options.dropout_p > 0,
        )  # fmt: skip
        documents = self.documents or (0, self.sharding.seqlen)
        rank = dist.get_rank(self.group)
        self.plan: Plan = plan_of(self.sharding, rank, documents, rules, self.documents is not None, self.ring)
        self.statistics = torch.promote_types(self.q.dtype, torch.float32)

    # --- keys -----------------------------------------------------------------------------------------------------------

    def _rows(self, t: Tensor, begin: int, end: int) -> Tensor:
        return t.narrow(self.row_dim, begin, end - begin)

    def _buffer(self, like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = list(like.shape)
        shape[self.row_dim] = rows
        return like.new_empty(shape, dtype=dtype)

    def _fetch(self, step: Step) -> tuple[tuple[Tensor, Tensor], Transfer]:
        """Starts the transfers of a step: the buffers of keys and values, filled once the transfer has been waited for."""
        if step.is_own_part:
            buffers = self.k, self.v
        else:
            buffers = self._buffer(self.k, step.keys), self._buffer(self.v, step.keys)
        transfer = Transfer(self.group, "the exchange of keys and values")
        for mine, buffer in zip((self.k, self.v), buffers, strict=True):
            for taker, s in step.sent:
                transfer.send(self._rows(mine, s.source_row, s.source_row + s.rows), taker)
            for s in step.received:
                transfer.receive(self._rows(buffer, s.target_row, s.target_row + s.rows), s.source)
        transfer.start()
        if not step.is_own_part:
            for mine, buffer in zip((self.k, self.v), buffers, strict=True):
                for s in step.own:
                    target = self._rows(buffer, s.target_row, s.target_row + s.rows)
                    target.copy_(self._rows(mine, s.source_row, s.source_row + s.rows))
        return buffers, transfer

    # --- calls ----------------------------------------------------------------------------------------------------------

    def _tensors(self, part: Part, keys: Tensor, values: Tensor) -> CallTensors:
        sequences, extras, places = None, self.extras, part.places
        first, last = places[0].document, places[-1].document + 1
        if self.documents is not None:
            sequences = local.packed(
                [p.last_row - p.row for p in places], [p.last_key - p.key for p in places], self.q.device
            )
            if extras.alibi_slopes is not None and extras.alibi_slopes.dim() == 2:
                extras = extras._replace(alibi_slopes=extras.alibi_slopes[first:last])
        count = part.keys[1] - part.keys[0]
        intervals = extras.mask_intervals
        if intervals is not None:
            intervals = intervals.narrow(-2, part.first_key, count)
        extras = extras._replace(
            mask_intervals=_hiding(intervals, part.added_keys, count, self.documents is not None, self.q.device)
        )
        if extras.bias is not None:
            extras = extras._replace(bias=self._of_bias(extras.bias, part))
        if not part.is_first:
            extras = extras._replace(sink=None)
        q = _with_rows(self._rows(self.q, *part.rows), self.row_dim, part.added_rows)
        k, v = (_with_rows(self._rows(t, *part.keys), self.row_dim, part.added_keys) for t in (keys, values))
        return local.call_tensors(q, k, v, extras, sequences)

    def _of_bias(self, bias: Tensor, part: Part) -> Tensor:
        columns = bias.narrow(3, part.first_key, part.keys[1] - part.keys[0])
        return columns if bias.shape[2] == 1 else columns.narrow(2, part.rows[0], part.rows[1] - part.rows[0])

    def _options(self, part: Part, tensors: CallTensors) -> CallOptions:
        origin = part.origin
        batch, head = self.options.origin or (0, 0)
        if origin is not None:
            document, _, *row_and_key = origin
            origin = (document + batch, head, *row_and_key)
        options = self.options._replace(
            causal=part.causal, window_left=part.window[0], window_right=part.window[1],
            smooth_softmax=self.options.smooth_softmax and part.is_first, origin=None if origin is None else list(origin),
        )  # fmt: skip
        if self.documents is None:
            return options
        lengths = [(p.last_row - p.row, p.last_key - p.key) for p in part.places]
        return options._replace(max_seqlen_q=max(x for x, _ in lengths), max_seqlen_k=max(x for _, x in lengths))

    # --- forward --------------------------------------------------------------------------------------------------------

    def forward(self, keeps_centres: bool) -> tuple[Tensor, Tensor, Tensor]:
        """out of this rank's queries, like q with the head_dim of v, lse [B, Hq, s] ([Hq, s]), and centres, with 3 more of a dimension."""
        merges = self.plan.merges
        out = self.q.new_zeros((*self.q.shape[:-1], self.v.shape[-1]), dtype=self.statistics if merges else None)
        heads, length = self.q.shape[self.row_dim + 1], self.q.shape[self.row_dim]
        lse = self.q.new_full((*self.q.shape[: self.row_dim], heads, length), -math.inf, dtype=self.statistics)
        centres = lse.new_zeros((*lse.shape, ops.CENTRES) if keeps_centres else 0)
        steps = self.plan.steps
        buffers, transfer = self._fetch(steps[0])
        for index, step in enumerate(steps):
            transfer.wait()
            keys, values = buffers
            if index + 1 < len(steps):
                buffers, transfer = self._fetch(steps[index + 1])
            for part in step.parts:
                tensors = self._tensors(part, keys, values)
                part_out, part_lse, part_centres = local.forward(
                    tensors, self._options(part, tensors), self.rng_state, keeps_centres
                )  # fmt: skip
                if part.added_rows:
                    part_out, part_lse = part_out[part.added_rows :], part_lse[..., part.added_rows :]
                    part_centres = part_centres[..., part.added_rows :, :] if keeps_centres else part_centres
                begin, end = part.rows
                means = [(self._rows(out, begin, end), part_out)]
                if keeps_centres:  # in the order of the dimensions of out
                    means.append((centres[..., begin:end, :].transpose(-2, -3), part_centres.transpose(-2, -3)))
                _merge(means, lse[..., begin:end], part_lse, part.is_first)
        return out.to(self.q.dtype), lse, centres

    # --- backward -------------------------------------------------------------------------------------------------------

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, centres: Tensor | None,
        needs: tuple[bool, bool, bool],
    ) -> Gradients:  # fmt: skip
        """needs: whether alibi_slopes, relative_bias and bias have gradients."""
        dq = self.q.new_zeros(self.q.shape, dtype=self.statistics if self.plan.merges else None)
        dk, dv = (t.new_zeros(t.shape, dtype=self.statistics) for t in (self.k, self.v))
        extras, results = _ExtraGradients(self, needs), _Results(dout, dlse, out, lse, centres)
        steps = self.plan.steps
        buffers, transfer = self._fetch(steps[0])
        arriving: list[_Returned] = []
        for index, step in enumerate(steps):
            transfer.wait()
            keys, values = buffers
            if index + 1 < len(steps):
                buffers, transfer = self._fetch(steps[index + 1])
            step_gradients = self._backward_of(step, keys, values, results, dq, extras)
            # The gradients of the step before have had the time of this step to arrive.
            for returned in arriving:
                returned.add_to(dk, dv)
            arriving = [self._return(step, step_gradients, dk, dv)]
        for returned in arriving:
            returned.add_to(dk, dv)
        return Gradients(dq.to(self.q.dtype), dk.to(self.k.dtype), dv.to(self.v.dtype), *extras.finished())

    def _backward_of(
        self, step: Step, keys: Tensor, values: Tensor, results: _Results, dq: Tensor, extras: _ExtraGradients
    ) -> tuple[Tensor, Tensor]:
        """Adds to dq, and returns the gradients of a step's keys and values."""
        single = len(step.parts) == 1 and step.parts[0].keys == (0, step.keys)
        dk, dv = keys, values
        if not single:
            dk, dv = (self._buffer(t, step.keys, self.statistics).zero_() for t in (keys, values))
        for part in step.parts:
            tensors = self._tensors(part, keys, values)
            gradients = local.backward(
                tensors, self._options(part, tensors), self.rng_state, *results.of(self.row_dim, part), extras.needs
            )  # fmt: skip
            of_rows = self._rows(dq, *part.rows)
            dq_part = gradients.q.narrow(self.row_dim, part.added_rows, of_rows.shape[self.row_dim])
            of_rows.copy_(dq_part) if part.is_first else of_rows.add_(dq_part)
            dk_part, dv_part = (
                self._rows(t, part.added_keys, t.shape[self.row_dim]) for t in (gradients.k, gradients.v)
            )
            if single:
                dk, dv = dk_part, dv_part
            else:
                self._rows(dk, *part.keys).add_(dk_part)
                self._rows(dv, *part.keys).add_(dv_part)
            extras.add(part, gradients)
            if not part.is_first and results.dlse is not None and results.centres is not None:
                begin, end = part.rows
                extras.take_back(part, results.centres[..., begin:end, :] * results.dlse[..., begin:end].unsqueeze(-1))
        return dk, dv

    def _return(self, step: Step, gradients: tuple[Tensor, Tensor], dk: Tensor, dv: Tensor) -> _Returned:
        """Starts sending a step's gradients to the ranks that the keys are of; adds those of this rank's own."""
        transfer = Transfer(self.group, "the return of the gradients of keys and values")
        arriving: list[tuple[int, Tensor, slice]] = []
        for index, (mine, buffer, total) in enumerate(zip((self.k, self.v), gradients, (dk, dv), strict=True)):
            for s in step.received:
                sent = self._rows(buffer, s.target_row, s.target_row + s.rows).to(mine.dtype)
                transfer.send(sent, s.source)
            for taker, s in step.sent:
                arrived = self._buffer(mine, s.rows)
                transfer.receive(arrived, taker)
                arriving.append((index, arrived, slice(s.source_row, s.source_row + s.rows)))
            for s in step.own:
                own = self._rows(buffer, s.target_row, s.target_row + s.rows)
                self._rows(total, s.source_row, s.source_row + s.rows).add_(own)
        return _Returned(transfer.start(), arriving, self.row_dim)


class _Results(NamedTuple):
    """What a forward has returned and been told about, of all rows of this rank."""

    dout: Tensor | None
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    centres: Tensor | None

    def of(self, row_dim: int, part: Part) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
        """Of the rows of a call, in the order of local.backward."""
        begin, end = part.rows

        def rows(t: Tensor | None) -> Tensor | None:
            return None if t is None else _with_rows(t.narrow(row_dim, begin, end - begin), row_dim, part.added_rows)

        def statistics(t: Tensor, of_nothing: float) -> Tensor:
            t = t[..., begin:end]
            return torch.nn.functional.pad(t, (part.added_rows, 0), value=of_nothing) if part.added_rows else t

        centres = None if self.centres is None else self.centres[..., begin:end, :]
        if centres is not None and part.added_rows:
            centres = torch.nn.functional.pad(centres, (0, 0, part.added_rows, 0))

        out, lse = rows(self.out), statistics(self.lse, math.inf)  # of a row in which no key has a weight
        assert out is not None
        dlse = None if self.dlse is None else statistics(self.dlse, 0)
        return rows(self.dout), dlse, out, lse, centres


def _with_rows(t: Tensor, row_dim: int, count: int) -> Tensor:
    """With rows of zeros in front."""
    if count == 0:
        return t
    shape = list(t.shape)
    shape[row_dim] = count
    return torch.cat([t.new_zeros(shape), t], row_dim)


def _hiding(intervals: Tensor | None, added: int, keys: int, is_packed: bool, device: torch.device) -> Tensor | None:
    """The intervals of keys in front of which there are others that nobody sees."""
    if added == 0:
        return intervals
    if intervals is None:
        of_all = torch.tensor([0, torch.iinfo(torch.int32).max], dtype=torch.int32, device=device)
        intervals = of_all.expand(*(1,) * (1 if is_packed else 2), keys, 2)
    return torch.nn.functional.pad(intervals, (0, 0, added, 0))


@dataclass
class _Returned:
    """Gradients of this rank's keys and values on their way from another rank."""

    transfer: Transfer
    arriving: list[tuple[int, Tensor, slice]]  # (0 for keys and 1 for values, gradient, rows)
    row_dim: int

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        self.transfer.wait()
        for index, arrived, rows in self.arriving:
            (dk, dv)[index].narrow(self.row_dim, rows.start, rows.stop - rows.start).add_(arrived)


class _ExtraGradients:
    """Sums over the calls of this rank of the gradients of sink and biases."""

    def __init__(self, call: KeyExchange, needs: tuple[bool, bool, bool]) -> None:
        self.call = call
        self.needs = needs
        self.given = call.extras[:4]
        wanted = (self.given[0] is not None, *needs)
        self.sums = [
            None if t is None or not needed else torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for t, needed in zip(self.given, wanted, strict=True)
        ]

    def add(self, part: Part, gradients: Gradients) -> None:
        for index, (total, gradient) in enumerate(zip(self.sums, gradients[3:], strict=True)):
            if total is None or gradient is None:
                continue
            if index == 1 and total.dim() == 2 and self.call.documents is not None:
                total = total[part.places[0].document : part.places[-1].document + 1]
            if index == 3:
                total = self.call._of_bias(total, part)
            total.add_(gradient)

    def take_back(self, part: Part, added: Tensor) -> None:
        """Every call adds the centres of its rows times their gradient of lse to the gradients of biases (csrc/bias.h): one is enough.

        added [B, Hq, rows, 3], packed without the B.
        """
        _, slopes, relative, _ = self.sums
        if slopes is not None and self.call.documents is None:
            of_entries = added[..., 0].sum(-1)
            slopes.add_(of_entries.sum(0) if slopes.dim() == 1 else of_entries)
        elif slopes is not None and slopes.dim() == 1:
            slopes.add_(added[..., 0].sum(-1))
        elif slopes is not None:
            lengths = [place.last_row - place.row for place in part.places]
            for place, of_document in zip(part.places, added[..., 0].split(lengths, -1), strict=True):
                slopes[place.document].add_(of_document.sum(-1))
        if relative is not None:
            of_heads = added.sum(-2)
            ends = of_heads if self.call.documents is not None else of_heads.sum(0)
            relative[:, 0].sub_(ends[:, 1])
            relative[:, -1].sub_(ends[:, 2])

    def finished(self) -> list[Tensor | None]:
        return [
            None if total is None or t is None else total.to(t.dtype)
            for total, t in zip(self.sums, self.given, strict=True)
        ]


def _merge(means: list[tuple[Tensor, Tensor]], lse: Tensor, part_lse: Tensor, is_first: bool) -> None:
    """Adds a call's results to those of the calls before it, in place; is_first: there are none.

    means: pairs of what is a mean under the weights of the row, so far and in the call, [..., rows, heads, n]. lse [..., heads, rows].
    """
    if is_first:
        for mean, of_part in means:
            mean.copy_(of_part)
        lse.copy_(part_lse)
        return
    share = torch.sigmoid(part_lse - lse)
    share = torch.where(part_lse == -math.inf, 0.0, share)  # two rows that have seen nothing have no difference
    for mean, of_part in means:
        mean.lerp_(of_part.to(mean.dtype), share.transpose(-1, -2).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))
