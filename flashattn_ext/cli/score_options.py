"""What may happen to a score before the softmax, as ours takes it and as its peers do: what `bench cuda --set scores` and the
experiment `scores` measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SOFTCAP = 30.0
RELATIVE_REACH = 128  # keys to either side that have a bias of their own, as in T5

# (score, batch, head, query, key) -> score: what FlexAttention calls a score_mod.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ScoreOption:
    """An option of `forward` that changes scores.

    `draw` makes its value from the number of heads, the length, the dtype of q and the device; the others take that value.
    """

    keyword: str
    draw: Callable[[int, int, torch.dtype, torch.device | str], Any]
    score_mod: Callable[[Any], ScoreMod]
    added: Callable[[Any, int], Tensor] | None  # [H, S, S] in fp32 or the value's dtype; None: it adds nothing
    trains: bool = False  # whether the backward gives its gradient, too


def slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [H]: the slopes of ALiBi (Press et al. 2022)."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)


def _distance(S: int, device: torch.device) -> Tensor:
    """Key minus query, [S, S]."""
    position = torch.arange(S, device=device)
    return position - position[:, None]


def _alibi_added(value: Tensor, S: int) -> Tensor:
    return -value[:, None, None] * _distance(S, value.device).abs()


def _relative_index(distance: Tensor) -> Tensor:
    return distance.clamp(-RELATIVE_REACH, RELATIVE_REACH) + RELATIVE_REACH


def _softcap_mod(cap: float) -> ScoreMod:
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def _alibi_mod(value: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score - value[h] * (q - k).abs()


def _relative_mod(value: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score + value[h, _relative_index(k - q)]


def _bias_mod(value: Tensor) -> ScoreMod:
    return lambda score, b, h, q, k: score + value[0, h, q, k]


def _draw_slopes(heads: int, S: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return slopes(heads, device)


def _draw_relative(heads: int, S: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.randn(heads, 2 * RELATIVE_REACH + 1, device=device)


def _draw_bias(heads: int, S: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.randn(1, heads, S, S, dtype=dtype, device=device)


SCORE_OPTIONS = {
    "softcap": ScoreOption("softcap", lambda *_: SOFTCAP, _softcap_mod, None),
    "alibi": ScoreOption("alibi_slopes", _draw_slopes, _alibi_mod, _alibi_added),
    "learned alibi": ScoreOption("alibi_slopes", _draw_slopes, _alibi_mod, _alibi_added, trains=True),
    "relative bias": ScoreOption(
        "relative_bias",
        _draw_relative,
        _relative_mod,
        lambda value, S: value[:, _relative_index(_distance(S, value.device))],
        trains=True,
    ),
    "bias": ScoreOption("bias", _draw_bias, _bias_mod, lambda value, S: value[0], trains=True),
}


def dense_bias(option: ScoreOption, value: Any, S: int, dtype: torch.dtype, *, causal: bool) -> Tensor:
    """[1, H, S, S]: what scaled_dot_product_attention takes for an option that adds, with -inf for what causal hides."""
    if option.added is None:
        raise NotImplementedError(f"it has no {option.keyword}")
    bias = option.added(value, S).to(dtype)
    if causal:
        bias = bias.masked_fill(torch.ones(S, S, dtype=torch.bool, device=bias.device).triu(1), -math.inf)
    return bias[None]
