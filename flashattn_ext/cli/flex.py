"""PyTorch's FlexAttention, compiled, beside which `bench cuda` and the experiments put scores and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .patterns import Rule
from .score_options import ScoreMod

FLEX = "flex"
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiled from scratch, with the sizes of the first call as constants.

    What was compiled before is forgotten: PyTorch gives up on a function that it has compiled for a few other masks.
    """
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def keeps_graphs() -> contextlib.AbstractContextManager[Any]:
    """Around forwards and backwards of compiled functions whose graph is kept for another backward."""
    import torch._functorch.config as config

    return config.patch(donated_buffer=False)


def block_mask_maker(rule: Rule, S: int, device: torch.device) -> Callable[[], BlockMask]:
    """What makes the block mask of S queries and S keys; compiled, or it would hold all S x S values."""
    make = compiled(create_block_mask)
    return lambda: make(rule, None, None, S, S, device=device)


def causal_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def flex(score_mod: ScoreMod | None, block_mask: BlockMask | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention over [B, H, S, D] with one score_mod and one mask; key heads may be fewer."""
    attention = compiled(flex_attention)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])

    return call
