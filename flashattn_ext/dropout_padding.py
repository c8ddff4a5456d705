"""Calls with dropout whose origin is not at a multiple that the dropout generator of the kernels takes.

The kernels of GPUs and NPUs draw dropout for blocks of 16 rows and 64 keys, and refuse other origins (csrc/backend/backend.h). Such a call is
padded at the front up to the block boundary: its rows and keys get leading zeros, which a Mask hides and which are cut off the results.
The dropout mask of the real rows and keys does not change. The CPU kernels take any origin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _C, ops
from .mask_arguments import ALL_ROWS
from .options import BIASES, DIFFERENTIABLE, CallOptions, CallTensors

DRAWN_ROWS, DRAWN_KEYS = 16, 64  # the block for which a GPU kernel draws dropout


def is_needed(tensors: CallTensors, options: CallOptions) -> bool:
    """Whether the call needs padding. DTensors are left alone: the op raises for the origins that it does not support."""
    origin = options.origin
    if origin is None or len(origin) == 2 or not _draws_blocks(tensors.q.device) or hasattr(tensors.q, "placements"):
        return False
    return options.dropout_p > 0 and any(_padding_of(origin))


def _padding_of(origin: list[int]) -> tuple[int, int]:
    """The numbers of rows and keys between the previous block boundary and the origin."""
    return origin[2] % DRAWN_ROWS, origin[3] % DRAWN_KEYS


def _draws_blocks(device: torch.device) -> bool:
    if device.type == "cpu":
        return not torch.compiler.is_compiling() and _C.forced_backend().startswith("ascend")
    return device.type != "meta"


def with_zeros(t: Tensor, dim: int, count: int) -> Tensor:
    """`t` with `count` zeros in front along `dim`."""
    if count == 0:
        return t
    shape = list(t.shape)
    shape[dim] = count
    return torch.cat([t.new_zeros(shape), t], dim)


class _Padding:
    """Padding of `count` rows in front of a tensor, or of every sequence in a packed tensor."""

    def __init__(self, count: int, starts: Tensor | None, total: int) -> None:
        self.count = count
        self.starts = starts
        if starts is not None and count:
            sequences = starts.shape[0] - 1
            index = torch.arange(total, dtype=starts.dtype, device=starts.device)
            sequence = torch.searchsorted(starts[1:], index, right=True).clamp(max=sequences - 1)
            # The new index of each row; rows after the last sequence stay after it.
            self._new_rows = index + count * (sequence + 1)
            self._added = count * sequences
            self.starts = starts + count * torch.arange(sequences + 1, dtype=starts.dtype, device=starts.device)

    def add(self, t: Tensor, dim: int) -> Tensor:
        """`t` with zeros as padding."""
        if not self.count:
            return t
        if self.starts is None:
            return with_zeros(t, dim, self.count)
        shape = list(t.shape)
        shape[dim] += self._added
        return t.new_zeros(shape).index_copy(dim, self._new_rows, t)

    def cut(self, t: Tensor, dim: int) -> Tensor:
        """`t` without the padding."""
        if not self.count:
            return t
        if self.starts is None:
            return t.narrow(dim, self.count, t.shape[dim] - self.count).contiguous()
        return t.index_select(dim, self._new_rows)


class _PaddedCall:
    """The padded call: its tensors and options, and the padding of its rows and keys."""

    def __init__(self, tensors: CallTensors, options: CallOptions) -> None:
        assert options.origin is not None
        batch, head, row, key, *shift = options.origin
        is_packed = tensors.cu_seqlens_q is not None
        self.dim = 0 if is_packed else 2 if options.bhsd else 1
        rows, keys = _padding_of(options.origin)
        self.rows = _Padding(rows, tensors.cu_seqlens_q, tensors.q.shape[self.dim])
        self.keys = _Padding(keys, tensors.cu_seqlens_k, tensors.k.shape[self.dim])
        intervals = self._intervals(tensors, row, is_packed)
        bias = tensors.bias
        if bias is not None:
            bias = self.keys.add(bias if bias.shape[2] == 1 else self.rows.add(bias, 2), 3)
        self.tensors = tensors._replace(
            q=self.rows.add(tensors.q, self.dim), k=self.keys.add(tensors.k, self.dim), v=self.keys.add(tensors.v, self.dim),
            cu_seqlens_q=self.rows.starts, cu_seqlens_k=self.keys.starts, bias=bias, mask_intervals=intervals,
            mask_extremes=ops.mask_extremes(intervals),
        )  # fmt: skip
        self.options = options._replace(
            max_seqlen_q=options.max_seqlen_q + self.rows.count, max_seqlen_k=options.max_seqlen_k + self.keys.count,
            origin=[batch, head, row - self.rows.count, key - self.keys.count, *shift],
        )  # fmt: skip

    def _intervals(self, tensors: CallTensors, row: int, is_packed: bool) -> Tensor:
        """The intervals of the padded call. Padding rows see no key, so that they add nothing to the gradients of any key."""
        intervals = tensors.mask_intervals
        if intervals is None:
            shape = (1,) * (1 if is_packed else 2) + (tensors.k.shape[self.dim],)
            first = torch.full(shape, row, dtype=torch.int32, device=tensors.k.device)
            last = torch.full_like(first, ALL_ROWS)
        else:
            first, last = intervals[..., 0].clamp(min=row), intervals[..., 1]
        return self.keys.add(torch.stack([first, last], -1), -2)


def padded(tensors: CallTensors, options: CallOptions) -> tuple[CallTensors, CallOptions]:
    """The call that runs in place of one that is_needed()."""
    call = _PaddedCall(tensors, options)
    return call.tensors, call.options


def _check(op: Any, *arguments: Any) -> None:
    """Runs the op's checks on the original call, on the meta device, so that errors do not name the sizes of the padded call."""
    if not torch.compiler.is_compiling():
        op(*(torch.empty_like(a, device="meta") if isinstance(a, Tensor) else a for a in arguments))


