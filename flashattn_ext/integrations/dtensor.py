"""DTensor: forward, its derivatives and dropout_mask on tensors that torch.distributed.tensor spreads over a mesh of ranks.

A mesh dimension may shard the batch, the heads, or nothing (replicate); these layouts need no communication. A sharded sequence is
gathered, with a warning. Every rank passes the position of its shard as `origin`, so that with the same seed on all ranks the dropout
mask equals the mask of the whole tensor, bit for bit.

flashattn_ext.forward imports this module when it first gets a DTensor. Arguments are identified by their names in the op schemas.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..options import DIFFERENTIABLE, TENSORS

# What one mesh dimension shards.
BATCH, HEADS, NOTHING = "batch", "heads", "nothing"

_DIMS = {option.name: option.dims for option in TENSORS}

_Arguments = dict[str, Any]

# Tangents have the layout of their tensors.
_PRIMALS = {f"t{name}": name for name in (*DIFFERENTIABLE, "out", "lse")}


def together(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors of a call with at least one DTensor, all as DTensors; a plain tensor is taken as replicated."""
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    return [t if t is None or isinstance(t, DTensor) else _replicated(t, mesh) for t in tensors]


def _replicated(t: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _Layout:
    """Which dimensions of the tensors of a call are the batch and the heads."""

    def __init__(self, arguments: _Arguments) -> None:
        q, k = arguments["q"], arguments["k"]
        self.packed = arguments["cu_seqlens_q"] is not None
        self.head_dim = 1 if self.packed or arguments["bhsd"] else 2
        self.row_dim = 0 if self.packed else (2 if arguments["bhsd"] else 1)
        self.heads_q, self.heads_k = q.shape[self.head_dim], k.shape[self.head_dim]

    def batch_and_head_dims(self, name: str, t: Tensor) -> tuple[int | None, int | None]:
        """The batch and head dimensions of a named tensor; None where it has no such dimension or one entry for all."""
        name = _PRIMALS.get(name, name)
        if name in ("q", "k", "v", "dout", "out"):
            return None if self.packed else 0, self.head_dim
        if name in ("lse", "dlse", "lse_words", "centres"):
            return (None, 0) if self.packed else (0, 1)
        if name == "max_logits":
            return None if self.packed else 0, 1
        dims = _DIMS.get(name)
        if dims == "heads" or (dims == "batch_heads" and t.dim() == 1):
            return None, 0
        if dims == "batch_heads":
            return 0, 1
        if dims == "scores":
            heads = 0 if t.dim() == 3 else 1  # packed intervals begin with the heads
            return 0 if t.dim() == 4 and t.shape[0] > 1 else None, heads if t.shape[heads] > 1 else None
        if dims == "batch_kv_heads":
            return 0 if t.shape[0] > 1 else None, 1 if t.shape[1] > 1 else None
        return None, None

    def placement(self, name: str, t: Tensor, share: str) -> Placement:
        batch, head = self.batch_and_head_dims(name, t)
        dim = {BATCH: batch, HEADS: head, NOTHING: None}[share]
        return Replicate() if dim is None else Shard(dim)

    def share(self, placements: Sequence[Placement], ranks: int) -> str:
        """What a mesh dimension of `ranks` ranks shards, given the placements of q, k and v on it."""
        for placement in placements:
            if type(placement) is not Shard:
                continue
            if placement.dim == 0 and not self.packed:
                return BATCH
            if placement.dim == self.head_dim and self.heads_q % ranks == 0 and self.heads_k % ranks == 0:
                return HEADS
        return NOTHING

    def warn_of_gathering(self, name: str, placement: Placement, share: str, ranks: int) -> None:
        if not isinstance(placement, Shard):
            return
        if placement.dim == self.row_dim:
            warnings.warn(
                f"flashattn_ext: {name} is a DTensor with its sequence (dimension {placement.dim}) sharded over {ranks} ranks; "
                "every rank gathers the whole sequence. Shard the batch or the heads instead",
                stacklevel=2,
            )
        elif placement.dim == self.head_dim and share == NOTHING:
            warnings.warn(
                f"flashattn_ext: {name} is a DTensor with its heads sharded over {ranks} ranks, but {self.heads_q} query heads "
                f"and {self.heads_k} KV heads are not both divisible by {ranks}; every rank gathers all heads",
                stacklevel=2,
            )


def _named(func: Any, args: Sequence[Any]) -> _Arguments:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=True)}


