"""Models of diffusers with our attention backend beside diffusers' own: results, gradients, masks and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers", reason="the extra `test` is not installed: pip install -e '.[test]'")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="diffusers without attention backends")

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations import diffusers as fax  # noqa: E402

fax.register()

B, TEXT, WIDTH = 2, 9, 16


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _flux() -> tuple[nn.Module, dict[str, Any]]:
    """Joint attention of text and image tokens."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": _random(B, 16, 4), "encoder_hidden_states": _random(B, TEXT, WIDTH), "pooled_projections": _random(B, WIDTH),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(TEXT, 3), "timestep": torch.tensor([0.5] * B),
    }  # fmt: skip
    return model, inputs


def _wan() -> tuple[nn.Module, dict[str, Any]]:
    """Self-attention over a video, and cross attention to a prompt of another length."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=WIDTH, freq_dim=32,
        ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": _random(B, 4, 2, 8, 8),
        "timestep": torch.tensor([5] * B),
        "encoder_hidden_states": _random(B, TEXT, WIDTH),
    }
    return model, inputs


def _ltx() -> tuple[nn.Module, dict[str, Any]]:
    """Cross attention to padded prompts."""
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32, num_layers=2,
        caption_channels=WIDTH,
    )  # fmt: skip
    mask = torch.ones(B, TEXT).bool()
    mask[1, 5:] = False
    inputs = {
        "hidden_states": _random(B, 32, 4), "encoder_hidden_states": _random(B, TEXT, WIDTH), "timestep": torch.tensor([5.0] * B),
        "encoder_attention_mask": mask, "num_frames": 2, "height": 4, "width": 4,
    }  # fmt: skip
    return model, inputs


def _results(model: nn.Module, inputs: dict[str, Any], backend: str) -> list[Tensor]:
    model.zero_grad()
    with dispatch.attention_backend(backend):
        (out,) = model(**inputs, return_dict=False)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("made", [_flux, _wan, _ltx])
def test_models_compute_what_they_compute_with_torch(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, inputs = made()
    calls: list[Any] = []
    forward = flashattn_ext.forward
    monkeypatch.setattr(flashattn_ext, "forward", lambda *a, **o: (calls.append(o), forward(*a, **o))[1])
    expected = _results(model, inputs, "native")
    assert not calls
    got = _results(model, inputs, "fax")
    assert calls and len(got) == len(expected) > 10
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(b.abs().max())))


def test_a_model_keeps_the_backend_that_it_was_given() -> None:
    model, inputs = _wan()
    before, _ = dispatch._AttentionBackendRegistry.get_active_backend()
    try:
        model.set_attention_backend("fax")
        (out,) = model(**inputs, return_dict=False)
        model.set_attention_backend("native")
        torch.testing.assert_close(out, model(**inputs, return_dict=False)[0], rtol=1e-4, atol=1e-5)
    finally:
        dispatch._AttentionBackendRegistry.set_active_backend(before)


MASKS = {
    "keys": torch.rand(2, 7) < 0.6,
    "pairs": torch.rand(5, 7) < 0.6,
    "heads": torch.rand(2, 4, 5, 7) < 0.6,
    "additive": torch.randn(2, 1, 5, 7),
}


@pytest.mark.parametrize("name", ["none", "causal", "gqa", *MASKS])
def test_calls_mean_what_they_mean_with_torch(name: str) -> None:
    q, k, v = _random(2, 5, 4, 8), _random(2, 7, 4, 8), _random(2, 7, 4, 12)
    options: dict[str, Any] = {"attn_mask": MASKS.get(name), "is_causal": name == "causal", "scale": 0.3}
    if name == "gqa":
        k, v, options["enable_gqa"] = k[:, :, :2], v[:, :, :2], True
    got, expected = (dispatch.dispatch_attention_fn(q, k, v, backend=each, **options) for each in ("fax", "native"))
    if name in MASKS:  # a row that sees no key is 0 here, and NaN in torch's formula
        expected = expected.nan_to_num()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert got.is_contiguous()


def test_lse_is_returned() -> None:
    q, k, v = _random(2, 5, 4, 8), _random(2, 7, 4, 8), _random(2, 7, 4, 12)
    out, lse = fax.attention(q, k, v, return_lse=True)
    logits = torch.einsum("bihd,bjhd->bihj", q, k) / 8**0.5
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, torch.einsum("bihj,bjhd->bihd", logits.softmax(-1), v), rtol=1e-5, atol=1e-5)


def test_what_is_refused() -> None:
    q = _random(2, 5, 4, 8)
    with pytest.raises(
        NotImplementedError, match="_parallel_config: expected None, got diffusers' own context parallelism"
    ):
        fax.attention(q, q, q, _parallel_config=object())
    with pytest.raises(ValueError, match="is_causal: expected False beside an attn_mask"):
        fax.attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"flashattn_ext: an attn_mask of shape \[1, 1, 3, 5\]"):
        fax.attention(q, q, q, torch.ones(3, 5, dtype=torch.bool))
    for name in ("", "Fax", None):
        with pytest.raises(ValueError, match="name: expected a name in lower case"):
            fax.register(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'native' is an attention backend of diffusers"):
        fax.register("native")


def test_names() -> None:
    fax.register()  # again
    fax.register("fax2")
    assert [member.value for member in dispatch.AttentionBackendName][-2:] == ["fax", "fax2"]
    q = _random(2, 5, 4, 8)
    with dispatch.attention_backend("fax2"):
        torch.testing.assert_close(dispatch.dispatch_attention_fn(q, q, q), fax.attention(q, q, q), rtol=0, atol=0)
