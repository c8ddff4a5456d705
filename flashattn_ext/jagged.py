"""forward() of nested tensors of layout torch.jagged, as packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import arguments


def packed(layout: str, **given: Any) -> tuple[list[Tensor], tuple[Tensor, Tensor, int, int]]:
    """q, k and v [total, H, D] of nested tensors [B, S, H, D] (layout "bhsd": [B, H, S, D]), and the lengths for varlen_forward: cu_seqlens_q, ...

    Raises:
        TypeError: a tensor is not nested, or not of layout torch.jagged.
        ValueError: the ragged dimension is not the sequence, a tensor has holes, or the offsets of v differ from the offsets of k.
    """
    ragged_dim = 2 if arguments.is_bhsd(layout) else 1
    values = [_values(name, t, ragged_dim) for name, t in given.items()]
    q, k, v = given.values()
    if k.shape[ragged_dim] != v.shape[ragged_dim]:
        raise ValueError(
            "v: expected a nested tensor with the offsets of k, got different offsets; make both from the same offsets"
        )
    cu_seqlens_q = q.offsets().int()
    same = q.shape[ragged_dim] == k.shape[ragged_dim]
    cu_seqlens_k = cu_seqlens_q if same else k.offsets().int()
    return values, (cu_seqlens_q, cu_seqlens_k, _longest(q, values[0]), _longest(k, values[1]))


def nested(out: Tensor, q: Any, layout: str) -> Tensor:
    """The nested tensor of out [total, Hq, Dv], with the offsets of q."""
    cached = {"min_seqlen": q._maybe_min_seqlen, "max_seqlen": q._maybe_max_seqlen}
    result: Tensor = torch.nested.nested_tensor_from_jagged(out, q.offsets(), **cached)
    return result if layout == "bshd" else result.transpose(1, 2)


def _values(name: str, t: Any, ragged_dim: int) -> Tensor:
    if not t.is_nested or t.layout != torch.jagged:
        kind = f"a nested tensor of layout {t.layout}" if t.is_nested else "a tensor that is not nested"
        raise TypeError(f"{name}: expected a nested tensor of layout torch.jagged, like the others, got {kind}")
    if t.dim() != 4 or t._ragged_idx != ragged_dim:
        raise ValueError(
            f"{name}: expected 4 dimensions with the sequence, dimension {ragged_dim}, ragged, got {t.dim()} dimensions with "
            f"dimension {t._ragged_idx} ragged"
        )
    if t.lengths() is not None:
        raise ValueError(
            f"{name}: expected a nested tensor without holes between sequences, got one with holes; call .contiguous() on it"
        )
    values: Tensor = t.values()
    return values if ragged_dim == 1 else values.transpose(0, 1)


def _longest(t: Any, values: Tensor) -> int:
    """An upper bound of the lengths: the longest one if it is cached, because computing it would wait for the device."""
    longest: int | None = t._maybe_max_seqlen
    return values.shape[0] if longest is None else longest