def forward(
    tensors: CallTensors, options: CallOptions, rng_seed: int | None, returns_max_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of ops.forward; differentiable. Padding rows see no key, and so do not change max_logits."""
    _check(ops.forward, *tensors, *options, 0, returns_max_logits)
    call = _PaddedCall(tensors, options)
    out, lse, max_logits = ops.forward(*call.tensors, *call.options, rng_seed, returns_max_logits)
    return call.rows.cut(out, call.dim), call.rows.cut(lse, lse.dim() - 1), max_logits


def backward(
    tensors: CallTensors, options: CallOptions, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool],
    rng_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of DIFFERENTIABLE; `needs` says for each of BIASES whether to compute it."""
    _check(ops.backward, *tensors, *options, dout, dlse, out, lse, None, None, *needs, rng_state)
    call = _PaddedCall(tensors, options)
    # The lse of a padding row may be any finite number: the row sees no key, and its gradients are 0.
    out, lse = call.rows.add(out, call.dim), call.rows.add(lse, lse.dim() - 1)
    dout = None if dout is None else call.rows.add(dout, call.dim)
    dlse = None if dlse is None else call.rows.add(dlse, dlse.dim() - 1)
    results = ops.backward(*call.tensors, *call.options, dout, dlse, out, lse, None, None, *needs, rng_state)
    gradients = dict(zip(DIFFERENTIABLE, results, strict=True))
    for name, padding in (("q", call.rows), ("k", call.keys), ("v", call.keys)):
        gradients[name] = padding.cut(gradients[name], call.dim)
    if tensors.bias is not None and dict(zip(BIASES, needs, strict=True))["bias"]:
        dbias = gradients["bias"]
        gradients["bias"] = call.keys.cut(dbias if dbias.shape[2] == 1 else call.rows.cut(dbias, 2), 3)
    return tuple(gradients.values())


def dropout_mask(rng_state: Tensor, sizes: list[int], dropout_p: float, origin: list[int] | None) -> Tensor:
    """ops.dropout_mask for any origin; sizes: B, H, Sq, Sk."""
    rows = keys = 0
    if (
        origin is not None
        and len(origin) > 2
        and min(origin[:4]) >= 0
        and min(sizes) > 0
        and _draws_blocks(rng_state.device)
    ):
        rows, keys = _padding_of(origin)
    if rows or keys:
        assert origin is not None
        batch, heads, Sq, Sk = sizes
        sizes, origin = (
            [batch, heads, Sq + rows, Sk + keys],
            [*origin[:2], origin[2] - rows, origin[3] - keys, *origin[4:]],
        )
    mask: Tensor = ops.dropout_mask(rng_state, *sizes, dropout_p, origin)
    return mask[:, :, rows:, keys:] if rows or keys else mask
