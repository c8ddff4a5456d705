"""A small GPT over bytes: pre-norm blocks, rotary positions, grouped-query attention, SwiGLU, tied output head.

The attention is a parameter: `flashattn` is this package, `reference` its formula in plain PyTorch, `sdpa` PyTorch's own function,
`unfused` separate steps of PyTorch with the scores in memory. All compute the same model, so their loss curves can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashattn_ext
from flashattn_ext import Mask, distributed

from .data import NOT_PREDICTED

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the model; `dropout` applies to attention weights and to residual branches."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    dropout: float
    softmax: str  # a key of SOFTMAX
    attention: str  # a key of ATTENTION

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


SOFTMAX = {
    "smooth": "an extra logit of 0 in every softmax, so that a head may attend to nothing",
    "plain": "the usual softmax",
    "sink": "the extra logit is learned, one per head",
}


class SharedRows(NamedTuple):
    """The ranks that share the rows of a batch, and how many bytes a whole row has."""

    group: Any
    length: int


# An attention of the model: (q [B, S, Hq, D], k and v [B, S, Hk, D], dropout_p, smooth, sink [Hq] or None, mask) -> [B, S, Hq, D]
Attend = Callable[..., Any]


def through(forward: Callable[..., Any]) -> Attend:
    """An attention with this package's keywords; `options` are more of them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *given: Any, **options: Any) -> Any:
        keywords = dict(zip(("dropout_p", "smooth_softmax", "sink", "mask"), given, strict=False))
        return forward(q, k, v, causal=True, **keywords, **options)

    return attend


def _of_torch(attention: Callable[..., Tensor]) -> Attend:
    """An attention over [B, H, S, D] with the extra logit of each head, and the hidden scores of a mask [B, 1, S, S] (None: none)."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, smooth: bool, sink: Tensor | None, mask: Mask | None = None
    ) -> Tensor:
        logit = q.new_zeros(q.shape[2]) if smooth else sink
        hidden = None if mask is None else ~mask.dense(q.shape[1])
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return attention(*heads, causal=True, dropout_p=dropout_p, logit=logit, hidden=hidden).transpose(1, 2)

    return attend


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout_p: float, logit: Tensor | None, hidden: Tensor | None
) -> Tensor:
    options: dict[str, Any] = {"dropout_p": dropout_p, "enable_gqa": True}
    if logit is None and hidden is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
    after = hidden_scores(q.shape[2], q.device)
    bias = torch.zeros(1, 1, *after.shape, dtype=q.dtype, device=q.device).masked_fill(after, -math.inf)
    bias = bias if hidden is None else bias.masked_fill(hidden, -math.inf)
    if logit is not None:
        # The extra logit as a key in front: <q, 0> = 0, the mask adds the logit, and its value 0 adds nothing to the output.
        k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
        logits = logit.to(q.dtype)[:, None, None].expand(len(bias), -1, q.shape[2], 1)
        bias = torch.cat([logits, bias.expand(-1, q.shape[1], -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)


def unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout_p: float = 0.0, logit: Tensor | None = None,
    softcap: float = 0.0, bias: Tensor | None = None, hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention over [B, H, S, D] as steps of plain PyTorch, each with the S x S matrix in memory.

    The scale is applied to the smaller tensor, and the mask is made beforehand: both make it faster. There may be fewer KV heads.

    Args:
        logit: [H], an additional entry of every softmax, without a value.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        bias: broadcast to [B, H, S, S], added to the scores after that.
        hidden: bool, broadcast to [B, H, S, S]; scores that are masked in addition to those that causal masks.
    """
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
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


@lru_cache(maxsize=1)
def hidden_scores(S: int, device: torch.device) -> Tensor:
    """Which scores the causal mask hides: bool [S, S]."""
    return torch.ones(S, S, dtype=torch.bool, device=device).triu(1)


ATTENTION: dict[str, Attend] = {
    "flashattn": through(flashattn_ext.forward),
    "sdpa": _of_torch(_sdpa),
    "reference": through(flashattn_ext.attention_reference),
    "unfused": _of_torch(unfused_attention),
}


