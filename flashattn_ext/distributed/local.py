"""The attention calls that a rank makes itself, on plain tensors and without autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..autograd import CallOptions, CallTensors


class Extras(NamedTuple):
    """The tensors of a call beside q, k and v."""

    sink: Tensor | None  # [Hq]
    alibi_slopes: Tensor | None  # [Hq] or [B, Hq]
    relative_bias: Tensor | None  # [Hq, 2 L + 1]
    bias: Tensor | None  # [B or 1, Hq or 1, rows of this rank or 1, S]
    mask_intervals: Tensor | None  # [B or 1, Hm, S, 2], packed [Hm, total, 2]


class Gradients(NamedTuple):
    """None: not computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    bias: Tensor | None


class Packed(NamedTuple):
    """Where the sequences of a packed call begin, as varlen_forward takes it."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def packed(lengths_q: list[int], lengths_k: list[int], device: torch.device) -> Packed:
    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)

    return Packed(starts(lengths_q), starts(lengths_k), max(lengths_q, default=0), max(lengths_k, default=0))


def call_tensors(q: Tensor, k: Tensor, v: Tensor, extras: Extras, sequences: Packed | None) -> CallTensors:
    intervals = extras.mask_intervals
    return CallTensors(
        q, k, v,
        None if sequences is None else sequences.cu_seqlens_q,
        None if sequences is None else sequences.cu_seqlens_k,
        extras.sink, extras.alibi_slopes, extras.relative_bias, extras.bias,
        intervals, None if intervals is None else ops.mask_extremes(intervals),
    )  # fmt: skip


def with_lengths(options: CallOptions, sequences: Packed | None) -> CallOptions:
    if sequences is None:
        return options
    return options._replace(max_seqlen_q=sequences.max_seqlen_q, max_seqlen_k=sequences.max_seqlen_k)


def forward(
    tensors: CallTensors, options: CallOptions, rng_state: Tensor, keeps_centres: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the centres of rows [B, Hq, s, 3] ([Hq, s, 3]); empty unless keeps_centres."""
    out, lse, centres = ops.pure_forward(*tensors, *options, rng_state, keeps_centres, [])
    return out, lse, centres


def backward(
    tensors: CallTensors, options: CallOptions, rng_state: Tensor, dout: Tensor | None, dlse: Tensor | None,
    out: Tensor, lse: Tensor, centres: Tensor | None, needs: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    """centres: of rows, as forward has them; needs: whether alibi_slopes, relative_bias and bias have gradients."""
    dq, dk, dv, dsink, *biases = ops.pure_backward(
        *tensors, *options, dout, dlse, out, lse, centres, *needs, rng_state, []
    )  # fmt: skip
    return Gradients(
        dq, dk, dv, None if tensors.sink is None else dsink,
        *(gradient if needed else None for gradient, needed in zip(biases, needs, strict=True)),
    )  # fmt: skip
