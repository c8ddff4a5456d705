"""Attention blocks of models in use, written out in plain PyTorch from their descriptions, agree: forward and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashattn_ext

B, S, HEADS, DIM = 2, 150, 4, 16
WIDTH = HEADS * DIM
Weights = dict[str, Tensor]


def weights(device: str, **shapes: tuple[int, ...]) -> Weights:
    made = {"x": torch.randn(B, S, WIDTH, device=device)}
    made |= {name: torch.randn(shape, device=device) / math.sqrt(shape[0]) for name, shape in shapes.items()}
    return {name: t.requires_grad_() for name, t in made.items()}


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """[B, S, heads, DIM]"""
    return (x @ weight).unflatten(-1, (-1, DIM))


def softmax_of(scores: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """scores [B, H, S, S], v [B, S, H, DIM] -> [B, S, H * DIM]"""
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)


def later_keys(device: str) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool, device=device).triu(1)


def assert_same(ours: Callable[[Weights], Tensor], theirs: Callable[[Weights], Tensor], given: Weights) -> None:
    results = []
    for block in (ours, theirs):
        out = block(given)
        dout = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        results.append((out, *torch.autograd.grad(out, list(given.values()), dout)))
    for name, got, expected in zip(("out", *given), *results, strict=True):
        scale = expected.abs().max()
        torch.testing.assert_close(
            got / scale, expected / scale, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def t5_bucket(distance: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """The bucket of key minus query, one distance at a time: one bucket for each near distance, then ever wider buckets."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        if distance > 0:
            bucket = buckets
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    near = buckets // 2
    if distance < near:
        return bucket + distance
    share = torch.tensor(distance / near, dtype=torch.float32).log() / math.log(max_distance / near)
    return bucket + min(near + int(share * (buckets - near)), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets,max_distance", [(32, 128), (8, 20)])
def test_t5(device: str, bidirectional: bool, buckets: int, max_distance: int) -> None:
    """Scores are not scaled; a learned bias for each bucket of distances."""
    shape = (WIDTH, WIDTH)
    given = weights(device, q=shape, k=shape, v=shape, o=shape, table=(buckets, HEADS))

    def ours(w: Weights) -> Tensor:
        bias = flashattn_ext.t5_relative_bias(w["table"], max_distance, bidirectional, max_distance)
        q, k, v = (heads(w["x"], w[name]) for name in "qkv")
        out = flashattn_ext.forward(q / 4, k, v, softmax_scale=1.0, relative_bias=bias, causal=not bidirectional)
        return out.flatten(2) @ w["o"]

    def theirs(w: Weights) -> Tensor:
        q, k, v = (heads(w["x"], w[name]) for name in "qkv")
        bucket = [[t5_bucket(j - i, bidirectional, buckets, max_distance) for j in range(S)] for i in range(S)]
        bias = w["table"][torch.tensor(bucket, device=device)].permute(2, 0, 1)
        scores = torch.einsum("bihd,bjhd->bhij", q / 4, k) + bias
        return softmax_of(scores, v, None if bidirectional else later_keys(device)) @ w["o"]

    assert_same(ours, theirs, given)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_gemma_2(device: str, sliding_window: int | None) -> None:
    """Grouped-query attention with its own scale and a softcap; every other layer has a sliding window."""
    given = weights(device, q=(WIDTH, WIDTH), k=(WIDTH, WIDTH // 2), v=(WIDTH, WIDTH // 2), o=(WIDTH, WIDTH))
    scale, cap = 2 * DIM**-0.5, 2.5

    def ours(w: Weights) -> Tensor:
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1)
        q, k, v = (heads(w["x"], w[name]) for name in "qkv")
        out = flashattn_ext.forward(q, k, v, causal=True, window_size=window, softmax_scale=scale, softcap=cap)
        return out.flatten(2) @ w["o"]

    def theirs(w: Weights) -> Tensor:
        q, k, v = (heads(w["x"], w[name]) for name in "qkv")
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        scores = torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * scale / cap) * cap
        hidden = later_keys(device)
        if sliding_window is not None:
            hidden = hidden | torch.ones_like(hidden).tril(-sliding_window)
        return softmax_of(scores, v, hidden) @ w["o"]

    assert_same(ours, theirs, given)


def test_mpt(device: str) -> None:
    """ALiBi as a bias of the key's position alone, which in causal attention differs from ALiBi by a constant for each row."""
    given = weights(device, qkv=(WIDTH, 3 * WIDTH), o=(WIDTH, WIDTH))
    given["slopes"] = (2.0 ** -torch.arange(2, 10, 2, device=device, dtype=torch.float32)).requires_grad_()

    def ours(w: Weights) -> Tensor:
        q, k, v = (w["x"] @ w["qkv"]).clamp(-2, 2).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        return flashattn_ext.flash_attn_func(q, k, v, causal=True, alibi_slopes=w["slopes"]).flatten(2) @ w["o"]

    def theirs(w: Weights) -> Tensor:
        q, k, v = (w["x"] @ w["qkv"]).clamp(-2, 2).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        bias = w["slopes"][:, None, None] * torch.arange(1 - S, 1, device=device)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(DIM) + bias
        return softmax_of(scores, v, later_keys(device)) @ w["o"]

    assert_same(ours, theirs, given)


def test_wide_global_layers_train_like_plain_pytorch(device: str) -> None:
    """As in Gemma 4, with grouped-query attention: sliding-window layers with D = 256, and a global layer with D = 512."""
    layers, heads_q, steps = [(256, 40), (512, None), (256, 40)], 4, 12

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        window_size = (-1, -1) if window is None else (window - 1, -1)
        return flashattn_ext.forward(q, k, v, causal=True, window_size=window_size).flatten(2)

    def attend_plainly(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        k, v = (t.repeat_interleave(heads_q, 2) for t in (k, v))
        hidden = later_keys(device)
        if window is not None:
            hidden = hidden | torch.ones_like(hidden).tril(-window)
        return softmax_of(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]), v, hidden)

    def losses(attention: Callable[..., Tensor]) -> list[float]:
        generator = torch.Generator().manual_seed(4)

        def matrix(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / math.sqrt(shape[0])).to(device).requires_grad_()

        x, target = (torch.randn(B, S, WIDTH, generator=generator).to(device) for _ in range(2))
        weights = [(matrix(WIDTH, (heads_q + 2) * d), matrix(heads_q * d, WIDTH)) for d, _ in layers]
        optimizer = torch.optim.SGD([w for pair in weights for w in pair], lr=1.0)
        seen = []
        for _ in range(steps):
            y = x
            for (qkv, out), (d, window) in zip(weights, layers, strict=True):
                q, k, v = (y @ qkv).unflatten(-1, (-1, d)).split((heads_q, 1, 1), 2)
                y = torch.nn.functional.layer_norm(y + attention(q, k, v, window) @ out, (WIDTH,))
            loss = (y - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    ours, plain = losses(attend), losses(attend_plainly)
    assert ours[-1] < 0.85 * ours[0]
    assert ours == pytest.approx(plain, rel=1e-4)
