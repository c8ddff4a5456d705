"""The grid and bits (block_lists.py) of a mask that can be evaluated anywhere: made a few strips of 128 rows at a time.

A Strip gives what some heads see in some rows; strip_of_function(), strip_of_flex() and so on make one. Every strip is evaluated twice
where the mask is too large to keep what the first time gave: once to count the blocks that need bits, and once for the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import block_lists
from .block_lists import BLOCK, BYTES, HIDDEN, WHOLE, WORDS, blocks_in

_MOST_PAIRS = 1 << 20  # evaluated at once, or a strip of one head: temporaries of 16 bytes each are 16 MB
# Pairs of a matrix on a GPU, whose temporaries have 5 bytes each: the launches of a strip cost more than its pairs.
_MOST_DENSE_PAIRS = 4 << 20
_MOST_KEPT = 16 << 20  # bytes of bits of all blocks, up to which no strip is evaluated again


class Part(NamedTuple):
    """Batch entries, heads and rows that are evaluated at once."""

    batch: slice
    heads: slice
    rows: slice

    def numbers(self, device: torch.device) -> list[Tensor]:
        """int64 [..] of each."""
        return [torch.arange(part.start, part.stop, device=device) for part in self]


# bool, broadcastable to [batch, heads, rows, Sk] of a part.
Strip = Callable[[Part], Tensor]


def _parts(B: int, H: int, Sq: int, Sk: int, most_pairs: int) -> Iterator[Part]:
    strips = max(most_pairs // max(BLOCK * blocks_in(Sk) * BLOCK, 1), 1)
    rows = min(strips, max(blocks_in(Sq), 1))
    heads = min(max(strips // max(blocks_in(Sq), 1), 1), max(H, 1))
    batch = max(strips // max(blocks_in(Sq) * H, 1), 1)
    for b in range(0, B, batch):
        for h in range(0, H, heads):
            for row in range(0, Sq, rows * BLOCK):
                yield Part(
                    slice(b, min(b + batch, B)), slice(h, min(h + heads, H)), slice(row, min(row + rows * BLOCK, Sq))
                )


def evaluated(
    strip: Strip, shape: tuple[int, int, int, int], device: torch.device, max_partial: int | None, is_dense: bool
) -> tuple[Tensor, Tensor, int]:
    """Grid and bits of a mask of this shape [B, Hm, Sq, Sk], and the largest number of entries of a head.

    is_dense: the strips are parts of a matrix that is in memory.

    Waits for the device, once, unless max_partial bounds the number of blocks with bits.
    """
    B, H, Sq, Sk = shape
    R, C = blocks_in(Sq), blocks_in(Sk)
    in_keys = block_lists.packed(torch.arange(C * BLOCK, device=device).expand(1, 1, BLOCK, -1) < Sk)

    def bits_of(part: Part) -> Tensor:
        """int32 [b, h, r, C, 128, 4]"""
        sizes = [each.stop - each.start for each in part]
        whole_rows = blocks_in(sizes[2]) * BLOCK
        visible = torch.zeros(sizes[0], sizes[1], whole_rows, C * BLOCK, dtype=torch.bool, device=device)
        visible[:, :, : sizes[2], :Sk] = strip(part)
        return block_lists.packed(visible)

    def blocks_of(part: Part) -> tuple[slice, slice, slice]:
        return part.batch, part.heads, slice(part.rows.start // BLOCK, blocks_in(part.rows.stop))

    grid = torch.full((B, H, R, C), HIDDEN, dtype=torch.int32, device=device)
    keeps = B * H * R * C * BYTES <= _MOST_KEPT
    kept: list[Tensor] = []
    most_pairs = _MOST_DENSE_PAIRS if is_dense and device.type != "cpu" else _MOST_PAIRS
    parts = list(_parts(B, H, Sq, Sk, most_pairs)) if C else []
    for part in parts:
        bits = bits_of(part)
        row = torch.arange(blocks_of(part)[2].start * BLOCK, blocks_of(part)[2].stop * BLOCK, device=device)
        all_of_it = in_keys * (row < Sq).view(1, 1, -1, 1, BLOCK, 1)
        is_seen, is_whole = (bits != 0).flatten(4).any(4), (bits == all_of_it).flatten(4).all(4)
        grid[blocks_of(part)] = torch.where(is_whole, WHOLE, torch.where(is_seen, 0, HIDDEN)).int()
        if keeps:
            kept.append(bits)

    has_bits = grid == 0
    entries = R * C
    if max_partial is None:
        most, count = (
            torch.stack([(grid != HIDDEN).sum((2, 3)).amax(), has_bits.sum()]).tolist() if grid.numel() else (0, 0)
        )
        entries, max_partial = int(most), int(count)
    numbers = has_bits.flatten().cumsum(0, dtype=torch.int32).view(grid.shape) - 1
    grid = torch.where(has_bits, numbers, grid)
    # The last block receives the bits that nothing reads: of whole and hidden blocks, and those past max_partial.
    all_bits = torch.zeros(max_partial + 1, BLOCK, WORDS, dtype=torch.int32, device=device)
    for n, part in enumerate(parts if max_partial else []):
        number = grid[blocks_of(part)]
        number = torch.where((number < 0) | (number > max_partial), max_partial, number)
        all_bits[number.flatten().long()] = (kept[n] if keeps else bits_of(part)).flatten(0, 3)
    return grid, all_bits[:max_partial], entries


# --- strips -------------------------------------------------------------------------------------------------------------


def strip_of_dense(visible: Tensor) -> Strip:
    return lambda part: visible[part]


def strip_of_intervals(intervals: Tensor) -> Strip:
    """Of the intervals [B or 1, Hm, Sk, 2] of a Mask."""

    def strip(part: Part) -> Tensor:
        of_part = intervals[part.batch, part.heads]
        row = part.numbers(intervals.device)[2][:, None]
        return (row >= of_part[..., None, :, 0]) & (row < of_part[..., None, :, 1])

    return strip


def strip_of_function(function: Callable[..., Any], Sk: int, device: torch.device, has: tuple[bool, bool]) -> Strip:
    """Of f(b, h, i, j). has: whether batch entries and heads differ; the function gets 0 otherwise.

    It is called as FlexAttention calls a mask_mod, with the numbers of one pair under torch.vmap; a function that does not run there,
    with tensors that broadcast.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    key = torch.arange(Sk, device=device)

    def strip(part: Part) -> Tensor:
        b, h, i = part.numbers(device)
        numbers = (b if has[0] else zero, h if has[1] else zero, i, key)
        try:
            visible = _mapped(function, numbers)
        except Exception:
            visible = function(*(n.view(-1, *[1] * (3 - axis)) for axis, n in enumerate(numbers)))
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
            raise TypeError(f"f: expected a function that returns a bool tensor, got {got}")
        sizes = (len(b), len(h), len(i), Sk)
        try:
            return visible.expand(sizes)
        except RuntimeError:
            raise ValueError(
                f"f: expected a result that broadcasts to {list(sizes)} for indices of shapes [{sizes[0]}, 1, 1, 1], [{sizes[1]}, 1, 1], "
                f"[{sizes[2]}, 1] and [{sizes[3]}], got shape {list(visible.shape)}"
            ) from None

    return strip