def rotary_table(context: int, head_dim: int) -> Tensor:
    """Cosines and sines `[2, context, 1, head_dim // 2]` of the rotary angles."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(context)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])[:, :, None, :]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the halves of x `[B, S, H, D]` by the angles of its positions, from `[2, S, 1, D // 2]` or `[2, B, S, 1, D // 2]`."""
    cos, sin = table.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def positions(documents: Tensor) -> Tensor:
    """int64 `[B, S]`: how many bytes of the same document precede each byte."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


class Attention(nn.Module):
    """With `logs_max_logits` set, a training forward leaves the largest of all logits in `max_logit`, a tensor of one number."""

    logs_max_logits = False
    max_logit: Tensor | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attend = ATTENTION[config.attention]
        self.kv_width = config.kv_heads * config.head_dim
        self.qkv = nn.Linear(config.width, config.width + 2 * self.kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.sink = nn.Parameter(torch.zeros(config.heads)) if config.softmax == "sink" else None

    def forward(self, x: Tensor, rotary: Tensor, mask: Mask | None = None, shared: SharedRows | None = None) -> Tensor:
        q, k, v = self.qkv(x).split([self.config.width, self.kv_width, self.kv_width], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in (q, k, v))
        attend = self.attend
        if shared is not None:
            attend = through(partial(distributed.attention, group=shared.group, seqlen=shared.length))
        dropout_p, smooth = self.config.dropout if self.training else 0.0, self.config.softmax == "smooth"
        arguments = rotate(q, rotary), rotate(k, rotary), v, dropout_p, smooth, self.sink, mask
        if self.logs_max_logits and self.training:
            heads, max_logits = attend(*arguments, return_max_logits=True)
            self.max_logit = max_logits.max()
        else:
            heads = attend(*arguments)
        return self.out(heads.flatten(-2))


def cross_entropy(logits: Tensor, targets: Tensor, count: int | None = None) -> Tensor:
    """Nats per byte of the targets that are not NOT_PREDICTED: their mean, or their sum over `count`."""
    logits, reduction = logits.flatten(0, 1).float(), "mean" if count is None else "sum"
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NOT_PREDICTED, reduction=reduction)
    return loss if count is None else loss / count


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    """By default the MLP has as many weights as the usual one of width 4x, rounded for the matrix units."""

    def __init__(self, config: ModelConfig, mlp_width: int | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config.width, mlp_width or round(config.width * 8 / 3 / 32) * 32)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Tensor, mask: Mask | None = None, shared: SharedRows | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), rotary, mask, shared))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes int64 `[B, S]`, S up to `context`, to logits of the next byte `[B, S, 256]`.

    With `shared` set, bytes and logits are this rank's part of each row, as `flashattn_ext.distributed.shard` returns it.
    """

    shared: SharedRows | None = None

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.register_buffer("rotary", rotary_table(context, config.head_dim), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual branches start small, so that the sum over the layers keeps unit scale.
                scale = 1 / math.sqrt(2 * config.layers) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """With documents `[B, S]`, where equal adjacent numbers form one document, each document is computed independently.

        `documents` covers whole rows, even if several ranks share each row.
        """
        mask, rotary, dim = None, self.rotary[:, : self.shared.length if self.shared else tokens.shape[1]], 1
        if documents is not None:
            mask, rotary, dim = Mask.documents(documents), self.rotary[:, positions(documents)], 2
        if self.shared is not None:
            rotary = distributed.shard(rotary, group=self.shared.group, dim=dim)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary, mask, self.shared)
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float, generator: torch.Generator) -> bytes:
        """Continues the prompt by `length` sampled bytes, each from at most `context` bytes before it.

        Samples are drawn on the CPU, from `generator`.
        """
        context = self.rotary.shape[1]
        tokens = torch.tensor([list(prompt)], device=self.embedding.weight.device)
        for _ in range(length):
            logits = self(tokens[:, -context:])[0, -1].float().cpu()
            drawn = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)[None]], dim=1)
        return bytes(tokens[0].tolist())
