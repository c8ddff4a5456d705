"""The attention calls that a rank makes itself, on plain tensors and without autograd."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..options import DIFFERENTIABLE, NUMBERS, TENSORS, CallOptions, CallTensors, wanted

if TYPE_CHECKING:
    from ..options import Record


# The arguments of a rank's own call that say which part of the whole it is; the exchange sets them.
_OF_A_PART = (
    "cu_seqlens_q", "cu_seqlens_k", "mask_extremes", "max_seqlen_q", "max_seqlen_k", "bhsd", "origin",
)  # fmt: skip
OF_FP8 = ("descale_q", "descale_k", "descale_v", "out_dtype")
_REFUSED = (*OF_FP8, "invariant", "mask_lists", "mask_bits")
# The options of the whole call, as csrc/call/options.def describes them.
EXTRAS = tuple(option for option in TENSORS if option.name not in (*_OF_A_PART, *_REFUSED))
RULES = tuple(option for option in NUMBERS if option.name not in (*_OF_A_PART, *_REFUSED))

if TYPE_CHECKING:

    class Extras(Record): ...

    class Gradients(Record):
        q: Tensor
        k: Tensor
        v: Tensor

else:
    Extras = namedtuple("Extras", [option.name for option in EXTRAS])
    Extras.__doc__ = "The tensors of a call beside q, k and v; a bias has the rows of this rank, or 1, and all keys."
    Gradients = namedtuple("Gradients", DIFFERENTIABLE)
    Gradients.__doc__ = "The gradients of a call; None where one was not computed."


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
    cu_seqlens = () if sequences is None else (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    extremes = None if intervals is None else ops.mask_extremes(intervals)
    return CallTensors(q, k, v, *cu_seqlens)._replace(**extras._asdict(), mask_extremes=extremes)


def with_lengths(options: CallOptions, sequences: Packed | None) -> CallOptions:
    if sequences is None:
        return options
    return options._replace(max_seqlen_q=sequences.max_seqlen_q, max_seqlen_k=sequences.max_seqlen_k)


def forward(
    tensors: CallTensors, options: CallOptions, rng_state: Tensor, keeps_centres: bool, returns_max_logits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, centres, max_logits): centres of rows [B, Hq, s, 3] ([Hq, s, 3]), largest logits [B, Hq] ([sequences, Hq]).

    centres and max_logits are empty unless requested.
    """
    out, lse, _, centres, max_logits = ops.pure_forward(
        *tensors, *options, rng_state, False, keeps_centres, returns_max_logits, []
    )
    return out, lse, centres, max_logits


def backward(
    tensors: CallTensors, options: CallOptions, rng_state: Tensor, dout: Tensor | None, dlse: Tensor | None,
    out: Tensor, lse: Tensor, centres: Tensor | None, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """centres: as forward returns them; needs: for each of BIASES whether its gradient is needed."""
    dq, dk, dv, *others = ops.pure_backward(
        *tensors, *options, dout, dlse, out, lse, None, centres, *needs, rng_state, []
    )  # fmt: skip
    computed = [dx if is_wanted else None for dx, is_wanted in zip(others, wanted(tensors, needs), strict=True)]
    return Gradients(dq, dk, dv, *computed)
