"""One Mask of every kind for sizes that a test draws."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext import Mask

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
