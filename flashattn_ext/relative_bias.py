"""Relative biases computed from smaller tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import arguments


def t5_relative_bias(table: Tensor, L: int, bidirectional: bool = True, max_distance: int = 128) -> Tensor:
    """T5's bias of each distance from -L to L, for the option `relative_bias`; differentiable.

    Args:
        table: [buckets, Hq], the weight of T5's `relative_attention_bias`; any float dtype.
        L: the largest distance. Farther keys get the bias of the keys at L. For every L of at least max_distance this is exactly
            T5's bias, because T5 puts all keys from max_distance on into one bucket.
        bidirectional: half of the buckets are for keys after the query (encoders); otherwise such keys share
            the bucket of distance 0 (decoders).
        max_distance: the distance from which on all keys share a bucket.

    Returns:
        [Hq, 2 L + 1], in the dtype of `table`; differentiable with respect to `table`.

    Raises:
        ValueError: the shape of `table`, or a number, is not as described.
        TypeError: a type is not as described.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer".
    """
    arguments.tensors(table=table)
    L, max_distance = arguments.integer("L", L), arguments.integer("max_distance", max_distance)
    sides = 2 if arguments.flag("bidirectional", bidirectional) else 1
    if table.dim() != 2 or table.shape[0] < 2 * sides or table.shape[0] % sides:
        raise ValueError(
            f"table: expected shape [buckets, heads] with {'an even number of at least 4' if sides == 2 else 'at least 2'} "
            f"buckets, got {list(table.shape)}"
        )
    if L < 0:
        raise ValueError(f"L: expected at least 0, got {L}")
    of_a_side = table.shape[0] // sides
    exact = of_a_side // 2  # buckets of a single distance each; the others grow with the logarithm of the distance
    if max_distance <= exact:
        raise ValueError(
            f"max_distance: expected more than {exact}, the distances with a bucket of their own, got {max_distance}"
        )
    distance = torch.arange(-L, L + 1, device=table.device)
    far = distance.abs() if sides == 2 else -distance.clamp(max=0)
    # In float32, as in the models that were trained with it: an exact logarithm would move some keys by a bucket.
    growth = torch.log(far.clamp(min=exact).float() / exact) / math.log(max_distance / exact) * (of_a_side - exact)
    bucket = torch.where(far < exact, far, (exact + growth.long()).clamp(max=of_a_side - 1))
    if sides == 2:
        bucket = bucket + torch.where(distance > 0, of_a_side, 0)
    return table[bucket].t()
