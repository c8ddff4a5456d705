"""One Mask or BlockMask of every kind for sizes that a test draws."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext import BlockMask, Mask

KINDS = (
    "intervals", "documents", "padding", "prefix_lm", "chunked", "blocks", "window", "tree", "flashmask", "dense", "and",
)  # fmt: skip


def _draw(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def _parents(S: int, generator: torch.Generator) -> Tensor:
    """Parents of a random tree in depth-first order: a node's parent is on the path to the previous node; roots have -1."""
    path: list[int] = []
    parents = []
    for node in range(S):
        path = path[: int(_draw(generator, 0, len(path) + 1))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return torch.tensor(parents, dtype=torch.int64)


def _random(heads: int, Sq: int, Sk: int, generator: torch.Generator) -> Mask:
    """Long, short, empty, reversed and far out of range."""
    intervals = _draw(generator, -5, Sq + 6, 1, heads, Sk, 2).int()
    limits = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    everybody = _draw(generator, 0, 5, 1, heads, Sk, 1) == 0
    return Mask(torch.where(everybody, limits, intervals))


def _flashmask(Sq: int, Sk: int, generator: torch.Generator) -> Mask:
    start = _draw(generator, 0, Sk + 1, 1, 1, Sk, 1)
    end = _draw(generator, 0, Sk + 1, 1, 1, Sk, 1)
    return Mask.from_flashmask(torch.cat([start, end], -1).int(), causal=False)


def _mask(kind: str, heads: int, Sq: int, Sk: int, generator: torch.Generator) -> Mask:
    """Of one batch entry."""
    ids = (_draw(generator, 0, 12, 1, Sk) == 0).cumsum(1)  # runs of twelve on average
    size = int(_draw(generator, 1, 40))
    if kind == "documents":
        return Mask.documents(ids)
    if kind == "padding":
        return Mask.padding(_draw(generator, 0, Sk + 1, 1), side="left" if size % 2 else "right", Sk=Sk)
    if kind == "prefix_lm":
        return Mask.prefix_lm(_draw(generator, 0, Sk + 1, 1), Sq, Sk)
    if kind == "chunked":
        return Mask.chunked(size, Sq, Sk)
    if kind == "blocks":
        return Mask.blocks(torch.where(ids % 2 == 0, -1, ids))
    if kind == "window":
        return Mask.window(size, size // 3, Sq, Sk, global_keys=size % 4)
    if kind == "tree":
        return Mask.tree(_parents(Sk, generator))
    if kind == "flashmask":
        return _flashmask(Sq, Sk, generator)
    if kind == "dense":
        return Mask.from_dense(_random(heads, Sq, Sk, generator).dense(Sq))
    if kind == "and":
        return _random(heads, Sq, Sk, generator) & Mask.documents(ids)
    assert kind == "intervals", kind
    return _random(heads, Sq, Sk, generator)


def make_mask(
    kind: str, heads: int, sizes: list[tuple[int, int]], generator: torch.Generator, *, packed: bool = False
) -> Mask:
    """A Mask of sequences with these (Sq, Sk): of batch entries, or packed. Kinds that can differ by head have `heads`."""
    parts = [_mask(kind, heads, Sq, Sk, generator).intervals for Sq, Sk in sizes]
    if packed:
        empty = torch.zeros(1 if not parts else parts[0].shape[1], 0, 2, dtype=torch.int32)
        return Mask(torch.cat([empty, *(part[0] for part in parts)], 1))
    return Mask(torch.cat(parts))


BLOCK_KINDS = ("block_router", "block_halves", "block_pairs", "block_function", "block_and")


def make_block_mask(kind: str, batch: int, heads: int, Sq: int, Sk: int, generator: torch.Generator) -> BlockMask:
    """A BlockMask [batch, heads, Sq, Sk] with blocks that are whole, partial and hidden."""

    def some(rows: int, keys: int, share: float) -> Tensor:
        shape = (batch, heads, -(-Sq // rows), -(-Sk // keys))
        return torch.rand(shape, generator=generator) < share

    if kind == "block_router":
        return BlockMask.from_blocks(some(128, 128, 0.5), Sq, Sk)
    if kind == "block_halves":
        return BlockMask.from_blocks(some(64, 192, 0.6), Sq, Sk, block_size=(64, 192))
    if kind == "block_pairs":
        tiles = some(128, 128, 0.7).repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :Sq, :Sk]
        pairs = torch.rand(tiles.shape, generator=generator) < 0.4
        return BlockMask.from_dense(
            tiles & (pairs | some(128, 128, 0.5).repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :Sq, :Sk])
        )
    if kind == "block_function":
        step = 3 + int(torch.randint(0, 60, (), generator=generator))
        return BlockMask.from_function(lambda b, h, i, j: (i // step + b + h) % 3 != j // 70 % 3, batch, heads, Sq, Sk)
    assert kind == "block_and", kind
    mask = _random(heads, Sq, Sk, generator) if Sq and Sk else Mask(torch.zeros(1, heads, Sk, 2, dtype=torch.int32))
    return BlockMask.from_blocks(some(64, 64, 0.8), Sq, Sk, block_size=64) & mask
