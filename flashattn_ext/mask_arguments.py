"""The arguments of the functions that make a Mask (mask.py): checks, and what several of them read out of an argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import arguments

# An interval end past every row; intervals are clamped to the rows that exist. Sizes are clamped to it, so that no sum overflows.
ALL_ROWS = 2**31 - 1


def size_of(name: str, value: Any, at_least: int = 0) -> int:
    size = arguments.integer(name, value)
    if size < at_least:
        raise ValueError(f"{name}: expected at least {at_least}{' (unbounded)' * (at_least < 0)}, got {size}")
    return min(size, ALL_ROWS)


def check_index(name: str, index: Any, entries: int, what: str) -> None:
    """Refuses an index that an axis of `entries` does not have. what: the tensor and its shape, for the message."""
    if not -entries <= arguments.integer(name, index) < entries:
        raise ValueError(f"{name}: expected an index from {-entries} to {entries - 1} for {what}, got {index}")


def integers(name: str, values: Any, ranks: tuple[int, ...] = (2,), or_bool: bool = True) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(values).__name__}")
    if values.is_floating_point() or values.is_complex() or (values.dtype == torch.bool and not or_bool):
        raise TypeError(f"{name}: expected an integer {'or bool ' * or_bool}dtype, got {values.dtype}")
    if values.dim() not in ranks:
        shapes = " or ".join("[batch]" if rank == 1 else "[batch, seqlen]" for rank in ranks)
        raise ValueError(f"{name}: expected shape {shapes}, got {list(values.shape)}")
    return values.long()


def first_or_last(lengths: Tensor, side: str | None, Sk: int | None) -> Tensor:
    """bool [B, Sk], True for the tokens: the first keys of each row, or the last keys with padding on the left."""
    if Sk is None and lengths.device.type == "cpu":
        Sk = int(lengths.max()) if lengths.numel() else 0
    if Sk is None:
        raise ValueError(
            f"Sk: expected the number of keys in a row, because the lengths are on {lengths.device}, got None; pass Sk"
        )
    keys = torch.arange(size_of("Sk", Sk), device=lengths.device)
    within = lengths.clamp(0, Sk)[:, None]
    return keys >= Sk - within if side == "left" else keys < within


def runs_of(ids: Tensor) -> tuple[Tensor, Tensor]:
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


def check_depth_first(parents: Tensor) -> None:
    """Checks that the parent of each node is on the path from the root to the previous node."""
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


def reject_keys(name: str, bad: Tensor) -> None:
    """Raises for the first key in `bad`, bool [B, H, Sk], True where the rows that see a key are not a single interval."""
    if bad.any():
        b, h, key = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: the rows that see key {key} of batch entry {b}, head {h} are not a single interval, as a Mask requires; "
            "pass this mask as `bias`, with 0 for visible and -inf for hidden keys, or as a BlockMask"
        )
