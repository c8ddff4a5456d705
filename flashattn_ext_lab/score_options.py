"""Score modifications before the softmax, as ours and its peers express them, for `bench cuda --set scores` and the experiment `scores`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SOFTCAP = 30.0
RELATIVE_REACH = 128  # keys to either side that have a bias of their own, as in T5

# (score, batch, head, query, key) -> score: FlexAttention's score_mod.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ScoreOption:
    """An option of `forward` that changes scores.

    `draw` makes its value from the number of heads, the length, the dtype of q and the device; the other functions take that value.
    """

    keyword: str
    draw: Callable[[int, int, torch.dtype, torch.device | str], Any]
    score_mod: Callable[[Any], ScoreMod]
    added: Callable[[Any, int], Tensor] | None  # [H, S, S] in fp32 or the value's dtype; None: it adds nothing
    trains: bool = False  # whether the backward computes its gradient, too


def slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [H]: the slopes of ALiBi (Press et al. 2022)."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)


def _distance(value: Tensor, S: int) -> Tensor:
    """Key minus query, [S, S]."""
    position = torch.arange(S, device=value.device)
    return position - position[:, None]


def _relative_index(distance: Tensor) -> Tensor:
    return distance.clamp(-RELATIVE_REACH, RELATIVE_REACH) + RELATIVE_REACH


def _alibi(trains: bool) -> ScoreOption:
    return ScoreOption(
        "alibi_slopes",
        draw=lambda heads, S, dtype, device: slopes(heads, device),
        score_mod=lambda value: lambda score, b, h, q, k: score - value[h] * (q - k).abs(),
        added=lambda value, S: -value[:, None, None] * _distance(value, S).abs(),
        trains=trains,
    )


SCORE_OPTIONS = {
    "softcap": ScoreOption(
        "softcap",
        draw=lambda *_: SOFTCAP,
        score_mod=lambda cap: lambda score, b, h, q, k: cap * torch.tanh(score / cap),
        added=None,
    ),
    "alibi": _alibi(trains=False),
    "learned alibi": _alibi(trains=True),
    "relative bias": ScoreOption(
        "relative_bias",
        draw=lambda heads, S, dtype, device: torch.randn(heads, 2 * RELATIVE_REACH + 1, device=device),
        score_mod=lambda value: lambda score, b, h, q, k: score + value[h, _relative_index(k - q)],
        added=lambda value, S: value[:, _relative_index(_distance(value, S))],
        trains=True,
    ),
    "bias": ScoreOption(
        "bias",
        draw=lambda heads, S, dtype, device: torch.randn(1, heads, S, S, dtype=dtype, device=device),
        score_mod=lambda value: lambda score, b, h, q, k: score + value[0, h, q, k],
        added=lambda value, S: value[0],
        trains=True,
    ),
}


def dense_bias(option: ScoreOption, value: Any, S: int, dtype: torch.dtype, *, causal: bool) -> Tensor:
    """[1, H, S, S]: what scaled_dot_product_attention takes for an option that adds, with -inf for what causal hides."""
    if option.added is None:
        raise NotImplementedError(f"it has no {option.keyword}")
    bias = option.added(value, S).to(dtype)
    if causal:
        bias = bias.masked_fill(torch.ones(S, S, dtype=torch.bool, device=bias.device).triu(1), -math.inf)
    return bias[None]
