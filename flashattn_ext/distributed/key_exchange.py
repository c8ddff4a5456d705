"""The exchanges `allgather` and `ring`: queries stay, keys and values are sent to the ranks that attend to them, their gradients back.

Forward, for every step of the plan (plan.py):   prefetch the keys of the next step | calls of this step, merged by their lse
Backward, the same steps again:                  prefetch the keys of the next step | calls of this step | send gradients back

A row whose keys are spread over several calls has out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i), in float32. Its
centres (csrc/rules/bias.h) are merged the same way. The backward of each call gets the merged out, lse and centres, so that its weights are
normalised over the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..dropout_padding import with_zeros
from ..options import LEARNED, CallOptions, CallTensors, wanted
from . import local
from .communication import Transfer
from .local import Extras, Gradients
from .plan import Part, Plan, Rules, Side, Step, plan_of


@dataclass
class KeyExchange:
    """One call on this rank: q [B, sq, Hq, D], k [B, sk, Hk, D], v [B, sk, Hk, Dv] of its positions, packed without the B."""

    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    rng_state: Tensor
    options: CallOptions  # those of the whole call; origin is (batch, head)
    queries: Side  # where the positions of q are, and in `keys` those of k and v
    keys: Side
    is_packed: bool
    group: Any
    ring: bool
    returns_max_logits: bool = False

    def __post_init__(self) -> None:
        self.row_dim = self.q.dim() - 3
        options, extras = self.options, self.extras
        rules = Rules(
            options.window_left, 0 if options.causal else options.window_right, options.causal,
            extras.alibi_slopes is not None or extras.relative_bias is not None,
            extras.bias is not None or extras.mask_intervals is not None, options.dropout_p > 0,
        )  # fmt: skip
        rank = dist.get_rank(self.group)
        self.plan: Plan = plan_of(self.queries, self.keys, rank, rules, self.is_packed, self.ring)
        self.statistics = torch.promote_types(self.q.dtype, torch.float32)

    # --- keys -----------------------------------------------------------------------------------------------------------

    def _rows(self, t: Tensor, begin: int, end: int) -> Tensor:
        return t.narrow(self.row_dim, begin, end - begin)

    def _buffer(self, like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = list(like.shape)
        shape[self.row_dim] = rows
        return like.new_empty(shape, dtype=dtype)

    def _fetch(self, step: Step) -> tuple[tuple[Tensor, Tensor], Transfer]:
        """Starts the transfers of a step. The returned buffers of keys and values are filled after transfer.wait()."""
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
        if self.is_packed:
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
            mask_intervals=_hiding(intervals, part.added_keys, count, self.is_packed, self.q.device)
        )
        if self.returns_max_logits and part.added_rows and part.origin is not None:
            real, keys_in_all = part.origin[2] + part.added_rows, count + part.added_keys
            intervals = _hidden_before(real, extras.mask_intervals, keys_in_all, self.is_packed, self.q.device)
            extras = extras._replace(mask_intervals=intervals)
        if extras.bias is not None:
            extras = extras._replace(bias=self._of_bias(extras.bias, part))
        if not part.is_first:
            extras = extras._replace(sink=None)
        q = with_zeros(self._rows(self.q, *part.rows), self.row_dim, part.added_rows)
        k, v = (with_zeros(self._rows(t, *part.keys), self.row_dim, part.added_keys) for t in (keys, values))
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
        if not self.is_packed:
            return options
        lengths = [(p.last_row - p.row, p.last_key - p.key) for p in part.places]
        return options._replace(max_seqlen_q=max(x for x, _ in lengths), max_seqlen_k=max(x for _, x in lengths))

    # --- forward --------------------------------------------------------------------------------------------------------

    def forward(self, keeps_centres: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, centres, max_logits) of this rank's queries; shapes of packed calls in parentheses.

        out is shaped like q with the head_dim of v, lse is [B, Hq, s] ([Hq, s]), centres [B, Hq, s, 3] ([Hq, s, 3]), max_logits [B, Hq]
        ([sequences, Hq]).
        """
        merges = self.plan.merges
        out = self.q.new_zeros((*self.q.shape[:-1], self.v.shape[-1]), dtype=self.statistics if merges else None)
        heads, length = self.q.shape[self.row_dim + 1], self.q.shape[self.row_dim]
        lse = self.q.new_full((*self.q.shape[: self.row_dim], heads, length), -math.inf, dtype=self.statistics)
        centres = lse.new_zeros((*lse.shape, ops.CENTRES) if keeps_centres else 0)
        sequences = len(self.queries.documents) - 1 if self.is_packed else self.q.shape[0]
        max_logits = lse.new_full(
            (sequences, heads) if self.returns_max_logits else (0,), -math.inf, dtype=torch.float32
        )
        steps = self.plan.steps
        buffers, transfer = self._fetch(steps[0])
        for index, step in enumerate(steps):
            transfer.wait()
            keys, values = buffers
            if index + 1 < len(steps):
                buffers, transfer = self._fetch(steps[index + 1])
            for part in step.parts:
                tensors = self._tensors(part, keys, values)
                part_out, part_lse, part_centres, part_max_logits = local.forward(
                    tensors, self._options(part, tensors), self.rng_state, keeps_centres, self.returns_max_logits
                )  # fmt: skip
                if self.returns_max_logits:
                    largest = max_logits
                    if self.is_packed:
                        largest = largest[part.places[0].document : part.places[-1].document + 1]
                    torch.maximum(largest, part_max_logits, out=largest)
                if part.added_rows:
                    part_out, part_lse = part_out[part.added_rows :], part_lse[..., part.added_rows :]
                    part_centres = part_centres[..., part.added_rows :, :] if keeps_centres else part_centres
                begin, end = part.rows
                means = [(self._rows(out, begin, end), part_out)]
                if keeps_centres:  # transposed to the dimension order of out
                    means.append((centres[..., begin:end, :].transpose(-2, -3), part_centres.transpose(-2, -3)))
                _merge(means, lse[..., begin:end], part_lse, part.is_first)
        return out.to(self.q.dtype), lse, centres, max_logits

    # --- backward -------------------------------------------------------------------------------------------------------

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, centres: Tensor | None,
        needs: Sequence[bool],
    ) -> Gradients:  # fmt: skip
        """needs: for each of BIASES whether its gradient is needed."""
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
            # The transfer of the previous step's gradients has overlapped with this step's calls.
            for returned in arriving:
                returned.add_to(dk, dv)
            arriving = [self._return(step, step_gradients, dk, dv)]
        for returned in arriving:
            returned.add_to(dk, dv)
        return Gradients(dq.to(self.q.dtype), dk.to(self.k.dtype), dv.to(self.v.dtype), **extras.finished())

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
        """Starts sending the gradients of a step's keys and values to the ranks that own them; adds this rank's own to dk and dv."""
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
    """The results of a forward and their gradients, for all rows of this rank."""

    dout: Tensor | None
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    centres: Tensor | None

    def of(self, row_dim: int, part: Part) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
        """The entries for the rows of one call, in the argument order of local.backward."""
        begin, end = part.rows

        def rows(t: Tensor | None) -> Tensor | None:
            return None if t is None else with_zeros(t.narrow(row_dim, begin, end - begin), row_dim, part.added_rows)

        def statistics(t: Tensor, of_nothing: float) -> Tensor:
            t = t[..., begin:end]
            return torch.nn.functional.pad(t, (part.added_rows, 0), value=of_nothing) if part.added_rows else t

        centres = None if self.centres is None else self.centres[..., begin:end, :]
        if centres is not None and part.added_rows:
            centres = torch.nn.functional.pad(centres, (0, 0, part.added_rows, 0))

        out, lse = rows(self.out), statistics(self.lse, math.inf)  # an lse of +inf gives the padding rows weights of 0
        assert out is not None
        dlse = None if self.dlse is None else statistics(self.dlse, 0)
        return rows(self.dout), dlse, out, lse, centres