class _SharedCall:
    """One call of an op with DTensors: what each mesh dimension shards, and the arguments of this rank."""

    def __init__(self, func: Any, args: Sequence[Any], warns: bool = True) -> None:
        self.func = func
        self.arguments = _named(func, args)
        self.layout = _Layout(self.arguments)
        self.mesh = next(t.device_mesh for t in args if isinstance(t, DTensor))
        qkv = {name: self._placements(self.arguments[name]) for name in ("q", "k", "v")}
        self.shares = []
        for dim in range(self.mesh.ndim):
            placements = {name: given[dim] for name, given in qkv.items()}
            ranks = self.mesh.size(dim)
            share = self.layout.share(list(placements.values()), ranks)
            for name, placement in placements.items() if warns else ():
                self.layout.warn_of_gathering(name, placement, share, ranks)
            self.shares.append(share)

    def _placements(self, t: Tensor) -> Sequence[Placement]:
        return t.placements if isinstance(t, DTensor) else [Replicate()] * self.mesh.ndim

    def placements(self, name: str, t: Tensor) -> list[Placement]:
        return [self.layout.placement(name, t, share) for share in self.shares]

    def local(self, name: str, value: Any) -> Any:
        """This rank's shard of an argument."""
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            if all(isinstance(placement, Replicate) for placement in self.placements(name, value)):
                return value
            value = _replicated(value, self.mesh)
        # detach(): autograd would call detach_ on the result, for which torch 2.11 has no sharding strategy.
        return value.detach().redistribute(self.mesh, self.placements(name, value)).to_local()

    def stand_in(self, name: str, value: Any) -> Any:
        """What local() returns, without communication: a tensor of its shape, without its values if they would have to be sent."""
        if not isinstance(value, DTensor):
            return value
        placements = self.placements(name, value)
        if list(value.placements) == placements:
            return value.to_local()
        shape = list(value.shape)
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = self._share(mesh_dim, shape[placement.dim])[1]
        return value.to_local().new_empty(()).expand(shape)

    def run(self) -> Any:
        return self._run({name: self.local(name, value) for name, value in self.arguments.items()})

    def run_without_values(self) -> Any:
        """For an op that reads no elements of its tensors."""
        return self._run({name: self.stand_in(name, value) for name, value in self.arguments.items()})

    def _run(self, local: _Arguments) -> Any:
        # Inside torch.compile a symbolic dropout_p is passed in `scalars`, and the argument dropout_p is 0.
        if self.arguments["dropout_p"] > 0 or self.arguments.get("scalars"):
            local["origin"] = self._origin()
        return self.func(*local.values())

    def _origin(self) -> list[int]:
        """The origin of this rank's call: the position of its shard in the whole."""
        batch, head, *rows_and_keys = self.arguments["origin"] or (0, 0)
        q = self.arguments["q"]
        batch += self._offset(BATCH, q.shape[0])
        return [batch, head + self._offset(HEADS, self.layout.heads_q), *rows_and_keys]

    def _offset(self, share: str, size: int) -> int:
        """The start of this rank's shard of a dimension of `size`; mesh dimensions that shard the same dimension apply in order."""
        begin = 0
        for dim in (dim for dim, it_shares in enumerate(self.shares) if it_shares == share):
            skipped, size = self._share(dim, size)
            begin += skipped
        return begin

    def _share(self, mesh_dim: int, size: int) -> tuple[int, int]:
        """Where this rank's share of `size` rows begins, and its length."""
        chunk = -(-size // self.mesh.size(mesh_dim))
        begin = min(chunk * self.mesh.get_local_rank(mesh_dim), size)
        return begin, min(chunk, size - begin)

    def whole(self, name: str, local: Tensor, like: Tensor) -> DTensor:
        """The local result `local`, shaped like the named tensor `like`, as a DTensor.

        A gradient with one entry for a whole sharded dimension is a sum over that dimension: each rank holds a partial sum.
        """
        batch, head = self.layout.batch_and_head_dims(name, like)
        dims = {BATCH: batch, HEADS: head}
        placements = [
            Replicate() if share == NOTHING else Partial() if (dim := dims[share]) is None else Shard(dim)
            for share in self.shares
        ]
        stride = torch.empty(like.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=like.shape, stride=stride)


def _forward(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> tuple[DTensor, ...]:
    call = _SharedCall(func, args)
    out, lse, lse_words, centres, max_logits = call.run()
    a, layout = call.arguments, call.layout
    q, v = a["q"], a["v"]
    like_out = torch.empty((*q.shape[:-1], v.shape[-1]), device="meta")
    rows = q.shape[layout.row_dim]
    like_lse = torch.empty(
        (layout.heads_q, rows) if layout.packed else (q.shape[0], layout.heads_q, rows), device="meta"
    )
    kept = (
        call.whole(name, t, like_lse.unsqueeze(-1).expand(*like_lse.shape, t.shape[-1]))
        if a[f"keeps_{name}"]
        else _replicated(t, call.mesh)
        for name, t in (("lse_words", lse_words), ("centres", centres))
    )
    like_max_logits = torch.empty(
        (a["cu_seqlens_q"].shape[0] - 1 if layout.packed else q.shape[0], layout.heads_q), device="meta"
    )
    whole_max_logits = (
        call.whole("max_logits", max_logits, like_max_logits)
        if a["returns_max_logits"]
        else _replicated(max_logits, call.mesh)
    )
    return call.whole("out", out, like_out), call.whole("lse", lse, like_lse), *kept, whole_max_logits


def _backward(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> tuple[Tensor, ...]:
    call = _SharedCall(func, args)
    results = call.run()
    names = [result.name.removeprefix("d") for result in func._schema.returns]
    gradients = []
    for name, local in zip(names, results, strict=True):
        like = call.arguments[name]
        wanted = like is not None and call.arguments.get(f"needs_d{name}", True)
        gradients.append(call.whole(name, local, like) if wanted else _replicated(local, call.mesh))
    return tuple(gradients)


def _jvp(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> tuple[DTensor, DTensor]:
    call = _SharedCall(func, args)
    tout, tlse = call.run()
    return call.whole("out", tout, call.arguments["out"]), call.whole("lse", tlse, call.arguments["lse"])


def _on_every_rank(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    """dropout_mask: replicated, because the state it is made from is."""
    mesh = next(t.device_mesh for t in args if isinstance(t, DTensor))
    return _replicated(func(*(t.full_tensor() if isinstance(t, DTensor) else t for t in args)), mesh)


def _state_of_a_seed(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Tensor:
    """rng_state: a plain tensor, made from the seed that all ranks pass."""
    device_of, seed = args
    state: Tensor = func(device_of.to_local(), seed)
    return state


def _supports(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    """What this rank's call would run on."""
    return _SharedCall(func, args, warns=False).run_without_values()


_RULES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "backward": _backward,
    "jvp": _jvp,
    "second": _backward,
    "dropout_mask": _on_every_rank,
    "rng_state": _state_of_a_seed,
    "supports": _supports,
}
for _name, _rule in _RULES.items():
    torch.library.register_torch_dispatch(f"flashattn_ext::{_name}", DTensor, _rule)
