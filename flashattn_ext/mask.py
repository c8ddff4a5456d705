"""Mask: for every key the one interval of query rows that see it. O(Sk) memory where a dense mask takes Sq x Sk.

One interval for each key says nearly every mask in use: documents packed into a row, padding, prefix-LM, chunks, blocks over causal
text, windows with global keys, trees. It is FlashMask's column representation (Wang et al. 2024, "FlashMask: Efficient and Rich Mask
Extension of FlashAttention") turned round: it holds visible rows where that one holds hidden rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from . import arguments, ops

ALL_ROWS = 2**31 - 1  # an end after every row: intervals are clamped to the rows that exist


class Mask:
    """Which rows see which key.

    Args:
        intervals: int32 [B or 1, Hm, Sk, 2] with Hm of 1, Hk or Hq, for packed calls [Hm, total_k, 2]: (first, last) for each
            key, last exclusive, rows counted within their own sequence. Key j is visible to row i when first <= i < last and the
            causal and window options of the call allow it. last <= first: nobody sees the key. Values outside [0, Sq] mean the
            nearest end.

    Raises:
        TypeError: `intervals` is no int32 tensor.
        ValueError: its shape is another one.
    """

    # The extremes, and what they were made of and for; never those of a graph that torch.compile traces.
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
        """
        first, last = _runs(_integers("ids", ids))
        return cls._of(first, last)

    @classmethod
    def padding(cls, mask: Tensor, side: str = "right", Sk: int | None = None) -> Mask:
        """Keys that nobody may see.

        Args:
            mask: either lengths, integers [B], of `Sk` keys each, with the padding at `side`; or a bool or 0/1 mask [B, Sk], as
                Hugging Face's tokenizers make it, 1 where there is a token (wherever the zeros are).
            side: "right" or "left", where the padding is; of lengths only.
            Sk: number of keys in a row, with lengths; on the CPU the longest length by default. Elsewhere it is wanted, because
                finding the longest one would wait for the device.
        """
        if side not in ("right", "left"):
            raise ValueError(f"side: expected 'right' or 'left', got {side!r}")
        mask = _integers("mask", mask, ranks=(1, 2))
        if mask.dim() == 1:
            if Sk is None and mask.device.type == "cpu":
                Sk = int(mask.max()) if mask.numel() else 0
            if Sk is None:
                raise ValueError(f"Sk: expected the number of keys in a row beside lengths on {mask.device}, got None")
            keys = torch.arange(_size("Sk", Sk), device=mask.device)
            seen = keys < mask[:, None] if side == "right" else keys >= Sk - mask[:, None]
        else:
            seen = mask != 0
        return cls._of(torch.zeros_like(seen, dtype=torch.int64), seen * ALL_ROWS)

    @classmethod
    def prefix_lm(cls, prefix_lengths: Tensor, Sq: int, Sk: int) -> Mask:
        """The first keys of a row are seen by every query, the others causally.

        Args:
            prefix_lengths: integers [B].
            Sq, Sk: number of queries and keys of a row.
        """
        Sq, Sk = _size("Sq", Sq), _size("Sk", Sk)
        lengths = _integers("prefix_lengths", prefix_lengths, ranks=(1,))
        keys = torch.arange(Sk, device=lengths.device)
        return cls._of(torch.where(keys < lengths[:, None], 0, keys - (Sk - Sq)), None)

    @classmethod
    def chunked(cls, size: int, Sq: int, Sk: int, device: torch.device | str | None = None) -> Mask:
        """Chunked attention: a query sees the keys of its own chunk of `size` positions (with causal=True those up to itself).

        Args:
            size: positions of a chunk; the first chunk begins at key 0.
            Sq, Sk: number of queries and keys of a row.
            device: where the mask is made; torch's default device where it is None.
        """
        size, Sq, Sk = _size("size", size, at_least=1), _size("Sq", Sq), _size("Sk", Sk)
        start = torch.arange(Sk, device=device)[None] // size * size - (Sk - Sq)
        return cls._of(start, start + size)

    @classmethod
    def blocks(cls, ids: Tensor) -> Mask:
        """Blocks whose members see each other, over causal text: image tokens in a language model.

        Args:
            ids: integers [B, S]; equal neighbours of 0 and above are one block, below 0 is text. As many queries as keys.
        """
        ids = _integers("ids", ids)
        keys = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return cls._of(torch.where(ids < 0, keys, _runs(ids)[0]), None)

    @classmethod
    def window(
        cls, left: int, right: int, Sq: int, Sk: int, global_keys: int = 0, device: torch.device | str | None = None
    ) -> Mask:
        """A window around every query's own position, and keys that everybody sees.

        Args:
            left, right: keys seen to either side of i + Sk - Sq; -1 is unbounded.
            Sq, Sk: number of queries and keys of a row.
            global_keys: so many of the first keys are seen by every query.
            device: where the mask is made; torch's default device where it is None.
        """
        left, right = _size("left", left, at_least=-1), _size("right", right, at_least=-1)
        Sq, Sk, global_keys = _size("Sq", Sq), _size("Sk", Sk), _size("global_keys", global_keys)
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
            parents: integers [B, S] or [S]: the index of each node's parent, -1 for a root. On the CPU it is checked that the order
                is depth-first; elsewhere that would wait for the device.
        """
        parents = _integers("parents", parents, ranks=(1, 2))
        parents = parents[None] if parents.dim() == 1 else parents
        if parents.device.type == "cpu":
            _check_depth_first(parents)
        nodes = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
        # A subtree ends at its root's last child's last child's ... end. Each round doubles the generations that were walked.
        at = torch.where((parents >= 0) & (parents < nodes), parents, nodes)
        last = nodes.scatter_reduce(1, at, nodes, "amax")
        for _ in range(max(parents.shape[1], 1).bit_length()):
            last = last.gather(1, last)
        return cls._of(nodes, last + 1)

    @classmethod
    def from_flashmask(cls, startend_row_indices: Tensor, causal: bool) -> Mask:
        """FlashMask's hidden rows of each key, as PaddlePaddle's flashmask_attention takes them.

        Args:
            startend_row_indices: int32 [B, 1 or Hk, Sk, n]. With causal: n = 1, rows from it on are hidden; n = 2, rows from the
                first up to the second. Otherwise n = 2: rows from the first on and rows below the second; n = 4: two ranges, of
                the lower left and of the upper right triangle. As many queries as keys.
            causal: as in flashmask_attention; give it to the call as well.

        Raises:
            ValueError: a key is seen by rows that are no single interval; names the first one. Looking for it waits for the device.
        """
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
        # Two ranges of hidden rows at most, [start, end) and [upper_start, upper_end); with causal also all rows above the key.
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
        """The intervals of a bool mask [B or 1, H or 1, Sq, Sk], True where a query sees a key: for tests and small cases.

        Raises:
            ValueError: a key is seen by rows that are no single interval; names the first one. Looking for it waits for the device.
        """
        if visible.dtype != torch.bool:
            raise TypeError(f"visible: expected dtype bool, got {visible.dtype}")
        if visible.dim() != 4:
            raise ValueError(f"visible: expected shape [batch, heads, seqlen_q, seqlen_k], got {list(visible.shape)}")
        rows = torch.arange(visible.shape[2], device=visible.device)[:, None]
        count = visible.sum(2)
        first = torch.where(visible, rows, visible.shape[2]).amin(2) if visible.shape[2] else torch.zeros_like(count)
        last = torch.where(visible, rows + 1, 0).amax(2) if visible.shape[2] else torch.zeros_like(count)
        _reject("visible", (count > 0) & (last - first != count))
        return cls(torch.stack([first, torch.maximum(last, first)], -1).int())

    @classmethod
    def _of(cls, first: Tensor, last: Tensor | None) -> Mask:
        """From [B, Sk]; last None is after every row."""
        last = torch.full_like(first, ALL_ROWS) if last is None else last
        return cls(torch.stack([first, last], -1).clamp(-ALL_ROWS, ALL_ROWS).int()[:, None])

    # --- use --------------------------------------------------------------------------------------------------------

    def extremes(self) -> Tensor:
        """What the kernels know about tiles: int32 [.., n, 4] of `intervals`, computed at the first use and kept.

        It is computed again when `intervals` were written to in place. A CUDA graph that is being captured gets its own, so that a
        replay sees what `intervals` hold by then. Tensors of inference mode do not tell when they change: theirs are never kept.
        """
        intervals = self.intervals
        if torch.compiler.is_compiling() or intervals.is_inference():
            return ops.mask_extremes(intervals)
        made_for = (intervals._version, *ops.place_of_work(intervals.device))
        kept = self._extremes
        if kept is None or kept[0] is not intervals or kept[1] != made_for:
            kept = self._extremes = (intervals, made_for, ops.mask_extremes(intervals))
        return kept[2]

    @property
    def device(self) -> torch.device:
        return self.intervals.device

    @property
    def is_packed(self) -> bool:
        """Whether it is of a packed call: [Hm, total_k, 2]."""
        return self.intervals.dim() == 3

    def to(self, device: torch.device | str) -> Mask:
        """The same mask there; nothing is kept of what was computed here."""
        return Mask(self.intervals.to(device))

    def __and__(self, other: Mask) -> Mask:
        """Rows that both let see; batches of 1 and heads of 1 or of the key heads are expanded."""
        if not isinstance(other, Mask):
            return NotImplemented
        a, b = self.intervals, other.intervals
        batches_fit = a.dim() == b.dim() and (a.dim() == 3 or 1 in (a.shape[0], b.shape[0]) or a.shape[0] == b.shape[0])
        if not batches_fit or a.shape[-2] != b.shape[-2]:
            raise ValueError(f"mask: cannot combine intervals of shapes {list(a.shape)} and {list(b.shape)}")
        heads = max(a.shape[-3], b.shape[-3])
        if any(x.shape[-3] == 0 or heads % x.shape[-3] for x in (a, b)):
            raise ValueError(f"mask: cannot combine intervals of {a.shape[-3]} and {b.shape[-3]} heads")
        a, b = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (a, b))
        return Mask(torch.stack([torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])], -1))

    def dense(self, Sq: int) -> Tensor:
        """bool [B or 1, Hm, Sq, Sk], of packed calls [Hm, Sq, total_k]: True where a row sees a key, causal and window aside."""
        rows = torch.arange(Sq, device=self.device)[:, None]
        first, last = self.intervals[..., None, :, 0], self.intervals[..., None, :, 1]
        return (rows >= first) & (rows < last)

    def density(self, Sq: int) -> Tensor:
        """The visible share of all pairs of a row and a key, causal and window aside; a scalar on the mask's device."""
        first, last = self.intervals.long().clamp(0, Sq).unbind(-1)
        return (last - first).clamp(min=0).double().mean() / max(Sq, 1)

    def show(
        self, Sq: int | None = None, batch: int = 0, head: int = 0, columns: int = 64, figure: bool = False
    ) -> Any:
        """A picture of one head, causal and window aside. Waits for the device.

        Args:
            Sq: number of queries; as many as keys where it is None.
            batch, head: which entry of `intervals`.
            columns: width of the text.
            figure: return a figure of matplotlib.

        Returns:
            A text whose cells of several rows and keys are full, partial or empty: '#', '+', '.'; or the figure.
        """
        Sq = self.intervals.shape[-2] if Sq is None else Sq
        intervals = self.intervals[head] if self.is_packed else self.intervals[batch, head]
        visible = Mask(intervals[None, None].cpu()).dense(Sq)[0, 0]
        if figure:
            from matplotlib import pyplot

            drawn, axes = pyplot.subplots()
            axes.imshow(visible.numpy(), aspect="auto", interpolation="nearest", cmap="Blues")
            axes.set(xlabel="key", ylabel="query")
            return drawn
        Sk = visible.shape[1]
        if Sq == 0 or Sk == 0:
            return ""
        step = max(-(-max(Sq, Sk) // columns), 1)
        lines = []
        for row in range(0, Sq, 2 * step):  # a character is about twice as high as it is wide
            cells = [visible[row : row + 2 * step, key : key + step] for key in range(0, Sk, step)]
            lines.append("".join("#" if cell.all() else "+" if cell.any() else "." for cell in cells))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Mask(intervals of shape {list(self.intervals.shape)} on {self.device})"


def checked_mask(mask: Any) -> Mask:
    """The argument `mask` of a call, where there is one."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        raise TypeError(
            f"mask: expected a flashattn_ext.Mask, got {arguments.described(mask)}; Mask(intervals) or Mask.from_dense(visible) "
            "makes one, and what is no Mask can be given as `bias`, 0 and -inf"
        )
    raise TypeError(f"mask: expected a flashattn_ext.Mask, got {type(mask).__name__}")


def _size(name: str, value: Any, at_least: int = 0) -> int:
    size = arguments.integer(name, value)
    if size < at_least:
        raise ValueError(f"{name}: expected at least {at_least}{' (unbounded)' * (at_least < 0)}, got {size}")
    return size


def _integers(name: str, values: Any, ranks: tuple[int, ...] = (2,)) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(values).__name__}")
    if values.is_floating_point() or values.is_complex():
        raise TypeError(f"{name}: expected an integer or bool dtype, got {values.dtype}")
    if values.dim() not in ranks:
        shapes = " or ".join("[batch]" if rank == 1 else "[batch, seqlen]" for rank in ranks)
        raise ValueError(f"{name}: expected shape {shapes}, got {list(values.shape)}")
    return values.long()


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Start and end (exclusive) of the run of equal neighbours that each element is in; [B, S] each."""
    S = ids.shape[1]
    index = torch.arange(S, device=ids.device).expand_as(ids)
    if S == 0:
        return index, index
    changes = ids[:, 1:] != ids[:, :-1]
    edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
    starts = torch.where(torch.cat([edge, changes], 1), index, 0).cummax(1).values
    ends = torch.where(torch.cat([changes, edge], 1), index + 1, S).flip(1).cummin(1).values.flip(1)
    return starts, ends


def _check_depth_first(parents: Tensor) -> None:
    """Each node's parent is the node before it or one of that one's ancestors: the path from the root to the node before it."""
    for b, row in enumerate(parents.tolist()):
        path: list[int] = []
        for node, parent in enumerate(row):
            while path and path[-1] != parent:
                path.pop()
            if not path and parent != -1:
                raise ValueError(
                    f"parents: expected nodes in depth-first order, each after its parent, got parent {parent} for node {node} "
                    f"of row {b}"
                )
            path.append(node)


def _reject(name: str, bad: Tensor) -> None:
    """bad: bool [B, H, Sk], where a key's rows are no single interval."""
    if bad.any():
        b, h, key = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: the rows that see key {key} of batch entry {b}, head {h} are no single interval; such a mask cannot be a Mask; "
            "give it as `bias`, 0 and -inf"
        )


def _visible_between(cls: type[Mask], one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], rows: int) -> Mask:
    """What two hidden ranges of rows, each [first, end) with first <= end, leave of `rows` rows."""
    zero, all_rows = torch.zeros_like(one[0]), torch.full_like(one[0], rows)
    # An empty range hides nothing wherever it is: it is put at row 0, which keeps the ranges in order.
    one, other = (tuple(torch.where(x[0] == x[1], 0, side) for side in x) for x in (one, other))
    upper = torch.minimum(one[0], other[0]), torch.where(one[0] <= other[0], one[1], other[1])
    lower = torch.maximum(one[0], other[0]), torch.maximum(one[1], other[1])
    parts = ((zero, upper[0]), (upper[1], lower[0]), (lower[1], all_rows))  # above both, between them, below both
    first, last, visible = all_rows, zero, zero
    for begin, end in parts:
        there = begin < end
        first = torch.where(there, torch.minimum(first, begin), first)
        last = torch.where(there, end, last)
        visible = visible + (end - begin).clamp(min=0)
    _reject("startend_row_indices", (visible > 0) & (last - first != visible))
    return cls(torch.stack([torch.where(visible > 0, first, 0), last], -1).int())


_pytree.register_pytree_node(
    Mask,
    lambda mask: ([mask.intervals], None),
    lambda leaves, _context: _unflatten(leaves),
    serialized_type_name="flashattn_ext.Mask",
    flatten_with_keys_fn=lambda mask: ([(_pytree.GetAttrKey("intervals"), mask.intervals)], None),
)


def _unflatten(leaves: Any) -> Mask:
    """Without checks: torch puts placeholders in the place of tensors."""
    mask = object.__new__(Mask)
    (mask.intervals,) = leaves
    return mask