def _hidden_before(row: int, intervals: Tensor | None, keys: int, is_packed: bool, device: torch.device) -> Tensor:
    """The intervals of `keys` keys, None being keys that every row sees, with the rows before `row` masked."""
    if intervals is None:
        of_all = torch.tensor([0, torch.iinfo(torch.int32).max], dtype=torch.int32, device=device)
        intervals = of_all.expand(*(1,) * (1 if is_packed else 2), keys, 2)
    first, last = intervals.unbind(-1)
    return torch.stack([first.clamp(min=row), last], -1)


def _hiding(intervals: Tensor | None, added: int, keys: int, is_packed: bool, device: torch.device) -> Tensor | None:
    """The intervals with `added` fully masked keys in front."""
    if added == 0:
        return intervals
    if intervals is None:
        of_all = torch.tensor([0, torch.iinfo(torch.int32).max], dtype=torch.int32, device=device)
        intervals = of_all.expand(*(1,) * (1 if is_packed else 2), keys, 2)
    return torch.nn.functional.pad(intervals, (0, 0, added, 0))


@dataclass
class _Returned:
    """Gradients of this rank's keys and values that other ranks are sending."""

    transfer: Transfer
    arriving: list[tuple[int, Tensor, slice]]  # (0 for keys and 1 for values, gradient, rows)
    row_dim: int

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        self.transfer.wait()
        for index, arrived, rows in self.arriving:
            (dk, dv)[index].narrow(self.row_dim, rows.start, rows.stop - rows.start).add_(arrived)


