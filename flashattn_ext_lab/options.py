"""Masks that models use, at any length, and score modifications before the softmax, as ours and its peers express them: what
`bench cuda --set masks`, `--set scores` and the experiments `masks` and `scores` measure.

Every size of a mask is a fraction of the length S, so that 512 positions show the pattern of 32768 positions.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashattn_ext import Mask

SOFTCAP = 30.0
RELATIVE_REACH = 128  # keys to either side that have a bias of their own, as in T5
Device = torch.device | str
# (batch, head, query, key) -> bool: what FlexAttention calls a mask_mod, given index tensors.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (score, batch, head, query, key) -> score: FlexAttention's score_mod.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# Masks


@dataclass(frozen=True)
class Pattern:
    """A mask over S queries and S keys, as ours takes it and as its peers do."""

    about: str
    make: Callable[[int, Device], Mask]
    causal: bool  # whether the call gets causal=True as well
    rule: Callable[[int, Device], Rule]  # the whole mask, causal included, as FlexAttention takes it
    lengths: Callable[[int], tuple[int, ...]] | None = None  # lengths of an equivalent packed call

    def whole(self, S: int, device: Device = "cpu") -> Mask:
        """With what causal hides."""
        mask = self.make(S, device)
        return mask & Mask.window(-1, 0, S, S, device=device) if self.causal else mask

    def dense(self, S: int, device: Device = "cpu") -> Tensor:
        """bool [1, 1, S, S], causal included."""
        return self.whole(S, device).dense(S)

    def visible_pairs(self, S: int) -> int:
        """Number of query-key pairs that one head computes."""
        first, last = self.whole(S).intervals.long().clamp(0, S).unbind(-1)
        return int((last - first).clamp(min=0).sum())


def drawn_lengths(tokens: int, draw: Callable[[], float]) -> tuple[int, ...]:
    """Drawn lengths of sequences with `tokens` tokens in total; the last one takes the remainder."""
    lengths: list[int] = []
    while left := tokens - sum(lengths):
        lengths.append(min(left, max(1, round(draw()))))
    return tuple(lengths)


@functools.cache
def document_lengths(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Log-normal lengths (sigma 1, mean tokens / 16) of documents that fill a sequence."""
    generator, mean = random.Random(seed), math.log(tokens / 16) - 0.5
    return drawn_lengths(tokens, lambda: generator.lognormvariate(mean, 1.0))


def _ids(lengths: tuple[int, ...], device: Device) -> Tensor:
    """int64 [tokens]: the number of each position's document."""
    counts = torch.tensor(lengths, device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(counts, output_size=sum(lengths))


def _documents(about: str, lengths: Callable[[int], tuple[int, ...]]) -> Pattern:
    def rule(S: int, device: Device) -> Rule:
        ids = _ids(lengths(S), device)
        return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])

    return Pattern(about, lambda S, device: Mask.documents(_ids(lengths(S), device)[None]), True, rule, lengths)


def _image_ids(S: int, device: Device) -> Tensor:
    """int64 [S]: the number of an image's positions, -1 for text; four images, each at the end of a quarter.

    At S = 16384 they have 2304 tokens of 4096: four pictures of 24 x 24 patches.
    """
    period, image = max(S // 4, 1), max(S * 9 // 64, 1)
    position = torch.arange(S, device=device)
    return torch.where(position % period >= period - image, position // period, -1)


def _chunk(S: int) -> int:
    return max(S // 8, 1)


def _window(S: int) -> tuple[int, int]:
    """Keys to the left, and how many of the first keys are visible to every query."""
    return S // 8, max(S // 512, 1)


def _image_rule(S: int, device: Device) -> Rule:
    ids = _image_ids(S, device)
    return lambda b, h, q, k: (q >= k) | ((ids[q] == ids[k]) & (ids[q] >= 0))


PATTERNS = {
    "documents": _documents(
        "documents packed into one sequence, causal inside; lengths log-normal (sigma 1) with a mean of S/16",
        document_lengths,
    ),
    "one document": _documents("a sequence that is one document, causal", lambda S: (S,)),
    "prefix": Pattern(
        "a prefix of S/4 that is visible to every query, causal after it",
        lambda S, device: Mask.prefix_lm(torch.tensor([S // 4], device=device), S, S),
        False,
        lambda S, device: lambda b, h, q, k: (q >= k) | (k < S // 4),
    ),
    "chunks": Pattern(
        "chunks of S/8, causal inside",
        lambda S, device: Mask.chunked(_chunk(S), S, S, device=device),
        True,
        lambda S, device: lambda b, h, q, k: (q >= k) & (q // _chunk(S) == k // _chunk(S)),
        lambda S: tuple(min(_chunk(S), S - start) for start in range(0, S, _chunk(S))),
    ),
    "window": Pattern(
        "a causal window of S/8 and S/512 keys at the start that are visible to every query",
        lambda S, device: Mask.window(_window(S)[0], 0, S, S, global_keys=_window(S)[1], device=device),
        True,
        lambda S, device: lambda b, h, q, k: (q >= k) & ((q - k <= _window(S)[0]) | (k < _window(S)[1])),
    ),
    "images": Pattern(
        "causal text with four images whose tokens see each other, 56 % of all tokens",
        lambda S, device: Mask.blocks(_image_ids(S, device)[None]),
        False,
        _image_rule,
    ),
}


# Score modifications


@dataclass(frozen=True)
class ScoreOption:
    """An option of `forward` that changes scores.

    `draw` makes its value from the number of heads, the length, the dtype of q and the device; the other functions take that value.
    """

    keyword: str
    draw: Callable[[int, int, torch.dtype, Device], Any]
    score_mod: Callable[[Any], ScoreMod]
    added: Callable[[Any, int], Tensor] | None  # [H, S, S] in fp32 or the value's dtype; None: it adds nothing
    trains: bool = False  # whether the backward computes its gradient, too


def _distance(value: Tensor, S: int) -> Tensor:
    """Key minus query, [S, S]."""
    position = torch.arange(S, device=value.device)
    return position - position[:, None]


def _relative_index(distance: Tensor) -> Tensor:
    return distance.clamp(-RELATIVE_REACH, RELATIVE_REACH) + RELATIVE_REACH


def _alibi(trains: bool) -> ScoreOption:
    """With the slopes of ALiBi (Press et al. 2022), fp32 [H]."""
    return ScoreOption(
        "alibi_slopes",
        draw=lambda heads, S, dtype, device: torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads),
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
