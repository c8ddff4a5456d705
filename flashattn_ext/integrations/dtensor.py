"""DTensor: forward, backward and dropout_mask on tensors that torch.distributed.tensor spreads over a mesh of ranks.

A mesh dimension may share out the batch, the heads, or nothing; no data moves then. A layout that has the sequence shared out is
gathered, with a warning. Dropout of the parts is that of the whole tensor, bit for bit, where all ranks have the same seed: every rank
tells its call the place of its part (`origin`).

flashattn_ext.forward imports this module when it is first given a DTensor. It knows the ops by the names in their schemas, and the rank
of a tensor says how it is laid out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import ops

# How one mesh dimension shares a call out.
BATCH, HEADS, NOTHING = "batch", "heads", "nothing"

_Arguments = dict[str, Any]


def together(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors of a call that has a DTensor among them, all as DTensors: a plain one is the same on every rank."""
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    return [t if t is None or isinstance(t, DTensor) else _replicated(t, mesh) for t in tensors]


def _replicated(t: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _Layout:
    """Which dimension of each tensor of a call is the batch, and which the heads."""

    def __init__(self, arguments: _Arguments) -> None:
        q, k = arguments["q"], arguments["k"]
        self.packed = arguments["cu_seqlens_q"] is not None
        self.head_dim = 1 if self.packed or arguments["bhsd"] else 2
        self.row_dim = 0 if self.packed else (2 if arguments["bhsd"] else 1)
        self.heads_q, self.heads_k = q.shape[self.head_dim], k.shape[self.head_dim]

    def batch_and_head_dims(self, name: str, t: Tensor) -> tuple[int | None, int | None]:
        """Dimensions of a named tensor; None where it has one entry for all."""
        if name in ("q", "k", "v", "dout", "out"):
            return None if self.packed else 0, self.head_dim
        if name in ("lse", "dlse", "centres"):
            return (None, 0) if self.packed else (0, 1)
        if name in ("sink", "relative_bias") or (name == "alibi_slopes" and t.dim() == 1):
            return None, 0
        if name == "alibi_slopes":
            return 0, 1
        if name in ("bias", "mask_intervals", "mask_extremes"):
            heads = 0 if t.dim() == 3 else 1  # packed intervals begin with the heads
            return 0 if t.dim() == 4 and t.shape[0] > 1 else None, heads if t.shape[heads] > 1 else None
        return None, None

    def placement(self, name: str, t: Tensor, share: str) -> Placement:
        batch, head = self.batch_and_head_dims(name, t)
        dim = {BATCH: batch, HEADS: head, NOTHING: None}[share]
        return Replicate() if dim is None else Shard(dim)

    def share(self, placements: Sequence[Placement], ranks: int) -> str:
        """What a mesh dimension of so many ranks shares out, after the placements of q, k and v on it."""
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
                f"flashattn_ext: {name} is a DTensor with its sequence (dimension {placement.dim}) shared out over {ranks} ranks; "
                "every rank gathers the whole sequence. Share out the batch or the heads instead",
                stacklevel=2,
            )
        elif placement.dim == self.head_dim and share == NOTHING:
            warnings.warn(
                f"flashattn_ext: {name} is a DTensor with its heads shared out over {ranks} ranks, which {self.heads_q} query heads "
                f"and {self.heads_k} key heads do not divide by; every rank gathers all heads",
                stacklevel=2,
            )


def _named(func: Any, args: Sequence[Any]) -> _Arguments:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=True)}


class _SharedCall:
    """One call of an op with DTensors: how each mesh dimension shares it out, and the arguments of this rank."""

    def __init__(self, func: Any, args: Sequence[Any]) -> None:
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
            for name, placement in placements.items():
                self.layout.warn_of_gathering(name, placement, share, ranks)
            self.shares.append(share)

    def _placements(self, t: Tensor) -> Sequence[Placement]:
        return t.placements if isinstance(t, DTensor) else [Replicate()] * self.mesh.ndim

    def placements(self, name: str, t: Tensor) -> list[Placement]:
        return [self.layout.placement(name, t, share) for share in self.shares]

    def local(self, name: str, value: Any) -> Any:
        """This rank's part of an argument."""
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            if all(isinstance(placement, Replicate) for placement in self.placements(name, value)):
                return value
            value = _replicated(value, self.mesh)
        # Detached: torch 2.11 has no strategy for the detach_ with which autograd would end a Function below it.
        return value.detach().redistribute(self.mesh, self.placements(name, value)).to_local()

    def run(self) -> Any:
        local = {name: self.local(name, value) for name, value in self.arguments.items()}
        if self.arguments["dropout_p"] > 0:
            local["origin"] = self._origin()
        return self.func(*local.values())

    def _origin(self) -> list[int]:
        """The place of this rank's part in the call of a whole."""
        batch, head, *rows_and_keys = self.arguments["origin"] or (0, 0)
        q = self.arguments["q"]
        batch += self._offset(BATCH, q.shape[0])
        return [batch, head + self._offset(HEADS, self.layout.heads_q), *rows_and_keys]

    def _offset(self, share: str, size: int) -> int:
        """Where this rank's part of a dimension of that size begins: mesh dimensions that share it out do so one after the other."""
        begin = 0
        for dim in (dim for dim, it_shares in enumerate(self.shares) if it_shares == share):
            chunk = -(-size // self.mesh.size(dim))
            skipped = min(chunk * self.mesh.get_local_rank(dim), size)
            begin, size = begin + skipped, min(chunk, size - skipped)
        return begin

    def whole(self, name: str, local: Tensor, like: Tensor) -> DTensor:
        """A result that has the shape of a named tensor, or of its gradient, as a DTensor.

        What has one entry for all of a dimension that is shared out is a sum over it: each rank has the part of its own.
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
    out, lse, centres = call.run()
    a, layout = call.arguments, call.layout
    q, v = a["q"], a["v"]
    like_out = torch.empty((*q.shape[:-1], v.shape[-1]), device="meta")
    rows = q.shape[layout.row_dim]
    like_lse = torch.empty(
        (layout.heads_q, rows) if layout.packed else (q.shape[0], layout.heads_q, rows), device="meta"
    )
    like_centres = like_lse.unsqueeze(-1).expand(*like_lse.shape, ops.CENTRES)
    whole_centres = (
        call.whole("centres", centres, like_centres) if a["keeps_centres"] else _replicated(centres, call.mesh)
    )
    return call.whole("out", out, like_out), call.whole("lse", lse, like_lse), whole_centres


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


def _on_every_rank(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    """dropout_mask: the same everywhere, from a state that is the same everywhere."""
    mesh = next(t.device_mesh for t in args if isinstance(t, DTensor))
    return _replicated(func(*(t.full_tensor() if isinstance(t, DTensor) else t for t in args)), mesh)


def _state_of_a_seed(_cls: Any, func: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Tensor:
    """rng_state: a plain tensor, from the seed that all ranks are given."""
    device_of, seed = args
    state: Tensor = func(device_of.to_local(), seed)
    return state


_RULES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "backward": _backward,
    "dropout_mask": _on_every_rank,
    "rng_state": _state_of_a_seed,
}
for _name, _rule in _RULES.items():
    torch.library.register_torch_dispatch(f"flashattn_ext::{_name}", DTensor, _rule)
