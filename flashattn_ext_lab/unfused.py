"""Unfused attention, the reference of all comparisons."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    dropout_p: float = 0.0,
    logit: Tensor | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Attention over [B, H, S, D] as steps of plain PyTorch, each with the S x S matrix in memory.

    The scale is applied to the smaller tensor, and the mask is made beforehand: both make it faster.

    Args:
        logit: [H], an additional entry of every softmax, without a value.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        bias: broadcast to [B, H, S, S], added to the scores after that.
        hidden: bool, broadcast to [B, H, S, S]; scores that are masked in addition to those that causal masks.
    """
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(hidden_scores(q.shape[-2], q.device), -math.inf)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if logit is not None:
        column = logit.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)
    if logit is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout_p) @ v if dropout_p else weights @ v


@functools.lru_cache(maxsize=1)
def hidden_scores(S: int, device: torch.device) -> Tensor:
    """Which scores the causal mask hides: bool [S, S]."""
    return torch.ones(S, S, dtype=torch.bool, device=device).triu(1)
