"""FLOP formulas of the ops, for torch.utils.flop_counter.FlopCounterMode.

They count the matrix products over the visible (query, key) pairs, as far as these are known without waiting for a device: causal and
windows always, packed sequences and Masks if their tensors are on the CPU. Pairs whose visibility is unknown count as visible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from . import block_lists
from .mask_arguments import ALL_ROWS
from .options import DIFFERENTIABLE

_FORWARD = torch.ops.flashattn_ext.forward
_BACKWARD = torch.ops.flashattn_ext.backward
_JVP = torch.ops.flashattn_ext.jvp
_SECOND = torch.ops.flashattn_ext.second
_DECODE = torch.ops.flashattn_ext.decode
_DECODE_APPEND = torch.ops.flashattn_ext.decode_append


def _rows_up_to(first: int, Sq: int, Sk: int) -> int:
    """The number of (i, j) pairs with 0 <= i < Sq, 0 <= j < Sk and j < i + first."""

    def keys_before(end: int) -> int:  # the sum of min(max(x, 0), Sk) over x < end
        ramp = min(max(end, 0), Sk + 1)
        return ramp * (ramp - 1) // 2 + max(end - Sk - 1, 0) * Sk

    return keys_before(first + Sq) - keys_before(first)


class Call:
    """The arguments of an op by the names of its schema."""

    def __init__(self, op: Any, arguments: tuple[Any, ...]) -> None:
        self.given = {a.name: value for a, value in zip(op._schema.arguments, arguments, strict=True)}
        self.packed = self.given["cu_seqlens_q"] is not None
        head_dim = 1 if self.packed or self.given["bhsd"] else 2
        self.row_dim = 0 if self.packed else 3 - head_dim
        self.q, self.k, self.v = (self.given[name] for name in "qkv")
        self.heads = self.q.shape[head_dim]
        self.left: int = self.given["window_left"]
        self.right: int = 0 if self.given["causal"] else self.given["window_right"]

    def widths(self, *names: str) -> list[int]:
        """The head dims of these tensors, 0 for None."""
        return [0 if self.given[name] is None else int(self.given[name].shape[-1]) for name in names]

    def has_tangents_of_logits(self) -> bool:
        """Whether a tensor other than v has a tangent."""
        return any(self.given[f"t{name}"] is not None for name in DIFFERENTIABLE if name != "v")

    def pairs(self) -> int:
        """The number of visible (query, key) pairs, over all heads and batch entries."""
        if not self.packed:
            Sq, Sk = self.q.shape[self.row_dim], self.k.shape[self.row_dim]
            return self._dense(Sq, Sk)
        cu_q, cu_k = self.given["cu_seqlens_q"], self.given["cu_seqlens_k"]
        if not (_is_readable(cu_q) and _is_readable(cu_k)):
            total_q, total_k = self.q.shape[0], self.k.shape[0]
            return int(self.heads * min(total_q * self.given["max_seqlen_k"], total_k * self.given["max_seqlen_q"]))
        starts = cu_k.tolist()
        lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), starts, strict=False)
        return sum(self._of_sequence(Sq, Sk, start) for Sq, Sk, start in lengths)

    def _shift(self, Sq: int, Sk: int) -> int:
        """The shift with which row i is aligned with key i + shift."""
        origin = self.given["origin"]
        if origin is None or len(origin) == 2:
            return Sk - Sq
        _batch, _head, row, key, shift = (*origin, 0)[:5]
        return int(row + shift - key)

    def _without_mask(self, Sq: int, Sk: int) -> int:
        """Pairs that causal and window_size leave visible, in one head of one sequence."""
        shift = self._shift(Sq, Sk)
        up_to_right = Sq * Sk if self.right < 0 else _rows_up_to(shift + self.right + 1, Sq, Sk)
        return up_to_right - (0 if self.left < 0 else _rows_up_to(shift - self.left, Sq, Sk))

    def _seen(self, intervals: Tensor, Sq: int, Sk: int) -> int:
        """Visible pairs of one sequence, over all heads and batch entries of its intervals [..., Sk, 2]."""
        keys = torch.arange(Sk) - self._shift(Sq, Sk)  # the row aligned with each key
        row = origin[2] if (origin := self.given["origin"]) is not None and len(origin) > 2 else 0
        first, last = (intervals.long() - row).clamp(0, Sq).unbind(-1)
        if self.right >= 0:
            first = torch.maximum(first, keys - min(self.right, ALL_ROWS))
        if self.left >= 0:
            last = torch.minimum(last, keys + min(self.left, ALL_ROWS) + 1)
        return int((last - first).clamp(min=0).sum())

    def _dense(self, Sq: int, Sk: int) -> int:
        batch, intervals = self.q.shape[0], self.given["mask_intervals"]
        lists, bits = self.given["mask_lists"], self.given["mask_bits"]
        if _is_readable(lists):
            return self._in_blocks(lists, bits, Sq, Sk)
        if not _is_readable(intervals):
            return int(batch * self.heads * self._without_mask(Sq, Sk))
        given = max(intervals.shape[0] * intervals.shape[1], 1)
        return int(self._seen(intervals, Sq, Sk) * batch * self.heads // given)

    def _in_blocks(self, lists: Tensor, bits: Tensor, Sq: int, Sk: int) -> int:
        """Pairs that a BlockMask, causal and window_size leave visible, over all heads and batch entries."""
        grid = block_lists.grid_of(lists, Sq, Sk)
        seen = 0
        if self.left < 0 and self.right < 0:
            seen = int(block_lists.visible_pairs(grid, bits, Sq, Sk))
        keys = torch.arange(Sk) - self._shift(Sq, Sk)  # the row aligned with each key
        for row in range(0, Sq if self.left >= 0 or self.right >= 0 else 0, block_lists.BLOCK):
            rows = torch.arange(row, min(row + block_lists.BLOCK, Sq))
            visible = block_lists.rows_of(grid, bits, rows, Sk)
            if self.right >= 0:
                visible = visible & (keys <= rows[:, None] + min(self.right, ALL_ROWS))
            if self.left >= 0:
                visible = visible & (keys >= rows[:, None] - min(self.left, ALL_ROWS))
            seen += int(visible.sum())
        return int(seen * self.q.shape[0] * self.heads // max(grid.shape[0] * grid.shape[1], 1))

    def _of_sequence(self, Sq: int, Sk: int, start: int) -> int:
        intervals = self.given["mask_intervals"]
        if not _is_readable(intervals):
            return int(self.heads * self._without_mask(Sq, Sk))
        return int(self._seen(intervals[:, start : start + Sk], Sq, Sk) * self.heads // max(intervals.shape[0], 1))


def _is_readable(t: Tensor | None) -> bool:
    """Whether the values can be read without waiting: a tensor on the CPU, and not a fake tensor of a traced graph."""
    return t is not None and type(t) is Tensor and t.device.type == "cpu"


def _forward_flops(*arguments: Any, out_val: Any = None) -> int:
    """Two products: scores, and weights with values."""
    call = Call(_FORWARD.default, arguments)
    return 2 * call.pairs() * int(call.q.shape[-1] + call.v.shape[-1])


def _backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """Five products: the scores again, the gradients of the weights, of q, of k and of v."""
    call = Call(_BACKWARD.default, arguments)
    return 2 * call.pairs() * int(3 * call.q.shape[-1] + 2 * call.v.shape[-1])


def _jvp_flops(*arguments: Any, out_val: Any = None) -> int:
    """At most five products: the scores; <tq, k>, <q, tk> and weights with tv where there is such a tangent; weights times tangents of
    logits with v unless only v has a tangent."""
    call = Call(_JVP.default, arguments)
    widths, of_logits = call.widths("tq", "tk", "tv"), call.has_tangents_of_logits()
    return 2 * call.pairs() * (int(call.q.shape[-1]) + sum(widths) + int(call.v.shape[-1]) * of_logits)


def _second_flops(*arguments: Any, out_val: Any = None) -> int:
    """At most ten products: the scores and the gradients of q and k; dout with v, and the gradient of v, unless only v has a tangent;
    dout with tv; and two for each of tq and tk: the tangents of the scores and the gradients through them."""
    call = Call(_SECOND.default, arguments)
    tq, tk, tv = call.widths("tq", "tk", "tv")
    D, Dv = int(call.q.shape[-1]), int(call.v.shape[-1])
    return 2 * call.pairs() * (3 * D + 2 * Dv * call.has_tangents_of_logits() + 2 * (tq + tk) + tv)


def _decode_flops(op: Any) -> Any:
    """FLOPs of decoding: over the cache lengths if these can be read, else over the whole cache; causal and windows do not count."""

    def flops(*arguments: Any, out_val: Any = None) -> int:
        given = {a.name: value for a, value in zip(op.default._schema.arguments, arguments, strict=True)}
        q, k_cache, v_cache, table = (given[name] for name in ("q", "k_cache", "v_cache", "block_table"))
        width = 2 * int(q.shape[-1] + v_cache.shape[-1]) * int(q.shape[-2])
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        if cu_q is not None:
            if not (_is_readable(cu_q) and _is_readable(cu_k)):
                return width * int(q.shape[0]) * int(given["max_seqlen_k"])
            return width * int((cu_q.diff().long() * cu_k.diff().long()).sum())
        new = 0 if given["k"] is None else int(given["k"].shape[1])
        capacity = int(k_cache.shape[1]) * (1 if table is None else int(table.shape[1]))
        lengths = given["cache_seqlens"]
        if _is_readable(lengths):
            keys = int(lengths.sum()) + new * len(lengths)
        else:
            length = int(given["cache_seqlen"])
            keys = int(q.shape[0]) * (capacity if lengths is not None or length < 0 else length + new)
        return width * int(q.shape[1]) * keys

    return flops


for _op, _formula in (
    (_FORWARD, _forward_flops),
    (_BACKWARD, _backward_flops),
    (_JVP, _jvp_flops),
    (_SECOND, _second_flops),
    (_DECODE, _decode_flops(_DECODE)),
    (_DECODE_APPEND, _decode_flops(_DECODE_APPEND)),
):
    if _op not in flop_registry:
        register_flop_formula(_op, get_raw=True)(_formula)
