"""The ops under torch.vmap.

A dimension that is mapped over becomes part of the batch where that gives every call what it would get alone. Otherwise, with dropout
(whose mask depends on the place in the batch), packed sequences, or per-head tensors that differ from call to call or have gradients of
their own, the calls run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops

_PER_ROW = ("q", "k", "v", "dout", "out", "centres", "dlse", "lse")  # begin with the batch
_BROADCAST = ("bias", "mask_intervals", "mask_extremes")  # begin with the batch or with 1
_PER_HEAD = ("sink", "relative_bias")

_library = torch.library.Library("flashattn_ext", "FRAGMENT")

_Result = tuple[Any, Any]  # tensors, and the dimension of each that is mapped over


def _one_by_one(op: Any, size: int, in_dims: Sequence[Any], arguments: Sequence[Any]) -> _Result:
    results = []
    for i in range(size):
        one = [a.select(dim, i) if isinstance(dim, int) else a for a, dim in zip(arguments, in_dims, strict=True)]
        results.append(op(*one))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _folds(call: dict[str, Any], dims: dict[str, Any]) -> bool:
    alibi_slopes = call["alibi_slopes"]
    shared = [*_PER_HEAD, "rng_state", *([] if alibi_slopes is None else ["alibi_slopes"])]
    has_own_gradients = call["sink"] is not None or any(call[name] for name in call if name.startswith("needs_"))
    return (
        call["cu_seqlens_q"] is None
        and not call["dropout_p"] > 0
        and not call["scalars"]
        and all(dims[name] is None for name in shared)
        and (alibi_slopes is None or alibi_slopes.dim() == 1)
        and not ("dout" in call and has_own_gradients)
    )


def _folded(op: Any, size: int, call: dict[str, Any], dims: dict[str, Any]) -> _Result:
    batch = call["q"].shape[0 if dims["q"] is None else (1 if dims["q"] == 0 else 0)]

    def fold(name: str, t: Any) -> Any:
        """[size, batch, ...] -> [size * batch, ...]."""
        if t is None or name not in (*_PER_ROW, *_BROADCAST):
            return t
        dim = dims[name]
        if dim is None and name in _BROADCAST and t.shape[0] == 1:
            return t
        t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
        return t.expand(size, batch, *t.shape[2:]).flatten(0, 1)

    results = op(*(fold(name, value) for name, value in call.items()))
    # Gradients that nobody asked for are empty, and have no batch.
    unfolded = [t.unflatten(0, (size, batch)) if t.numel() or t.dim() > 1 else t for t in results]
    return tuple(unfolded), tuple(0 if new is not old else None for new, old in zip(unfolded, results, strict=True))


def _rule(op: Any) -> Callable[..., _Result]:
    names = [a.name for a in op._schema.arguments]

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> _Result:
        call, dims = dict(zip(names, arguments, strict=True)), dict(zip(names, in_dims, strict=True))
        if "q" in call and _folds(call, dims):
            return _folded(op, info.batch_size, call, dims)
        return _one_by_one(op, info.batch_size, in_dims, arguments)

    return rule


def _state_of_a_seed(_info: Any, in_dims: Sequence[Any], device_of: Tensor, seed: int) -> tuple[Tensor, None]:
    """The same for every call."""
    return ops.rng_state(device_of.select(in_dims[0], 0), seed), None


for _name in ("forward", "backward", "dropout_mask"):
    _op = getattr(torch.ops.flashattn_ext, _name).default
    torch.library.register_vmap(f"flashattn_ext::{_name}", _rule(_op), lib=_library)
torch.library.register_vmap("flashattn_ext::rng_state", _state_of_a_seed, lib=_library)
