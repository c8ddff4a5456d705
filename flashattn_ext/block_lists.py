"""The two tensors of a BlockMask: `lists`, which blocks of 128 rows x 128 keys a row or a key has, and `bits`, what of a block is visible.

csrc/rules/mask.h describes their layout, which kernels read. In between stands the grid of a mask: int32 [B or 1, Hm, R, C],
for every block of rows and of keys HIDDEN, WHOLE, or the number of its bits. Only constructors, `&` and what shows a mask make one.
Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # rows and keys of a block: kMaskBlock in csrc/rules/mask.h
HALF = BLOCK // 2  # from_blocks() takes multiples of it
HIDDEN = -2
WHOLE = HIDDEN + 1
WORDS = BLOCK // 32  # of a row of a block
BYTES = 4 * BLOCK * WORDS  # of the bits of a block


def blocks_in(length: int) -> int:
    return (length + BLOCK - 1) // BLOCK


def _words_of_starts(rows: int, keys: int) -> int:
    """The words of a head after its entries; a multiple of 4, so that the entries of every head are aligned."""
    return (rows + 1 + keys + 1 + 3) // 4 * 4


# --- lists --------------------------------------------------------------------------------------------------------------


def _by_rows(grid: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Entries [..., 2 * capacity] of all blocks of a grid [..., R, C] that are not hidden, row by row, and starts [..., R + 1].

    A router calls this in every step, and each operation is a launch: there are as few as possible.
    """
    columns = torch.arange(grid.shape[-1], dtype=torch.int32, device=grid.device)
    visible = grid != HIDDEN
    within = visible.cumsum(-1, dtype=torch.int32)  # along C and along R apart: many short scans
    counts = within[..., -1] if len(columns) else grid.new_zeros(grid.shape[:-1])
    starts = torch.nn.functional.pad(counts.cumsum(-1, dtype=torch.int32), (1, 0))
    # Places count from 1. Hidden blocks go to place 0, which is cut off. An entry is copied as one number of 64 bits.
    place = (within + starts[..., :-1, None]) * visible
    entries = torch.stack([columns.expand_as(grid), grid], -1).view(torch.int64)
    listed = torch.zeros(*grid.shape[:-2], 1 + capacity, dtype=torch.int64, device=grid.device)
    listed.scatter_(-1, place.flatten(-2).long(), entries.flatten(-3))
    return listed[..., 1:].view(torch.int32), starts


def lists_of(grid: Tensor, capacity: int) -> Tensor:
    """The lists of a grid, int32 [B or 1, Hm, L]. capacity: at least the number of blocks that are not hidden, in every head."""
    rows, keys = grid.shape[2:]
    if rows == keys:  # both lists at once
        entries, starts = _by_rows(torch.stack([grid, grid.transpose(2, 3)]), capacity)
        parts = [*entries, *starts]
    else:
        by_rows, row_starts = _by_rows(grid, capacity)
        by_keys, key_starts = _by_rows(grid.transpose(2, 3).contiguous(), capacity)
        parts = [by_rows, by_keys, row_starts, key_starts]
    rest = grid.new_zeros(*grid.shape[:2], _words_of_starts(rows, keys) - (rows + 1 + keys + 1))
    return torch.cat([*parts, rest], 2)


def grid_of(lists: Tensor, Sq: int, Sk: int) -> Tensor:
    """The grid of lists."""
    rows, columns = blocks_in(Sq), blocks_in(Sk)
    capacity = (lists.shape[2] - _words_of_starts(rows, columns)) // 4
    grid = lists.new_full((*lists.shape[:2], rows * columns + 1), HIDDEN)
    if rows * columns and capacity:
        entries = lists[..., : 2 * capacity].unflatten(2, (capacity, 2))
        starts = lists[..., 4 * capacity :][..., : rows + 1].contiguous()
        numbers = torch.arange(capacity, dtype=torch.int32, device=lists.device)
        row = torch.searchsorted(starts, numbers.expand(*lists.shape[:2], -1).contiguous(), right=True) - 1
        place = torch.where(numbers < starts[..., -1:], row * columns + entries[..., 0], rows * columns)
        grid.scatter_(2, place, entries[..., 1])
    found: Tensor = grid[..., :-1].unflatten(2, (rows, columns))
    return found


# --- bits ---------------------------------------------------------------------------------------------------------------