class _ExtraGradients:
    """The gradients of sink and biases, summed over the calls of this rank."""

    def __init__(self, call: KeyExchange, needs: Sequence[bool]) -> None:
        self.call = call
        self.needs = needs
        self.given = {name: getattr(call.extras, name) for name in LEARNED}
        self.sums = {
            name: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for (name, t), is_wanted in zip(self.given.items(), wanted(call.extras, needs), strict=True)
            if is_wanted
        }

    def add(self, part: Part, gradients: Gradients) -> None:
        for name, total in self.sums.items():
            gradient = getattr(gradients, name)
            if gradient is None:
                continue
            if name == "alibi_slopes" and total.dim() == 2 and self.call.is_packed:
                total = total[part.places[0].document : part.places[-1].document + 1]
            if name == "bias":
                total = self.call._of_bias(total, part)
            total.add_(gradient)

    def take_back(self, part: Part, added: Tensor) -> None:
        """Removes from the gradients of the biases the term that comes from the centres of a part's rows.

        Every call adds this term (csrc/rules/bias.h), but it must count only once for each row. added: the centres times the gradient of lse,
        [B, Hq, rows, 3], packed without the B.
        """
        slopes, relative = self.sums.get("alibi_slopes"), self.sums.get("relative_bias")
        if slopes is not None and not self.call.is_packed:
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
            ends = of_heads if self.call.is_packed else of_heads.sum(0)
            relative[:, 0].sub_(ends[:, 1])
            relative[:, -1].sub_(ends[:, 2])

    def finished(self) -> dict[str, Tensor | None]:
        return {name: self.sums[name].to(t.dtype) if name in self.sums else None for name, t in self.given.items()}


def _merge(means: list[tuple[Tensor, Tensor]], lse: Tensor, part_lse: Tensor, is_first: bool) -> None:
    """Merges the results of one call into the results of the calls before it, in place; with is_first there are none before it.

    means: pairs (merged so far, of this call) of averages over the attention weights of a row, [..., rows, heads, n].
    lse, part_lse: [..., heads, rows].
    """
    if is_first:
        for mean, of_part in means:
            mean.copy_(of_part)
        lse.copy_(part_lse)
        return
    share = torch.sigmoid(part_lse - lse)
    share = torch.where(part_lse == -math.inf, 0.0, share)  # -inf - -inf is NaN where a row has seen no key so far
    for mean, of_part in means:
        mean.lerp_(of_part.to(mean.dtype), share.transpose(-1, -2).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))
