"""A small GPT over bytes: pre-norm blocks, rotary positions, grouped-query attention, SwiGLU, tied
output head.

The attention is a parameter: `flashattn` is this package, `reference` its plain PyTorch formula,
`sdpa` PyTorch's own function, `unfused` three steps of PyTorch with the scores in memory. All compute
the same model, so their loss curves can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashattn_ext
from flashattn_ext import Mask
from flashattn_ext.decode import has_decoding

from .data import NOT_PREDICTED
from .unfused import unfused_attention

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the model; `dropout` serves attention weights and residual branches
    alike.
    """

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
    "smooth": "one extra logit 0 in every denominator, so that a head may attend to nothing",
    "plain": "the usual softmax",
    "sink": "the extra logit is learned, one per head",
}


class SharedRows(NamedTuple):
    """The ranks that share the rows of a batch, and how many bytes a whole row has."""

    group: Any
    length: int


def _flashattn(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, smooth: bool, sink: Tensor | None, mask: Mask | None = None
) -> Tensor:
    return flashattn_ext.forward(q, k, v, causal=True, dropout_p=dropout_p, smooth_softmax=smooth, sink=sink, mask=mask)


def _over_ranks(
    shared: SharedRows, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, smooth: bool, sink: Tensor | None,
    mask: Mask | None = None,
) -> Tensor:  # fmt: skip
    """_flashattn, of rows that several ranks share."""
    from flashattn_ext import distributed

    options = {"causal": True, "dropout_p": dropout_p, "smooth_softmax": smooth, "sink": sink, "mask": mask}
    return distributed.attention(q, k, v, group=shared.group, seqlen=shared.length, **options)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, smooth: bool, sink: Tensor | None, mask: Mask | None = None
) -> Tensor:
    return flashattn_ext.attention_reference(
        q, k, v, causal=True, dropout_p=dropout_p, smooth_softmax=smooth, sink=sink, mask=mask
    )


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, smooth: bool, sink: Tensor | None, mask: Mask | None = None
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not smooth and sink is None and mask is None:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
    length = q.shape[2]
    visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device).tril()
    bias = visible if mask is None else visible & mask.dense(length)
    if smooth or sink is not None:
        # The extra logit as a key in front: <q, 0> = 0, the mask adds the sink, and its value 0 adds
        # nothing to the output.
        k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
        bias = F.pad(bias, (1, 0), value=True)
    if sink is not None:
        hidden = torch.where(bias[..., 1:], 0.0, -math.inf).to(q.dtype).expand(-1, q.shape[1], -1, -1)
        logits = sink.to(q.dtype)[:, None, None].expand(len(hidden), -1, length, 1)
        bias = torch.cat([logits, hidden], dim=-1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, enable_gqa=True)
    return out.transpose(1, 2)