def packed(visible: Tensor) -> Tensor:
    """bool [B, H, rows, keys], whole blocks -> int32 [B, H, R, C, 128, 4]."""
    # The product moves byte k of eight bytes of 0 or 1, at bit 8 k, to bit 56 + k; no two of its other terms meet.
    # The inductor of torch 2.11 cannot take the bytes of bools for another type.
    flags = visible.to(torch.uint8) if torch.compiler.is_compiling() else visible
    B, H, rows, keys = visible.shape
    eights = flags.reshape(B, H, rows, keys // 8, 8).contiguous().view(torch.int64)
    octets = (eights * 0x0102040810204080 >> 56).to(torch.uint8)
    blocks = octets.view(B, H, rows // BLOCK, BLOCK, keys // BLOCK, BLOCK // 8)
    return blocks.transpose(3, 4).contiguous().view(torch.int32)


def unpacked(bits: Tensor) -> Tensor:
    """int32 [..., 128, 4] -> bool [..., 128, 128]."""
    octets = bits.contiguous().view(torch.uint8)[..., None]
    return ((octets >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1).bool().flatten(-2)


def dense_of(grid: Tensor, bits: Tensor, Sq: int, Sk: int) -> Tensor:
    """bool [B or 1, Hm, Sq, Sk]."""
    visible = (grid == WHOLE)[..., None, None].expand(*grid.shape, BLOCK, BLOCK)
    if bits.shape[0]:
        of_bits = unpacked(bits)[grid.clamp(min=0).long()]
        visible = torch.where((grid < 0)[..., None, None], visible, of_bits)
    return visible.transpose(3, 4).flatten(4).flatten(2, 3)[:, :, :Sq, :Sk].contiguous()


def rows_of(grid: Tensor, bits: Tensor, rows: Tensor, Sk: int) -> Tensor:
    """bool [B or 1, Hm, n, Sk] for rows [n]."""
    of_rows = grid[:, :, rows // BLOCK]
    visible = (of_rows == WHOLE)[..., None].expand(*of_rows.shape, BLOCK)
    if bits.shape[0]:
        words = bits[of_rows.clamp(min=0).long(), (rows % BLOCK)[:, None]]
        visible = torch.where((of_rows < 0)[..., None], visible, unpacked(words))
    return visible.flatten(3)[..., :Sk]


def visible_pairs(grid: Tensor, bits: Tensor, Sq: int, Sk: int) -> Tensor:
    """The number of visible pairs over all heads and batch entries, an int64 scalar."""
    rows, columns = grid.shape[2:]
    if rows * columns == 0:
        return grid.new_zeros((), dtype=torch.int64)

    def sizes(blocks: int, length: int) -> Tensor:
        return (length - torch.arange(blocks, device=grid.device) * BLOCK).clamp(max=BLOCK)

    count = (sizes(rows, Sq)[:, None] * sizes(columns, Sk)) * (grid == WHOLE)
    if bits.shape[0]:
        # `pairs` [P, 2, 2] counts the visible pairs of each block: all, and those within the last rows or keys.
        visible = unpacked(bits)
        last_rows, last_keys = Sq - (rows - 1) * BLOCK, Sk - (columns - 1) * BLOCK
        pairs = torch.stack([visible[:, :r, :k].sum((1, 2)) for r in (BLOCK, last_rows) for k in (BLOCK, last_keys)], 1)
        at_end = [torch.arange(n, device=grid.device) == n - 1 for n in (rows, columns)]
        kind = at_end[0].long()[:, None] * 2 + at_end[1].long()
        count = torch.where(grid < 0, count, pairs[grid.clamp(min=0).long(), kind.expand(grid.shape)])
    return count.sum()


# --- blocks of other sizes ----------------------------------------------------------------------------------------------


def _quarters(device: torch.device) -> Tensor:
    """The bits of all 16 choices of a block's quarters: int32 [16, 128, 4]. Bit 0 of a choice is the quarter of the first rows and keys,
    bit 1 that of the first rows and last keys."""
    choices = torch.arange(16, device=device)[:, None] >> torch.arange(4, device=device) & 1
    quarters = choices.bool().view(1, 16, 2, 2).repeat_interleave(HALF, 2).repeat_interleave(HALF, 3)
    return packed(quarters).flatten(0, 3)


def of_blocks(visible: Tensor, Sq: int, Sk: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Grid and bits of bool [B or 1, Hm, ceil(Sq / sizes[0]), ceil(Sk / sizes[1])]; both sizes are multiples of 64.

    Sizes that are no multiple of 128 need bits, but only those of 16 blocks: what of a block is visible are quarters.
    """

    def spread(unit: int) -> Tensor:
        """The same for blocks of `unit` rows and keys, as many as the sequences have."""
        if sizes == (unit, unit):
            return visible
        rows, keys = ((length + unit - 1) // unit for length in (Sq, Sk))
        row, key = (
            torch.arange(n, device=visible.device) * unit // size
            for n, size in zip((rows, keys), sizes, strict=True)
        )  # fmt: skip
        return visible[:, :, row][..., key]

    if not any(size % BLOCK for size in sizes):
        return spread(BLOCK).int() + HIDDEN, torch.empty(0, BLOCK, WORDS, dtype=torch.int32, device=visible.device)
    halves = spread(HALF)
    rows, columns = blocks_in(Sq), blocks_in(Sk)
    padding = (0, 2 * columns - halves.shape[3], 0, 2 * rows - halves.shape[2])
    weights = (1 << torch.arange(4, dtype=torch.int32, device=visible.device)).view(2, 2)

    def choices(of_halves: Tensor) -> Tensor:
        whole = torch.nn.functional.pad(of_halves.int(), padding)
        made: Tensor = (whole.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)) * weights[:, None]).sum(
            (3, 5), dtype=torch.int32
        )
        return made

    chosen, all_of_them = choices(halves), choices(torch.ones_like(halves[:1, :1]))
    grid = torch.where(chosen == 0, HIDDEN, torch.where(chosen == all_of_them, WHOLE, chosen)).int()
    return grid, _quarters(visible.device)
