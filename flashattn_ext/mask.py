"""Mask: for every key the one interval of query rows that see it. O(Sk) memory where a dense mask takes Sq x Sk.

One interval for each key covers nearly every mask in use: documents packed into a row, padding, prefix-LM, chunks, blocks over causal
text, windows with global keys, trees. It is FlashMask's column representation (Wang et al. 2024, "FlashMask: Efficient and Rich Mask
Extension of FlashAttention") with visible instead of hidden rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from . import arguments, ops, tensor_cache
from .mask_arguments import (
    ALL_ROWS,
    check_depth_first,
    check_index,
    first_or_last,
    integers,
    reject_keys,
    runs_of,
    size_of,
)
from .mask_picture import picture_of


class Mask:
    """Which query rows see which key, in O(Sk) memory.

    Args:
        intervals: int32 [B or 1, Hm, Sk, 2] with Hm of 1, Hk or Hq, for packed calls [Hm, total_k, 2]: (first, last) for each
            key, last exclusive, rows counted within their own sequence. Key j is visible to row i if first <= i < last and the
            causal and window options of the call allow it. If last <= first, the key is fully masked. Values outside [0, Sq]
            are clamped.

    Raises:
        TypeError: `intervals` is not an int32 tensor.
        ValueError: `intervals` has another shape.

    Source: FlashMask (Wang et al. 2024, "FlashMask: Efficient and Rich Mask Extension of FlashAttention"), with visible rows in
    place of hidden ones.
    """

    # Cache of extremes(): the intervals it was computed from, their state then (tensor_cache.py), and the extremes. Not copied with the Mask.
    _extremes: tuple[Tensor, tuple[int, ...], Tensor] | None = None

    def __init__(self, intervals: Tensor) -> None:
        if not isinstance(intervals, Tensor):
            raise TypeError(f"intervals: expected a torch.Tensor, got {type(intervals).__name__}")
        if intervals.dtype != torch.int32:
            raise TypeError(f"intervals: expected dtype int32, got {intervals.dtype}")
        if intervals.dim() not in (3, 4) or intervals.shape[-1] != 2:
            raise ValueError(
                "intervals: expected shape [batch or 1, heads, seqlen_k, 2], or [heads, total_k, 2] for packed calls, "
                f"got {list(intervals.shape)}"
            )
        self.intervals = intervals

    # --- constructors -----------------------------------------------------------------------------------------------

    @classmethod
    def documents(cls, ids: Tensor) -> Mask:
        """Documents packed into rows: a query sees the keys of its own document.

        Args:
            ids: integers [B, S]; equal neighbours are one document, whatever the number is. As many queries as keys.

        Returns:
            A Mask with intervals [B, 1, S, 2] on the device of `ids`.

        Raises:
            TypeError: `ids` is not an integer tensor.
            ValueError: `ids` has another shape.
        """
        first, last = runs_of(integers("ids", ids))
        return cls._of(first, last)

    @classmethod
    def padding(cls, mask: Tensor, side: str | None = None, Sk: int | None = None) -> Mask:
        """Masks the padding keys for every query.

        Args:
            mask: either lengths, integers [B], of rows of `Sk` keys with the padding at `side`; or a bool or 0/1 mask [B, Sk], as
                Hugging Face's tokenizers make it, 1 where there is a token (zeros may be anywhere); or a bool mask [Sk] for all rows.
            side: "right" (the default) or "left", where the padding is; accepted with lengths only.
            Sk: number of keys in a row, needed with lengths; on the CPU the longest length by default. Required on other devices,
                because finding the longest length would wait for the device.

        Returns:
            A Mask with intervals [B, 1, Sk, 2] on the device of `mask`.

        Raises:
            TypeError: `mask` is not an integer or bool tensor.
            ValueError: its shape or `side` is not as described, or `Sk` is missing or contradicts the mask.
        """
        if side not in (None, "right", "left"):
            raise ValueError(f"side: expected 'right' or 'left', got {side!r}")
        values = integers("mask", mask, ranks=(1, 2))
        if values.dim() == 1 and mask.dtype != torch.bool:
            return cls._of_seen(first_or_last(values, side, Sk))
        seen = (values if values.dim() == 2 else values[None]) != 0
        if side is not None:
            raise ValueError(
                f"side: expected None with a mask of shape {list(mask.shape)}, which already marks the padding, got {side!r}; side is "
                "for lengths [batch]"
            )
        if Sk is not None and size_of("Sk", Sk) != seen.shape[1]:
            raise ValueError(
                f"Sk: expected None or the {seen.shape[1]} keys of the mask of shape {list(mask.shape)}, got {Sk}"
            )
        return cls._of_seen(seen)

    @classmethod
    def prefix_lm(cls, prefix_lengths: Tensor, Sq: int, Sk: int) -> Mask:
        """Every query sees the prefix of its row; the other keys are causal. Pass it to a call with causal=False.

        Args:
            prefix_lengths: integers [B], the number of keys in each prefix.
            Sq: number of queries in a row.
            Sk: number of keys in a row.

        Returns:
            A Mask with intervals [B, 1, Sk, 2] on the device of `prefix_lengths`.

        Raises:
            TypeError: `prefix_lengths` is not an integer tensor.
            ValueError: its shape is not as described, or a size is negative.
        """
        Sq, Sk = size_of("Sq", Sq), size_of("Sk", Sk)
        lengths = integers("prefix_lengths", prefix_lengths, ranks=(1,), or_bool=False)
        keys = torch.arange(Sk, device=lengths.device)
        return cls._of(torch.where(keys < lengths[:, None], 0, keys - (Sk - Sq)), None)

    @classmethod
    def chunked(cls, size: int, Sq: int, Sk: int, device: torch.device | str | None = None) -> Mask:
        """Chunked attention: a query sees the keys of its own chunk of `size` positions (with causal=True only up to its position).

        Args:
            size: positions of a chunk; the first chunk begins at key 0.
            Sq: number of queries in a row.
            Sk: number of keys in a row.
            device: where the mask is made; None is torch's default device.

        Returns:
            A Mask with intervals [1, 1, Sk, 2].

        Raises:
            ValueError: `size` is less than 1, or another size is negative.
        """
        size, Sq, Sk = size_of("size", size, at_least=1), size_of("Sq", Sq), size_of("Sk", Sk)
        start = torch.arange(Sk, device=device)[None] // size * size - (Sk - Sq)
        return cls._of(start, start + size)

    @classmethod
    def blocks(cls, ids: Tensor) -> Mask:
        """Blocks whose members see each other, over causal text: image tokens in a language model.

        Args:
            ids: integers [B, S]; equal neighbours of 0 and above are one block, below 0 is text. As many queries as keys.

        Returns:
            A Mask with intervals [B, 1, S, 2] on the device of `ids`; pass it to a call with causal=False.

        Raises:
            TypeError: `ids` is not an integer tensor.
            ValueError: `ids` has another shape.
        """
        ids = integers("ids", ids, or_bool=False)
        keys = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return cls._of(torch.where(ids < 0, keys, runs_of(ids)[0]), None)

    @classmethod
    def window(
        cls, left: int, right: int, Sq: int, Sk: int, global_keys: int = 0, device: torch.device | str | None = None
    ) -> Mask:
        """A sliding window around every query's position, and global keys at the start that every query sees.

        Args:
            left: number of keys that query i sees before position i + Sk - Sq; -1 is unbounded.
            right: number of keys that it sees after that position; -1 is unbounded.
            Sq: number of queries in a row.
            Sk: number of keys in a row.
            global_keys: number of keys at the start that every query sees.
            device: where the mask is made; None is torch's default device.

        Returns:
            A Mask with intervals [1, 1, Sk, 2].

        Raises:
            ValueError: `left` or `right` is less than -1, or a size is negative.
        """
        left, right = size_of("left", left, at_least=-1), size_of("right", right, at_least=-1)
        Sq, Sk, global_keys = size_of("Sq", Sq), size_of("Sk", Sk), size_of("global_keys", global_keys)
        keys = torch.arange(Sk, device=device)[None]
        rows = keys - (Sk - Sq)
        first = rows - right if right >= 0 else torch.zeros_like(rows)
        last = rows + left + 1 if left >= 0 else torch.full_like(rows, ALL_ROWS)
        everybody = keys < global_keys
        return cls._of(torch.where(everybody, 0, first), torch.where(everybody, ALL_ROWS, last))

    @classmethod
    def tree(cls, parents: Tensor) -> Mask:
        """Nodes in depth-first order see themselves and their ancestors: speculative decoding.

        Args:
            parents: integers [B, S] or [S]: the index of each node's parent, -1 for a root. On the CPU the order is checked to
                be depth-first; elsewhere that would wait for the device.

        Returns:
            A Mask with intervals [B or 1, 1, S, 2] on the device of `parents`.

        Raises:
            TypeError: `parents` is not an integer tensor.
            ValueError: its shape is not as described, or the order is not depth-first.
        """
        parents = integers("parents", parents, ranks=(1, 2), or_bool=False)
        parents = parents[None] if parents.dim() == 1 else parents
        if parents.device.type == "cpu":
            check_depth_first(parents)
        nodes = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
        # A subtree ends where its root's last child's subtree ends. Pointer jumping: each round doubles the generations covered.
        at = torch.where((parents >= 0) & (parents < nodes), parents, nodes)
        last = nodes.scatter_reduce(1, at, nodes, "amax")
        for _ in range(max(parents.shape[1], 1).bit_length()):
            last = last.gather(1, last)
        return cls._of(nodes, last + 1)

    @classmethod
    def from_flashmask(cls, startend_row_indices: Tensor, causal: bool) -> Mask:
        """From FlashMask's hidden rows of each key, as PaddlePaddle's flashmask_attention takes them.

        Args:
            startend_row_indices: int32 [B, 1 or Hk, Sk, n], the hidden rows of each key. With causal: n = 1 hides the rows from the
                value on; n = 2 the rows from the first value up to the second. Otherwise n = 2 hides the rows from the first value on
                and the rows below the second; n = 4 hides two ranges, in the lower left and in the upper right triangle. As many
                queries as keys.
            causal: as in flashmask_attention; pass it to the call as well.

        Returns:
            A Mask with intervals [B, 1 or Hk, Sk, 2].

        Raises:
            TypeError: the dtype is not int32.
            ValueError: the shape is not as described, or the rows that see a key are not one interval; names the first such key.
                Looking for it waits for the device.
        """
        arguments.tensors(startend_row_indices=startend_row_indices)
        causal = arguments.flag("causal", causal)
        hidden = startend_row_indices
        if hidden.dtype != torch.int32:
            raise TypeError(f"startend_row_indices: expected dtype int32, got {hidden.dtype}")
        if hidden.dim() != 4 or hidden.shape[-1] not in ((1, 2) if causal else (2, 4)):
            raise ValueError(
                f"startend_row_indices: expected shape [batch, heads, seqlen_k, {'1 or 2' if causal else '2 or 4'}] with "
                f"causal={causal}, got {list(hidden.shape)}"
            )
        Sk = hidden.shape[2]
        key = torch.arange(Sk, device=hidden.device)
        start = hidden[..., 0].long().clamp(0, Sk)
        if hidden.shape[-1] == 1 or (hidden.shape[-1] == 2 and not causal):
            first = torch.zeros_like(start) if causal else hidden[..., 1].long()
            return cls(torch.stack([first, start], -1).int())
        # At most two ranges of hidden rows, [start, end) and [upper_start, upper_end); with causal the second is all rows above the key.
        end = torch.maximum(hidden[..., 1].long().clamp(0, Sk), start)
        if causal:
            upper_start, upper_end = torch.zeros_like(start), key.expand_as(start)
            start, end = (torch.maximum(x, key) for x in (start, end))
        else:
            upper_start = hidden[..., 2].long().clamp(0, Sk)
            upper_end = torch.maximum(hidden[..., 3].long().clamp(0, Sk), upper_start)
        return _visible_between(cls, (upper_start, upper_end), (start, end), Sk)

    @classmethod
    def from_dense(cls, visible: Tensor) -> Mask:
        """The Mask of a dense matrix, for tests and small cases.

        Args:
            visible: bool [B or 1, H or 1, Sq, Sk], True where a query sees a key.

        Returns:
            A Mask with intervals [B or 1, H or 1, Sk, 2] on the device of `visible`.

        Raises:
            TypeError: the dtype is not bool.
            ValueError: the shape is not as described, or the rows that see a key are not one interval; names the first such key.
                Looking for it waits for the device.
        """
        arguments.tensors(visible=visible)
        if visible.dtype != torch.bool:
            raise TypeError(f"visible: expected dtype bool, got {visible.dtype}")
        if visible.dim() != 4:
            raise ValueError(f"visible: expected shape [batch, heads, seqlen_q, seqlen_k], got {list(visible.shape)}")
        rows = torch.arange(visible.shape[2], device=visible.device)[:, None]
        count = visible.sum(2)
        first = torch.where(visible, rows, visible.shape[2]).amin(2) if visible.shape[2] else torch.zeros_like(count)
        last = torch.where(visible, rows + 1, 0).amax(2) if visible.shape[2] else torch.zeros_like(count)
        reject_keys("visible", (count > 0) & (last - first != count))
        return cls(torch.stack([first, torch.maximum(last, first)], -1).int())

    @classmethod
    def _of_seen(cls, seen: Tensor) -> Mask:
        """From bool [B, Sk], True where every row sees the key and False where none does."""
        return cls._of(torch.zeros_like(seen, dtype=torch.int64), seen * ALL_ROWS)

    @classmethod
    def _of(cls, first: Tensor, last: Tensor | None) -> Mask:
        """From first and last rows [B, Sk]; a last of None is past every row."""
        last = torch.full_like(first, ALL_ROWS) if last is None else last
        return cls(torch.stack([first, last], -1).clamp(-ALL_ROWS, ALL_ROWS).int()[:, None])

    # --- use --------------------------------------------------------------------------------------------------------

    def extremes(self) -> Tensor:
        """Summaries of `intervals` by which the kernels skip tiles, computed at the first use and cached.

        They are computed again after torch operations wrote to `intervals` in place or replaced its memory. A write through `.numpy()`
        or `.data` is not noticed, and needs a new Mask. Each captured CUDA graph computes them itself, so that a replay uses the values
        that `intervals` has then. They are never cached for tensors created in inference mode, which do not record changes, nor for
        those that torch.func wraps, nor while a graph is traced.

        Returns:
            int32 [..., n, 4] in place of the [..., Sk, 2] of `intervals`.
        """
        intervals = self.intervals
        state = tensor_cache.state_of((intervals,))
        if state is None:
            return ops.mask_extremes(intervals)
        known = self._extremes
        if known is None or known[0] is not intervals or known[1] != state:
            with tensor_cache.outside_of_modes():
                known = self._extremes = (intervals, state, ops.mask_extremes(intervals))
        return known[2]

    def __getstate__(self) -> dict[str, Tensor]:
        """Only the intervals are copied and pickled: the version counter of a copy starts at 0 again, so the cache would be wrong."""
        return {"intervals": self.intervals}

    @property
    def device(self) -> torch.device:
        """The device of `intervals`."""
        return self.intervals.device

    @property
    def is_packed(self) -> bool:
        """Whether the mask is for packed calls, with intervals [Hm, total_k, 2]."""
        return self.intervals.dim() == 3

    def to(self, device: torch.device | str) -> Mask:
        """A copy of the mask on another device.

        Args:
            device: the target device.

        Returns:
            A new Mask.
        """
        return Mask(self.intervals.to(device))

    def __and__(self, other: Mask) -> Mask:
        """The intersection: a row sees a key if both masks allow it. A batch of 1, one head and KV heads are expanded."""
        if not isinstance(other, Mask):
            return NotImplemented
        a, b = self.intervals, other.intervals
        batches_fit = a.dim() == b.dim() and (a.dim() == 3 or 1 in (a.shape[0], b.shape[0]) or a.shape[0] == b.shape[0])
        if not batches_fit or a.shape[-2] != b.shape[-2]:
            raise ValueError(
                f"mask: cannot combine intervals of shapes {list(a.shape)} and {list(b.shape)}; expected the same number of keys, and "
                "the same batch size or 1"
            )
        heads = max(a.shape[-3], b.shape[-3])
        if any(x.shape[-3] == 0 or heads % x.shape[-3] for x in (a, b)):
            raise ValueError(
                f"mask: cannot combine intervals of {a.shape[-3]} and {b.shape[-3]} heads; expected one to be a multiple of the other"
            )
        a, b = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (a, b))
        return Mask(torch.stack([torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])], -1))

    def dense(self, Sq: int) -> Tensor:
        """The mask as a dense matrix, without causal and window_size.

        Args:
            Sq: number of queries.

        Returns:
            bool [B or 1, Hm, Sq, Sk], of packed calls [Hm, Sq, total_k]: True where a row sees a key.
        """
        rows = torch.arange(size_of("Sq", Sq), device=self.device)[:, None]
        first, last = self.intervals[..., None, :, 0], self.intervals[..., None, :, 1]
        return (rows >= first) & (rows < last)

    def density(self, Sq: int) -> Tensor:
        """The fraction of all (row, key) pairs that this mask leaves visible, without causal and window_size.

        Args:
            Sq: number of queries.

        Returns:
            float64 scalar in [0, 1], on the mask's device; 0 if there are no pairs.
        """
        Sq = size_of("Sq", Sq)
        first, last = self.intervals.long().clamp(0, Sq).unbind(-1)
        return (last - first).clamp(min=0).double().sum() / max(Sq * first.numel(), 1)

    def show(
        self, Sq: int | None = None, batch: int = 0, head: int = 0, columns: int = 64, figure: bool = False
    ) -> Any:
        """A picture of one head, without causal and window_size. Waits for the device.

        Args:
            Sq: number of queries; None is the number of keys.
            batch: index of the batch entry of `intervals`.
            head: index of the head of `intervals`.
            columns: largest width of the text, in characters.
            figure: return a matplotlib figure instead of text.

        Returns:
            A text in which each character is a cell of several rows and keys: '#' fully visible, '+' partly visible, '.' fully masked;
            or the figure.

        Raises:
            ValueError: there is no such batch entry or head.
            TypeError: figure is not a bool, or a number is not an int.
            ImportError: figure is True and matplotlib is not installed.
        """
        Sq, columns = self.intervals.shape[-2] if Sq is None else Sq, size_of("columns", columns, at_least=1)
        figure = arguments.flag("figure", figure)
        place = {"head": head} if self.is_packed else {"batch": batch, "head": head}
        for (name, index), entries in zip(place.items(), self.intervals.shape, strict=False):
            check_index(name, index, entries, f"intervals of shape {list(self.intervals.shape)}")
        intervals = self.intervals[tuple(place.values())]
        visible = Mask(intervals[None, None].cpu()).dense(Sq)[0, 0]
        return picture_of(visible, columns, figure)

    def __repr__(self) -> str:
        return f"Mask(intervals of shape {list(self.intervals.shape)} on {self.device})"


def _visible_between(cls: type[Mask], one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], rows: int) -> Mask:
    """The Mask of `rows` rows without two hidden ranges, each [first, end) with first <= end."""
    zero, all_rows = torch.zeros_like(one[0]), torch.full_like(one[0], rows)
    # Empty ranges hide nothing; they are moved to row 0, which keeps the ranges in order.
    one, other = ((torch.where(x[0] == x[1], 0, x[0]), torch.where(x[0] == x[1], 0, x[1])) for x in (one, other))
    upper = torch.minimum(one[0], other[0]), torch.where(one[0] <= other[0], one[1], other[1])
    lower = torch.maximum(one[0], other[0]), torch.maximum(one[1], other[1])
    parts = ((zero, upper[0]), (upper[1], lower[0]), (lower[1], all_rows))  # above both, between them, below both
    first, last, visible = all_rows, zero, zero
    for begin, end in parts:
        there = begin < end
        first = torch.where(there, torch.minimum(first, begin), first)
        last = torch.where(there, end, last)
        visible = visible + (end - begin).clamp(min=0)
    reject_keys("startend_row_indices", (visible > 0) & (last - first != visible))
    return cls(torch.stack([torch.where(visible > 0, first, 0), last], -1).int())


_pytree.register_pytree_node(
    Mask,
    lambda mask: ([mask.intervals], None),
    lambda leaves, _context: _unflatten(leaves),
    serialized_type_name="flashattn_ext.Mask",
    flatten_with_keys_fn=lambda mask: ([(_pytree.GetAttrKey("intervals"), mask.intervals)], None),
)


def _unflatten(leaves: Any) -> Mask:
    """A Mask without the checks of __init__: pytree transforms replace tensors by placeholders."""
    mask = object.__new__(Mask)
    (mask.intervals,) = leaves
    return mask


# torch.load (weights_only) and torch.export.load refuse unknown classes. A Mask is safe to load: it holds one tensor.
torch.serialization.add_safe_globals([Mask])
