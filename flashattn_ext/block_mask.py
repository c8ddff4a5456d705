"""BlockMask: any set of visible (row, key) pairs, as lists of blocks of 128 rows x 128 keys. Memory follows the visible blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from . import arguments, block_lists, block_strips
from .block_lists import BLOCK, HALF, HIDDEN, WHOLE, WORDS, blocks_in
from .mask import Mask
from .mask_arguments import check_index, size_of
from .mask_picture import picture_of


class BlockMask:
    """Which query rows see which key: any pairs, as lists of the blocks of 128 rows x 128 keys in which some pair is visible.

    A block that is wholly visible costs an entry of 16 bytes (8 in the list of its rows, 8 in that of its keys), one that is partly
    visible also 2 KB of bits, a hidden one nothing. Key j is visible to row i if the mask and the causal and window options of the
    call allow it. Make one with from_blocks, from_function, from_dense, from_flex or from_mask, once a step, and pass it to every layer.
    The constructor itself puts the tensors of a mask together again.

    Args:
        lists: int32 [B or 1, Hm, L], the blocks of each row and key of blocks, with Hm of 1, Hk or Hq; csrc/rules/mask.h describes
            the layout. On the CPU every call checks the values. Elsewhere nothing does: results of other lists than those of a BlockMask
            mean nothing, and a deterministic backward may never end.
        bits: int32 [P, 128, 4], the visible pairs of partly visible blocks.
        Sq: number of rows.
        Sk: number of keys.

    Raises:
        TypeError: `lists` or `bits` is not an int32 tensor.
        ValueError: `lists` or `bits` has another shape.

    Source: block masks of FlexAttention (Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention
    Kernels"), with bits in place of a function that kernels call.
    """

    def __init__(self, lists: Tensor, bits: Tensor, Sq: int, Sk: int) -> None:
        for name, t in (("lists", lists), ("bits", bits)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
            if t.dtype != torch.int32:
                raise TypeError(f"{name}: expected dtype int32, got {t.dtype}")
        if lists.dim() != 3:
            raise ValueError(f"lists: expected shape [batch or 1, heads, words], got {list(lists.shape)}")
        if bits.dim() != 3 or bits.shape[1:] != (BLOCK, WORDS):
            raise ValueError(f"bits: expected shape [blocks, {BLOCK}, {WORDS}], got {list(bits.shape)}")
        self.lists = lists
        self.bits = bits
        self.Sq = Sq
        self.Sk = Sk

    # --- constructors -----------------------------------------------------------------------------------------------

    @classmethod
    def from_blocks(cls, visible: Tensor, Sq: int, Sk: int, block_size: int | tuple[int, int] = BLOCK) -> BlockMask:
        """Blocks that are visible as a whole: what a router, a top-k or a static pattern chooses.

        Never waits for the device, and runs in CUDA graphs and under torch.compile(fullgraph=True). The lists are as long as if every
        block were visible: 16 bytes for each block of 128 x 128, 1/1024 of a byte for each pair.

        Args:
            visible: bool [B or 1, Hm, ceil(Sq / bq), ceil(Sk / bk)].
            Sq: number of rows.
            Sk: number of keys.
            block_size: rows and keys of a block, (bq, bk) or one number for both; multiples of 64.

        Returns:
            A BlockMask on the device of `visible`.

        Raises:
            TypeError: `visible` is not a bool tensor, or a number is not an int.
            ValueError: the shape or the block size is not as described. Calls refuse a mask of more than 2^31 - 1 blocks of 128 x 128 in a
                head.
        """
        _check_bool(visible)
        Sq, Sk = size_of("Sq", Sq), size_of("Sk", Sk)
        sizes = _block_sizes(block_size)
        expected = [-(-Sq // sizes[0]), -(-Sk // sizes[1])]
        if visible.dim() != 4 or list(visible.shape[2:]) != expected:
            raise ValueError(
                f"visible: expected shape [batch or 1, heads, {expected[0]}, {expected[1]}], blocks of {sizes[0]} x {sizes[1]} for Sq={Sq} "
                f"and Sk={Sk}, got {list(visible.shape)}"
            )
        grid, bits = block_lists.of_blocks(visible, Sq, Sk, sizes)
        return cls(block_lists.lists_of(grid, blocks_in(Sq) * blocks_in(Sk)), bits, Sq, Sk)

    @classmethod
    def from_function(
        cls, f: Callable[..., Any], B: int | None, H: int | None, Sq: int, Sk: int,
        device: torch.device | str | None = None, max_partial: int | None = None,
    ) -> BlockMask:  # fmt: skip
        """The pairs for which a function is true: FlexAttention's mask_mod.

        Evaluated for a few strips of 128 rows at a time: besides the result it takes at most 64 MB, or a strip of one head if that is
        more. Waits for the device once, to size the bits, unless max_partial is given.

        Args:
            f: f(b, h, i, j) -> bool tensor for a batch entry, head, row and key, int64 tensors: as FlexAttention calls it, for one pair
                under torch.vmap. A function that cannot run so gets tensors that broadcast, [B, 1, 1, 1], [H, 1, 1], [rows, 1] and [Sk].
            B: number of batch entries; None is one for all, and f gets 0.
            H: number of heads, Hk or Hq; None is one for all, and f gets 0.
            Sq: number of rows.
            Sk: number of keys.
            device: where f is evaluated and the mask is made; None is torch's default device.
            max_partial: a bound on the number of partly visible blocks, over all heads and batch entries. If there are more, the mask is
                refused where it is used on the CPU, and rows of results are NaN on devices that cannot raise.

        Returns:
            A BlockMask of [B or 1, H or 1, Sq, Sk].

        Raises:
            TypeError: f does not return a bool tensor, or a number is not an int.
            ValueError: the result of f has another shape, or a size is negative.
        """
        if not callable(f):
            raise TypeError(f"f: expected a function of (b, h, i, j), got {type(f).__name__}")
        Sq, Sk = size_of("Sq", Sq), size_of("Sk", Sk)
        counts = [1 if n is None else size_of(name, n) for name, n in (("B", B), ("H", H))]
        on = torch.empty(0, device=device).device
        strip = block_strips.strip_of_function(f, Sk, on, (B is not None, H is not None))
        return cls._of_strips(strip, (counts[0], counts[1], Sq, Sk), on, max_partial)

    @classmethod
    def from_dense(cls, visible: Tensor, max_partial: int | None = None) -> BlockMask:
        """The BlockMask of a dense matrix. Waits for the device once, to size the bits, unless max_partial is given.

        Args:
            visible: bool [B or 1, Hm, Sq, Sk], True where a row sees a key.
            max_partial: as in from_function.

        Returns:
            A BlockMask on the device of `visible`.

        Raises:
            TypeError: `visible` is not a bool tensor.
            ValueError: it has another shape.
        """
        _check_bool(visible)
        if visible.dim() != 4:
            raise ValueError(
                f"visible: expected shape [batch or 1, heads, seqlen_q, seqlen_k], got {list(visible.shape)}"
            )
        B, H, Sq, Sk = visible.shape
        strip = block_strips.strip_of_dense(visible)
        return cls._of_strips(strip, (B, H, Sq, Sk), visible.device, max_partial, is_dense=True)

    @classmethod
    def from_flex(cls, block_mask: Any, max_partial: int | None = None) -> BlockMask:
        """FlexAttention's BlockMask: the pairs of its full blocks, and those of its other blocks for which its mask_mod is true.

        Waits for the device once, to size the bits, unless max_partial is given.

        Args:
            block_mask: a torch.nn.attention.flex_attention.BlockMask, for instance from create_block_mask; its block sizes are multiples of 64.
            max_partial: as in from_function.

        Returns:
            A BlockMask on the device of `block_mask`.

        Raises:
            TypeError: `block_mask` is not such a mask.
            ValueError: its block sizes are no multiples of 64.
        """
        from torch.nn.attention import flex_attention  # a second to import: only those who have such a mask pay it

        if not isinstance(block_mask, flex_attention.BlockMask):
            raise TypeError(
                f"block_mask: expected a torch.nn.attention.flex_attention.BlockMask, got {type(block_mask).__name__}"
            )
        _block_sizes(block_mask.BLOCK_SIZE)
        (B, H), (Sq, Sk) = block_mask.kv_num_blocks.shape[:2], block_mask.seq_lengths
        strip = block_strips.strip_of_flex(block_mask, Sk)
        return cls._of_strips(strip, (B, H, Sq, Sk), block_mask.kv_indices.device, max_partial)

    @classmethod
    def from_mask(cls, mask: Mask, Sq: int, max_partial: int | None = None) -> BlockMask:
        """The BlockMask of a Mask, to combine it with one. Alone, a Mask takes less memory and is as fast.

        Waits for the device once, to size the bits, unless max_partial is given.

        Args:
            mask: a Mask with intervals [B or 1, Hm, Sk, 2].
            Sq: number of rows.
            max_partial: as in from_function.

        Returns:
            A BlockMask on the device of `mask`.

        Raises:
            TypeError: `mask` is not a Mask, or Sq is not an int.
            ValueError: `mask` is for packed calls.
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"mask: expected a flashattn_ext.Mask, got {type(mask).__name__}")
        if mask.is_packed:
            raise ValueError(
                f"mask: expected intervals [batch or 1, heads, seqlen_k, 2], got {list(mask.intervals.shape)}, a Mask for packed calls; a "
                "BlockMask is for dense calls"
            )
        B, H, Sk = mask.intervals.shape[:3]
        strip = block_strips.strip_of_intervals(mask.intervals)
        return cls._of_strips(strip, (B, H, size_of("Sq", Sq), Sk), mask.device, max_partial)

    @classmethod
    def _of_strips(
        cls, strip: block_strips.Strip, shape: tuple[int, int, int, int], device: torch.device, max_partial: int | None,
        is_dense: bool = False,
    ) -> BlockMask:  # fmt: skip
        bound = None if max_partial is None else size_of("max_partial", max_partial)
        grid, bits, entries = block_strips.evaluated(strip, shape, device, bound, is_dense)
        return cls(block_lists.lists_of(grid, entries), bits, *shape[2:])

    # --- use --------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape of the dense matrix, [B or 1, Hm, Sq, Sk]."""
        return torch.Size((*self.lists.shape[:2], self.Sq, self.Sk))

    @property
    def device(self) -> torch.device:
        """The device of the mask."""
        return self.lists.device

    @property
    def nbytes(self) -> int:
        """The memory of lists and bits, in bytes."""
        return self.lists.nbytes + self.bits.nbytes

    def to(self, device: torch.device | str) -> BlockMask:
        """A copy of the mask on another device.

        Args:
            device: the target device.

        Returns:
            A new BlockMask.
        """
        return BlockMask(self.lists.to(device), self.bits.to(device), self.Sq, self.Sk)

    def __and__(self, other: BlockMask | Mask) -> BlockMask:
        """The intersection: a row sees a key if both masks allow it. A batch of 1, one head and KV heads are expanded.

        Waits for the device if one of the masks has bits or is a Mask, to size the bits of the result.
        """
        if isinstance(other, Mask):
            other = BlockMask.from_mask(other, self.Sq)
        if not isinstance(other, BlockMask):
            return NotImplemented
        heads = max(self.shape[1], other.shape[1])
        batches = {self.shape[0], other.shape[0]}
        if self.shape[2:] != other.shape[2:] or len(batches - {1}) > 1:
            raise ValueError(
                f"mask: cannot combine masks of shapes {list(self.shape)} and {list(other.shape)}; expected the same numbers of rows and "
                "keys, and the same batch size or 1"
            )
        if any(mask.shape[1] == 0 or heads % mask.shape[1] for mask in (self, other)):
            raise ValueError(
                f"mask: cannot combine masks of {self.shape[1]} and {other.shape[1]} heads; expected one to be a multiple of the other"
            )
        batch = 0 if 0 in batches else max(batches)
        a, b = (
            mask._grid().repeat_interleave(heads // mask.shape[1], 1).expand(batch, -1, -1, -1)
            for mask in (self, other)
        )
        grid = torch.where((a == HIDDEN) | (b == HIDDEN), HIDDEN, WHOLE).int()
        if self.bits.shape[0] + other.bits.shape[0] == 0:
            return BlockMask(block_lists.lists_of(grid, grid.shape[2] * grid.shape[3]), self.bits, self.Sq, self.Sk)
        has_bits = (grid == WHOLE) & ((a >= 0) | (b >= 0))
        places = has_bits.flatten().nonzero()[:, 0]
        bits = self._bits_of(a, places) & other._bits_of(b, places)
        numbers = torch.arange(len(places), dtype=torch.int32, device=self.device)
        is_seen = bits.flatten(1).any(1)
        grid.view(-1)[places] = torch.where(is_seen, numbers, HIDDEN).int()
        entries = int((grid != HIDDEN).sum((2, 3)).amax()) if grid.numel() else 0
        return BlockMask(block_lists.lists_of(grid, entries), bits, self.Sq, self.Sk)

    __rand__ = __and__

    def _grid(self) -> Tensor:
        """The grid of block_lists.py.

        Raises:
            ValueError: there are more blocks with bits than max_partial allowed, on the CPU.
        """
        grid = block_lists.grid_of(self.lists, self.Sq, self.Sk)
        if self.device.type == "cpu" and grid.numel() and int(grid.amax()) >= self.bits.shape[0]:
            raise ValueError(
                f"mask: expected at most max_partial={self.bits.shape[0]} partly visible blocks, got a BlockMask with more; make it with a "
                "larger max_partial, or without"
            )
        return grid

    def _bits_of(self, grid: Tensor, places: Tensor) -> Tensor:
        """The bits [n, 128, 4] of blocks of the grid, given by their places in it; all bits of a whole block."""
        numbers = grid.reshape(-1)[places]
        if not self.bits.shape[0]:
            return torch.full((len(places), BLOCK, WORDS), -1, dtype=torch.int32, device=self.device)
        return torch.where((numbers < 0)[:, None, None], -1, self.bits[numbers.clamp(min=0).long()])

    def dense(self, rows: Tensor | None = None) -> Tensor:
        """The mask as a dense matrix, without causal and window_size.

        Args:
            rows: int64 [n], the rows to return, each from 0 to Sq - 1; None is all rows.

        Returns:
            bool [B or 1, Hm, Sq or n, Sk]: True where a row sees a key.
        """
        if rows is not None:
            return block_lists.rows_of(self._grid(), self.bits, rows, self.Sk)
        return block_lists.dense_of(self._grid(), self.bits, self.Sq, self.Sk)

    def density(self) -> Tensor:
        """The fraction of all (row, key) pairs that this mask leaves visible, without causal and window_size.

        Returns:
            float64 scalar in [0, 1], on the mask's device; 0 if there are no pairs.
        """
        pairs = block_lists.visible_pairs(self._grid(), self.bits, self.Sq, self.Sk)
        return pairs.double() / max(self.shape.numel(), 1)

    def show(self, batch: int = 0, head: int = 0, columns: int = 64, figure: bool = False) -> Any:
        """A picture of one head, without causal and window_size. Waits for the device.

        Args:
            batch: index of the batch entry of the mask.
            head: index of the head of the mask.
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
        columns, figure = size_of("columns", columns, at_least=1), arguments.flag("figure", figure)
        for name, index, entries in zip(("batch", "head"), (batch, head), self.shape, strict=False):
            check_index(name, index, entries, f"a mask of shape {list(self.shape)}")
        one = BlockMask(self.lists[batch][head][None, None].cpu(), self.bits.cpu(), self.Sq, self.Sk)
        return picture_of(one.dense()[0, 0], columns, figure)

    def __repr__(self) -> str:
        return f"BlockMask(of shape {list(self.shape)} on {self.device})"


def checked_mask(mask: Any) -> Mask | BlockMask:
    """The argument `mask` of a call, if it is a mask."""
    if isinstance(mask, (Mask, BlockMask)):
        return mask
    if isinstance(mask, Tensor):
        raise TypeError(
            f"mask: expected a flashattn_ext.Mask or BlockMask, got {arguments.described(mask)}; Mask(intervals), Mask.from_dense(visible) "
            "or BlockMask.from_dense(visible) makes one; pass a mask of other numbers as `bias`, with 0 for visible and -inf for hidden keys"
        )
    of_flex = type(mask).__module__ == "torch.nn.attention.flex_attention"
    remedy = "; BlockMask.from_flex(mask) makes one" if of_flex else ""
    raise TypeError(f"mask: expected a flashattn_ext.Mask or BlockMask, got {type(mask).__name__}{remedy}")


def checked_intervals(mask: Any, call: str) -> Mask:
    """The argument `mask` of a call that takes no BlockMask; `call` says which it is."""
    checked = checked_mask(mask)
    if isinstance(checked, BlockMask):
        raise NotImplementedError(
            f"mask: {call} is not implemented with a BlockMask; use a Mask, whose keys have an interval of rows each"
        )
    return checked


def _check_bool(visible: Any) -> None:
    arguments.tensors(visible=visible)
    if visible.dtype != torch.bool:
        raise TypeError(f"visible: expected dtype bool, got {visible.dtype}")


def _block_sizes(block_size: Any) -> tuple[int, int]:
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size: expected one number or (rows, keys), got {block_size!r}")
    rows, keys = (arguments.integer("block_size", size) for size in pair)
    if any(size < HALF or size % HALF for size in (rows, keys)):
        raise ValueError(f"block_size: expected multiples of {HALF}, got {block_size!r}")
    return rows, keys


_pytree.register_pytree_node(
    BlockMask,
    lambda mask: ([mask.lists, mask.bits], (mask.Sq, mask.Sk)),
    lambda leaves, context: _unflatten(leaves, context),
    serialized_type_name="flashattn_ext.BlockMask",
    to_dumpable_context=json.dumps,
    from_dumpable_context=lambda text: tuple(json.loads(text)),
    flatten_with_keys_fn=lambda mask: (
        [(_pytree.GetAttrKey("lists"), mask.lists), (_pytree.GetAttrKey("bits"), mask.bits)],
        (mask.Sq, mask.Sk),
    ),
)


def _unflatten(leaves: Any, context: Any) -> BlockMask:
    """A BlockMask without the checks of __init__: pytree transforms replace tensors by placeholders."""
    mask = object.__new__(BlockMask)
    mask.lists, mask.bits = leaves
    mask.Sq, mask.Sk = context
    return mask


# torch.load (weights_only) and torch.export.load refuse unknown classes. A BlockMask is safe to load: it holds two tensors and two sizes.
torch.serialization.add_safe_globals([BlockMask])
