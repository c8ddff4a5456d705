"""PyTorch's FlexAttention, compiled, with which `bench cuda` and the experiments compare scores and masks."""

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

    Earlier compilations are discarded: PyTorch stops compiling a function after a few recompilations.
    """
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def keeps_graphs() -> contextlib.AbstractContextManager[Any]:
    """A context for forwards and backwards of compiled functions whose graph is retained for another backward."""
    import torch._functorch.config as config

    return config.patch(donated_buffer=False)


def block_mask_maker(rule: Rule, S: int, device: torch.device) -> Callable[[], BlockMask]:
    """The function that builds the block mask of S queries and S keys; uncompiled it would store all S x S values."""
    make = compiled(create_block_mask)
    return lambda: make(rule, None, None, S, S, device=device)


def causal_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def flex(score_mod: ScoreMod | None, block_mask: BlockMask | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention over [B, H, S, D] with one score_mod and one mask; there may be fewer KV heads."""
    attention = compiled(flex_attention)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])

    return call
