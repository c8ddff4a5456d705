"""torchtitan's override of its packed attention: a model of its registry, results, gradients and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

pytest.importorskip("torchtitan", reason="pip install torchtitan")
titan = pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan needs triton")

from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_varlen_attn  # noqa: E402

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations.torchtitan import Attention, BlockAttention  # noqa: E402

# By backend: the configuration of a model, the class that replaces its attention, and the function of ours that it calls.
BACKENDS = {
    "varlen": (llama3_debugmodel_varlen_attn, Attention, "varlen_forward"),
    "flex": (llama3_debugmodel, BlockAttention, "forward"),
}
B, L = 2, 40


def _positions() -> Tensor:
    """[B, L]: documents of 13 and 27 tokens in the first row, one in the second."""
    return torch.stack([torch.cat([torch.arange(13), torch.arange(27)]), torch.arange(L)])


def _visible(positions: Tensor, left: int = -1) -> Tensor:
    """bool [B, L, L]."""
    document, at = (positions == 0).cumsum(1), torch.arange(positions.shape[1])
    distance = at[:, None] - at
    causal = (distance >= 0) & (distance <= left) if left >= 0 else distance >= 0
    return (document[:, :, None] == document[:, None]) & causal


def _formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out [B, L, H, Dv] and lse [B, L, H]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    logits = torch.einsum("bihd,bjhd->bihj", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    return torch.einsum("bihj,bjhd->bihd", logits.softmax(-1), v), logits.logsumexp(-1)


def _model(backend: str) -> Any:
    config = BACKENDS[backend][0]()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    override = f"flashattn_ext.integrations.torchtitan.{backend}"
    lines = apply_overrides(OverrideConfig(imports=[override]), config)
    assert len(lines) == 2 and all(override in line for line in lines)
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_states()
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_names_the_override(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, positions = _model(backend), _positions()
    _, kind, function = BACKENDS[backend]
    tokens = torch.randint(2048, (B, L), generator=torch.Generator().manual_seed(1))
    assert all(type(layer.attention.inner_attention) is kind for layer in model.layers.values())

    def results() -> list[Tensor]:
        model.zero_grad()
        out = model(tokens, positions=positions, attention_masks=masks)
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    calls: list[Any] = []
    original, masks = getattr(flashattn_ext, function), model.get_attention_masks(positions)
    monkeypatch.setattr(flashattn_ext, function, lambda *a, **o: (calls.append(o), original(*a, **o))[1])
    got = results()
    assert len(calls) == 2
    assert calls[0]["mask"] is calls[1]["mask"] if backend == "flex" else calls[0]["window_size"] == (-1, 0)
    visible = _visible(positions)
    monkeypatch.setattr(kind, "forward", lambda self, q, k, v, *, scale=None, **_: _formula(q, k, v, visible, scale)[0])
    for a, b in zip(got, results(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("left", [-1, 6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_and_what_is_done_with_out_and_lse(backend: str, left: int) -> None:
    """gpt-oss rescales out by its sinks there, through the gradient of lse."""
    attention: nn.Module = Attention(Attention.Config(window_size=(left, 0)))
    masks: Any = titan.create_varlen_metadata_for_document(_positions())
    if backend == "flex":
        attention, visible = BlockAttention(BlockAttention.Config()), _visible(_positions(), left)
        masks = create_block_mask(lambda b, h, i, j: visible[b, i, j], B, None, L, L, device="cpu")
    q, k, v = (torch.randn(B, L, heads, width) for heads, width in ((4, 8), (2, 8), (2, 12)))
    sinks = torch.randn(4)

    def transform(out: Tensor, lse: Tensor) -> Tensor:
        return out * torch.sigmoid(lse - sinks)[..., None]

    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = attention(*leaves, attention_masks=masks, scale=0.4, enable_gqa=True, out_transform=transform)
    expected = transform(*_formula(*leaves, _visible(_positions(), left), 0.4))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (got, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_making_it_activates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's own activates FlashAttention-3 for the whole process, on Hopper."""
    from torchtitan.tools import utils

    monkeypatch.setattr(utils, "get_cuda_flash_attention_impl", lambda: pytest.fail("asked for an implementation"))
    assert isinstance(Attention(Attention.Config()), nn.Module)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(Attention.Config())
    masks = titan.create_varlen_metadata_for_document(_positions())
    q, k = torch.randn(B, L, 4, 8), torch.randn(B, L, 2, 8)
    with pytest.raises(
        TypeError, match=r"attention_masks: expected a VarlenMetadata, got NoneType; .*attn_backend='varlen'"
    ):
        attention(q, q, q, attention_masks=None)
    with pytest.raises(ValueError, match="k_BLNH: expected the 4 heads of q_BLNH without enable_gqa, got 2"):
        attention(q, k, k, attention_masks=masks)
    with pytest.raises(TypeError, match="score_mod: expected nothing by this name, got function"):
        attention(q, q, q, attention_masks=masks, score_mod=lambda s, *_: s)
    blocks = BlockAttention(BlockAttention.Config())
    with pytest.raises(TypeError, match=r"attention_masks: expected FlexAttention's BlockMask, .*attn_backend='flex'"):
        blocks(q, q, q, attention_masks=masks)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device="cpu")
    with pytest.raises(NotImplementedError, match="score_mod: expected None, there are no score functions here"):
        blocks(q, q, q, attention_masks=block_mask, score_mod=lambda s, *_: s)
    with pytest.raises(ValueError, match="k_BLNH: expected the 4 heads"):
        blocks(q, k, k, attention_masks=block_mask)
    monkeypatch.setattr("flashattn_ext.integrations.torchtitan.is_in_batch_invariant_mode", lambda: True)
    attention(q, q, q, attention_masks=masks)
    with pytest.raises(NotImplementedError, match="invariant"):
        blocks(q, q, q, attention_masks=block_mask)