def _mapped(function: Callable[..., Any], numbers: tuple[Tensor, ...]) -> Tensor:
    """The function under torch.vmap over b, h, i and j, [b, h, i, j]; dimensions of a scalar are 1."""
    mapped = function
    for axis in (3, 2, 1, 0):
        if numbers[axis].dim():
            mapped = torch.vmap(mapped, tuple(0 if n == axis else None for n in range(4)))
    visible: Tensor = mapped(*numbers)
    for axis in (0, 1):
        visible = visible if numbers[axis].dim() else visible.unsqueeze(axis)
    return visible


def strip_of_flex(mask: Any, Sk: int) -> Strip:
    """Of torch's BlockMask: blocks of its lists are seen whole, or where its mask_mod says so."""
    rows, keys = mask.BLOCK_SIZE
    device = mask.kv_indices.device

    def listed(counts: Tensor | None, indices: Tensor | None) -> Tensor | None:
        """bool [B, H, blocks of rows, blocks of keys]"""
        if counts is None or indices is None:
            return None
        columns = (Sk + keys - 1) // keys
        valid = torch.arange(indices.shape[3], device=device) < counts[..., None]
        seen = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=device)
        return seen.scatter_(3, torch.where(valid, indices, columns).long(), True)[..., :columns]

    whole, partial = (
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        listed(mask.kv_num_blocks, mask.kv_indices),
    )
    assert partial is not None
    column = torch.arange(Sk, device=device) // keys
    of_function = strip_of_function(mask.mask_mod, Sk, device, (True, True))

    def strip(part: Part) -> Tensor:
        row = part.numbers(device)[2] // rows

        def pairs(blocks: Tensor) -> Tensor:
            return blocks[part.batch, part.heads][:, :, row][..., column]

        visible = pairs(partial) & of_function(part)
        return visible if whole is None else visible | pairs(whole)

    return strip