def _unfused(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, smooth: bool, sink: Tensor | None, mask: Mask | None = None
) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    logit = q.new_zeros(q.shape[2]) if smooth else sink
    hidden = None if mask is None else ~mask.dense(q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = unfused_attention(q, k, v, causal=True, dropout_p=dropout_p, logit=logit, hidden=hidden)
    return out.transpose(1, 2)


MAX_HEAD_DIM = {"flashattn": 512}  # of the attentions that have a limit

# (q [B, S, Hq, D], k and v [B, S, Hk, D], dropout_p, smooth, sink [Hq] or None, mask) -> [B, S, Hq, D]
ATTENTION: dict[str, Callable[..., Tensor]] = {
    "flashattn": _flashattn,
    "sdpa": _sdpa,
    "reference": _reference,
    "unfused": _unfused,
}


def rotary_table(context: int, head_dim: int) -> Tensor:
    """Cosines and sines `[2, context, 1, head_dim // 2]` of the rotary angles."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(context)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])[:, :, None, :]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns each pair of halves of x `[B, S, H, D]` by its position's angle, from `[2, S, 1, D // 2]` or `[2, B, S, 1, D // 2]`."""
    cos, sin = table.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def positions(documents: Tensor) -> Tensor:
    """int64 `[B, S]`: how many neighbours of the same document are in front of each byte."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


@dataclass
class Cache:
    """Keys and values of one layer, [1, context, kv_heads, head_dim]; the first `length` are those of positions gone by."""

    k: Tensor
    v: Tensor
    length: int = 0


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attend = ATTENTION[config.attention]
        self.kv_width = config.kv_heads * config.head_dim
        self.qkv = nn.Linear(config.width, config.width + 2 * self.kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.sink = nn.Parameter(torch.zeros(config.heads)) if config.softmax == "sink" else None

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Mask | None = None,
        shared: SharedRows | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """With a cache, x is what comes after the positions that it holds, and `rotary` the whole table."""
        q, k, v = self.qkv(x).split([self.config.width, self.kv_width, self.kv_width], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in (q, k, v))
        smooth = self.config.softmax == "smooth"
        if cache is None:
            dropout_p = self.config.dropout if self.training else 0.0
            attend = self.attend if shared is None else partial(_over_ranks, shared)
            heads = attend(rotate(q, rotary), rotate(k, rotary), v, dropout_p, smooth, self.sink, mask)
        else:
            cos, sin = rotary[:, :, 0].to(q.dtype)
            heads = flashattn_ext.flash_attn_with_kvcache(
                q, cache.k, cache.v, k, v, cos, sin, cache.length, causal=True, rotary_interleaved=False,
                smooth_softmax=smooth, sink=self.sink,
            )  # fmt: skip
            cache.length += x.shape[1]
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
    """`mlp_width` without a value makes as many weights as the usual 4x MLP, rounded for the matrix units."""

    def __init__(self, config: ModelConfig, mlp_width: int | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config.width, mlp_width or round(config.width * 8 / 3 / 32) * 32)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Mask | None = None,
        shared: SharedRows | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), rotary, mask, shared, cache))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes int64 `[B, S]`, S up to `context`, to logits of the next byte `[B, S, 256]`.

    With `shared` set, bytes and logits are this rank's part of each row, as `flashattn_ext.distributed.shard` gives it.
    """

    shared: SharedRows | None = None

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.register_buffer("rotary", rotary_table(context, config.head_dim), persistent=False)
        self._initialise(config.layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual branches start small, so that the sum over the layers keeps unit scale.
                scale = 1 / math.sqrt(2 * layers) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """With documents `[B, S]`, numbers of which equal neighbours are one document, each is computed as if it were alone.

        They are those of whole rows, also where ranks share them.
        """
        mask, rotary, dim = None, self.rotary[:, : self.shared.length if self.shared else tokens.shape[1]], 1
        if documents is not None:
            mask, rotary, dim = Mask.documents(documents), self.rotary[:, positions(documents)], 2
        if self.shared is not None:
            from flashattn_ext import distributed

            rotary = distributed.shard(rotary, group=self.shared.group, dim=dim)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary, mask, self.shared)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats per byte, of the targets that are not NOT_PREDICTED."""
        return cross_entropy(self(tokens, documents), targets)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float, generator: torch.Generator) -> bytes:
        """Continues the prompt by `length` sampled bytes.

        The model sees its `context` last bytes at most, and every so often fewer: when they are full it goes on with the later half
        of them. Drawing happens on the CPU, from `generator`.
        """
        device = self.embedding.weight.device
        context = self.rotary.shape[1]
        tokens = torch.tensor([list(prompt)], device=device)
        start, caches = max(tokens.shape[1] - context, 0), self._new_caches()
        for _ in range(length):
            if tokens.shape[1] - start > context:  # goes on with the later half
                start, caches = tokens.shape[1] - max(context // 2, 1), self._new_caches()
            logits = self._next_logits(tokens[:, start:], caches).float().cpu()
            drawn = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
        return bytes(tokens[0].tolist())

    def _new_caches(self) -> list[Cache]:
        """One for each layer; none where the attention, or the device, has no calls with a cache."""
        config, like = self.blocks[0].attention.config, self.blocks[0].attention.qkv.weight
        if config.attention != "flashattn" or not has_decoding(like.device):
            return []
        shape = (1, self.rotary.shape[1], config.kv_heads, config.head_dim)
        return [Cache(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.blocks]

    def _next_logits(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """Logits [256] of the byte after tokens [1, S], of which caches hold all but the last ones."""
        if not caches:
            return self(tokens)[0, -1]
        x = self.embedding(tokens[:, caches[0].length :])
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, self.rotary, cache=cache)
        return F.linear(self.norm(x[0, -1]), self.embedding.weight)
