"""fp8 in torch.float8_e4m3fn: quantize_fp8, and the values that quantised tensors stand for, which the reference computes with."""

from __future__ import annotations

import torch
from torch import Tensor

from . import arguments

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest value of FP8, which has no infinities


def quantised(values: Tensor, descale: Tensor | float) -> Tensor:
    """values / descale in FP8, rounded to nearest even; larger ones than LARGEST become LARGEST. descale broadcasts to values."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return (wide / descale).clamp(-LARGEST, LARGEST).to(FP8)


@torch.no_grad()
def quantize_fp8(x: Tensor, heads_dim: int, *, kv_heads: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantises q, k or v to torch.float8_e4m3fn, with one descale for each batch entry and KV head: element * descale is about x.

    The descale is the largest finite magnitude of its elements / 448, so that this one becomes the largest value of the dtype; 1 where
    all elements are 0. inf becomes the largest value of its head, NaN stays NaN. No gradient flows through it.

    Args:
        x: [B, S, H, D] or [B, H, S, D], or packed sequences [total, H, D]; float16, bfloat16, float32 or float64.
        heads_dim: the dimension of x that counts heads; negative ones count from the end.
        kv_heads: the number of KV heads, which divides H; None is H. For q of a call with fewer KV heads than query heads, whose
            descales belong to KV heads: all query heads of a KV head get the same one.

    Returns:
        (elements, descale): elements are float8_e4m3fn in the shape of x, descale is float32 [B, kv_heads], and [1, kv_heads] for
        packed sequences: the arguments q and descale_q, k and descale_k, or v and descale_v of a call.

    Raises:
        ValueError: x does not have 3 or 4 dimensions, heads_dim is none of those between batch or rows and head_dim, or kv_heads does
            not divide H.
        TypeError: x is no tensor of these dtypes, or another argument is no int.
    """
    arguments.tensors(x=x)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"x: expected dtype float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.dim() not in (3, 4):
        raise ValueError(f"x: expected [B, S, H, D], [B, H, S, D] or packed [total, H, D], got shape {tuple(x.shape)}")
    given = arguments.integer("heads_dim", heads_dim)
    axis = given + x.dim() if given < 0 else given
    if not 1 <= axis < x.dim() - 1:
        raise ValueError(f"heads_dim: expected a dimension from 1 to {x.dim() - 2} of x {tuple(x.shape)}, got {given}")
    heads = x.shape[axis]
    groups = heads if kv_heads is None else arguments.integer("kv_heads", kv_heads)
    if groups < 0 or (heads % groups if groups else heads):
        raise ValueError(f"kv_heads: expected a divisor of the {heads} heads of x, got {groups}")
    batch = x.shape[0] if x.dim() == 4 else 1
    per_group = x.unflatten(axis, (groups, heads // groups if groups else 0))
    per_group = per_group.movedim(axis, 1) if x.dim() == 4 else per_group.movedim(axis, 0)[None]
    magnitudes = per_group.abs().flatten(2).to(torch.promote_types(x.dtype, torch.float32))
    magnitudes = magnitudes.masked_fill_(~magnitudes.isfinite(), 0)
    largest = magnitudes.amax(2) if magnitudes.shape[2] else magnitudes.new_zeros(batch, groups)
    descale = _descale_of(largest)
    return quantised(x, _of_heads(descale, x, axis, None)), descale


def _descale_of(largest: Tensor) -> Tensor:
    """largest / LARGEST in float32, 1 for 0. Below the normal numbers, whose quotients have few digits, it is rounded up, so that no
    element becomes larger than LARGEST, and none is divided by 0.
    """
    limits = torch.finfo(torch.float32)
    quotient = (largest / LARGEST).float().clamp(max=limits.max)
    rounded_down = (quotient < limits.tiny) & (quotient.double() * LARGEST < largest.double())
    quotient = torch.where(rounded_down, torch.nextafter(quotient, torch.full_like(quotient, torch.inf)), quotient)
    return torch.where(largest > 0, quotient, 1)


def _of_heads(descale: Tensor, t: Tensor, axis: int, starts: list[int] | None) -> Tensor:
    """descale [B or 1, Hk or 1] as factors of t, whose dimension `axis` counts query or KV heads. starts: of packed sequences."""
    heads = t.shape[axis]
    of_heads = descale.repeat_interleave(heads // max(descale.shape[1], 1), 1) if descale.shape[1] > 1 else descale
    if t.dim() == 4:
        return of_heads[:, None, :, None] if axis == 2 else of_heads[:, :, None, None]
    if starts is None or descale.shape[0] == 1:
        return of_heads[:, :, None]
    lengths = torch.tensor(starts, device=t.device).diff()
    rows = of_heads.repeat_interleave(lengths, 0)
    after = rows.new_ones(t.shape[0] - rows.shape[0], rows.shape[1])  # rows of no sequence
    return torch.cat([rows, after])[:, :, None]


def values(t: Tensor, descale: Tensor | None, axis: int, starts: list[int] | None = None) -> Tensor:
    """element * descale in float32 of a tensor [B, S, H, D], [B, H, S, D] or [total, H, D]; other dtypes than FP8 are only widened.

    axis: the dimension of the heads. starts: where packed sequences begin, then where the last ends.
    """
    wide = t.float()
    return wide if descale is None or t.dtype != FP8 else wide * _of_heads(descale.float(), t, axis, starts)


def dtype_of_out(q: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of out of an fp8 call."""
    return out_dtype if out_dtype is not None else torch.bfloat16 if q.dtype == FP8 else q.dtype
