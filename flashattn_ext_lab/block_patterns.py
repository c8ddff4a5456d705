"""Patterns of blocks of 128 x 128 for BlockMask, at any length: what `bench cuda --set blocks` and the experiment `masks` measure."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from flashattn_ext import BlockMask, block_lists
from flashattn_ext.block_lists import BLOCK, HIDDEN, blocks_in

from .options import PATTERNS

HEADS = 16  # of the rows whose heads have patterns of their own


def _some_pairs(b: Any, h: Any, q: Any, k: Any) -> Any:
    """What partly visible blocks show: six pairs of seven. FlexAttention calls it with index tensors."""
    return (q + 3 * k) % 7 != 0


def _some_pairs_in_tiles(b: Any, h: Any, q: Any, k: Any, lengths: Any, tensors: Any) -> Any:
    """_some_pairs as FlashAttention-4 compiles it into its kernels."""
    return _some_pairs(b, h, q, k)


@dataclass(frozen=True)
class BlockPattern:
    """Blocks drawn for each row of blocks and each head: as a router chooses them. It has the members of options.Pattern."""

    about: str
    share: float  # of its blocks that a row of blocks sees; on average, if rows are unequal
    heads: int = 1  # patterns: one for all heads, or that many
    is_partial: bool = False  # every block is visible in part, in place of whole
    is_unequal: bool = False
    causal: bool = False
    lengths: None = None

    def blocks(self, S: int, device: torch.device | str = "cpu") -> Tensor:
        """bool [1, heads, R, R]"""
        return _drawn_blocks(self, blocks_in(S)).to(device)

    def make(self, S: int, device: torch.device | str = "cpu") -> BlockMask:
        visible = self.blocks(S, device)
        if not self.is_partial:
            return BlockMask.from_blocks(visible, S, S)
        at = torch.arange(7 * BLOCK, device=device)
        kinds = _some_pairs(0, 0, at[:, None], at[:BLOCK])  # blocks of rows 0 to 6: all remainders of 7
        of_kind = block_lists.packed(kinds[None, None])[0, 0, :, 0]
        _, _, row, key = visible.nonzero(as_tuple=True)
        grid = torch.full(visible.shape, HIDDEN, dtype=torch.int32, device=device)
        grid[visible] = torch.arange(len(row), dtype=torch.int32, device=device)
        bits = of_kind[(row + 3 * key) % 7]  # each block has bits of its own
        return BlockMask(block_lists.lists_of(grid, int(visible.sum((2, 3)).amax())), bits, S, S)

    def dense(self, S: int, device: torch.device | str = "cpu") -> Tensor:
        """bool [1, heads, S, S]"""
        return self.make(S, device).dense()

    def visible_pairs(self, S: int) -> float:
        """Number of pairs of the visible blocks of a head, those that a partly visible block hides included."""
        sizes = (S - torch.arange(blocks_in(S)) * BLOCK).clamp(max=BLOCK).double()
        return float((self.blocks(S) * sizes[:, None] * sizes).sum()) / self.heads

    def flex_mask(self, S: int, device: torch.device | str) -> flex_attention.BlockMask:
        """The same as FlexAttention takes it."""
        visible = self.blocks(S, device)
        counts = visible.sum(-1, dtype=torch.int32)
        order = visible.int().argsort(dim=-1, descending=True, stable=True).int()
        some, whole = (counts, counts * 0) if self.is_partial else (counts * 0, counts)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            """The whole mask, as FlexAttention requires; its kernels ask in partly visible blocks alone."""
            seen = visible[0, h % self.heads, q // BLOCK, k // BLOCK]
            return seen & _some_pairs(b, h, q, k) if self.is_partial else seen

        return flex_attention.BlockMask.from_kv_blocks(
            some, order, whole, order, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(S, S)
        )

    def flash_4_keywords(self, S: int, device: torch.device | str) -> dict[str, Any]:
        """The same as arguments of FlashAttention-4's flash_attn_func."""
        lists = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
        flex = self.flex_mask(S, device)
        of_rows = (flex.kv_num_blocks, flex.kv_indices, flex.full_kv_num_blocks, flex.full_kv_indices)
        of_keys = (flex.q_num_blocks, flex.q_indices, flex.full_q_num_blocks, flex.full_q_indices)
        return {
            "mask_mod": _some_pairs_in_tiles if self.is_partial else None,
            "block_sparse_tensors": lists(*of_rows, block_size=(BLOCK, BLOCK)),
            "block_sparse_tensors_bwd": lists(*of_keys, block_size=(BLOCK, BLOCK)),
        }


@functools.cache
def _drawn_blocks(pattern: BlockPattern, R: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rank = torch.rand(1, pattern.heads, R, R, generator=generator).argsort(-1).argsort(-1)
    counts = torch.full((R,), max(pattern.share * R, 1))
    if pattern.is_unequal:  # from 1 block to all; the mean of x^e over [0, 1] is 1 / (e + 1)
        counts = 1 + (R - 1) * torch.linspace(0, 1, R) ** (1 / pattern.share - 1)
        counts = counts[torch.randperm(R, generator=generator)]
    return rank < counts.round()[:, None]


def _share(share: float) -> str:
    return f"{share:.0%} of the blocks of a row, drawn"


BLOCK_PATTERNS = {
    **{f"blocks {share}": BlockPattern(f"{_share(share)} once for all heads", share) for share in (0.5, 0.2, 0.05)},
    **{
        f"blocks {share} per head": BlockPattern(f"{_share(share)} for each head", share, HEADS)
        for share in (0.5, 0.2, 0.05)
    },
    "partial blocks 0.2": BlockPattern(f"{_share(0.2)} for each head, each of them partly visible", 0.2, HEADS, is_partial=True),
    "unequal blocks 0.2": BlockPattern(
        "for each head rows of blocks that see from 1 block to all, on average 20 %", 0.2, HEADS, is_unequal=True
    ),
}  # fmt: skip
ALL_PATTERNS = {**PATTERNS, **BLOCK_PATTERNS}
