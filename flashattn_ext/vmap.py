"""The ops under torch.vmap.

A mapped dimension is folded into the batch where that does not change the results. Otherwise the calls run one after the other: with
dropout (whose mask depends on the batch index), with packed sequences, with per-head tensors that are mapped or need gradients, and where
the bits of a BlockMask are mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .options import LEARNED, TENSORS

_TANGENTS = {name: f"t{name}" for name in LEARNED}


def _with_tangents(dims: str) -> list[str]:
    names = [option.name for option in TENSORS if option.dims == dims]
    return [*names, *(_TANGENTS[name] for name in names if name in _TANGENTS)]


# These begin with the batch.
_PER_ROW = ("q", "k", "v", "dout", "out", "centres", "lse_words", "dlse", "lse", "tq", "tk", "tv", "tout", "tlse")
_BROADCAST = [*_with_tangents("scores"), *_with_tangents("batch_kv_heads")]  # begin with the batch or with 1
_PER_HEAD = _with_tangents("heads")
_PER_HEAD_OR_BATCH = _with_tangents("batch_heads")  # [Hq] or [B, Hq]

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
    of_heads = [name for name in _PER_HEAD_OR_BATCH if call.get(name) is not None]
    shared = [*_PER_HEAD, *of_heads, "mask_bits", "rng_state"]
    has_own_gradients = any(call[name] is not None and call.get(f"needs_d{name}", True) for name in LEARNED)
    return (
        call["cu_seqlens_q"] is None
        and not call["dropout_p"] > 0
        and not call["scalars"]
        and all(dims.get(name) is None for name in shared)
        and all(call[name].dim() == 1 for name in of_heads)
        and not ("dout" in call and has_own_gradients)
    )


def _folded(op: Any, size: int, call: dict[str, Any], dims: dict[str, Any]) -> _Result:
    batch = call["q"].shape[0 if dims["q"] is None else (1 if dims["q"] == 0 else 0)]

    is_mapped = {name: dims[name] is not None for name in _BROADCAST if name in call}
    for name, tangent in _TANGENTS.items():
        if tangent in is_mapped:  # it has the shape of its tensor
            is_mapped[name] = is_mapped[tangent] = is_mapped[name] or is_mapped[tangent]

    def fold(name: str, t: Any) -> Any:
        """[size, batch, ...] -> [size * batch, ...]."""
        if t is None or name not in (*_PER_ROW, *_BROADCAST):
            return t
        dim = dims[name]
        if name in _BROADCAST and not is_mapped[name] and t.shape[0] == 1:
            return t
        t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
        return t.expand(size, batch, *t.shape[2:]).flatten(0, 1)

    results = op(*(fold(name, value) for name, value in call.items()))
    # Gradients that were not requested are empty and have no batch dimension.
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
    """rng_state of a seed, which is the same for every mapped call."""
    return ops.rng_state(device_of.select(in_dims[0], 0), seed), None


def _extremes_rule(info: Any, in_dims: Sequence[Any], intervals: Tensor) -> tuple[Tensor, int]:
    """mask_extremes: the op treats its one or two leading dimensions alike, so that the mapped dimension can join them."""
    mapped = intervals.movedim(in_dims[0], 0)
    if mapped.dim() == 4:
        return ops.mask_extremes(mapped), 0
    return ops.mask_extremes(mapped.flatten(0, 1)).unflatten(0, mapped.shape[:2]), 0


def _decode_rule(op: Any) -> Callable[..., _Result]:
    """Decoding calls run one after the other; a call that appends writes to its own slice of the caches."""
    names = [a.name for a in op._schema.arguments]
    appends = op._schema.is_mutable

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> _Result:
        dims = dict(zip(names, in_dims, strict=True))
        for name in ("k_cache", "v_cache"):
            if appends and dims[name] is None:
                raise ValueError(
                    f"{name}: expected a cache for each call under torch.vmap, because every call writes new keys to it, got one for all "
                    f"calls; map over {name} as well, or make the new keys part of the batch"
                )
        return _one_by_one(op, info.batch_size, in_dims, arguments)

    return rule


for _name in ("forward", "backward", "jvp", "second", "dropout_mask"):
    _op = getattr(torch.ops.flashattn_ext, _name).default
    torch.library.register_vmap(f"flashattn_ext::{_name}", _rule(_op), lib=_library)
torch.library.register_vmap("flashattn_ext::rng_state", _state_of_a_seed, lib=_library)
torch.library.register_vmap("flashattn_ext::mask_extremes", _extremes_rule, lib=_library)
for _name in ("decode", "decode_append"):
    _op = getattr(torch.ops.flashattn_ext, _name).call
    torch.library.register_vmap(_op, _decode_rule(_op), lib=_library)
