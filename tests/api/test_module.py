"""FlashAttention, the nn.Module."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import flashattn_ext
from flashattn_ext import FlashAttention


def qkv(device: str, heads: int = 2, D: int = 64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 33, heads, D, device=device) for _ in range(3))


def test_defaults_and_call(device: str) -> None:
    q, k, v = qkv(device)
    attn = FlashAttention(head_dim=64, dropout=0.1, causal=True, use_smooth_softmax=True).to(device)
    torch.manual_seed(3)
    expected = flashattn_ext.forward(q, k, v, causal=True, dropout_p=0.1, smooth_softmax=True)
    torch.manual_seed(3)
    assert torch.equal(attn(q, k, v), expected)
    torch.manual_seed(3)
    assert torch.equal(attn.forward(q, k, v), expected)


def test_dropout_only_in_training(device: str) -> None:
    q, k, v = qkv(device)
    attn = FlashAttention(head_dim=64, dropout=0.5, causal=True, use_smooth_softmax=True).to(device)
    assert not torch.equal(attn(q, k, v), attn(q, k, v))
    attn.eval()
    assert torch.equal(attn(q, k, v), flashattn_ext.forward(q, k, v, causal=True, smooth_softmax=True))


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_options_reach_the_call(device: str, smooth: bool, causal: bool) -> None:
    q, k, v = qkv(device)
    attn = FlashAttention(head_dim=64, dropout=0.0, causal=causal, use_smooth_softmax=smooth).to(device)
    assert torch.equal(attn(q, k, v), flashattn_ext.forward(q, k, v, causal=causal, smooth_softmax=smooth))
    assert not list(attn.parameters())


def test_biases_reach_the_call(device: str) -> None:
    q, k, v = qkv(device)
    slopes, relative = torch.rand(2, device=device), torch.nn.Parameter(torch.randn(2, 5, device=device))
    bias, mask = torch.randn(1, 2, 33, 33, device=device), flashattn_ext.Mask.chunked(8, 33, 33, device=device)
    attn = FlashAttention(64, softcap=2.0, alibi_slopes=slopes, relative_bias=relative)
    assert [name for name, _ in attn.named_parameters()] == ["relative_bias"]
    assert [name for name, _ in attn.named_buffers()] == ["alibi_slopes"]
    options = dict(softcap=2.0, alibi_slopes=slopes, relative_bias=relative, bias=bias, mask=mask)
    assert torch.equal(attn(q, k, v, bias=bias, mask=mask), flashattn_ext.forward(q, k, v, **options))
    attn.to(torch.bfloat16)  # casts the slopes, too; forward requires float32
    out = attn(*(t.to(torch.bfloat16) for t in (q, k, v)))
    assert out.dtype == torch.bfloat16


def test_learnable_sink(device: str) -> None:
    q, k, v = qkv(device)
    attn = FlashAttention(
        head_dim=64, dropout=0.0, causal=True, use_smooth_softmax=False, learnable_sink=True, num_heads=2
    ).to(device)
    (sink,) = attn.parameters()
    assert sink.shape == (2,) and sink.requires_grad
    optimiser = torch.optim.SGD(attn.parameters(), lr=1.0)
    before = sink.detach().clone()
    out = attn(q, k, v)
    assert torch.equal(out, flashattn_ext.forward(q, k, v, causal=True, sink=sink))
    out.square().sum().backward()
    optimiser.step()
    assert (sink != before).all()


def test_state_dict_round_trip(device: str) -> None:
    options = dict(head_dim=64, causal=True, use_smooth_softmax=False, learnable_sink=True, num_heads=2)
    attn, other = FlashAttention(**options).to(device).eval(), FlashAttention(**options).to(device).eval()
    with torch.no_grad():
        next(attn.parameters()).copy_(torch.tensor([0.5, -2.0]))
    buffer = io.BytesIO()
    torch.save(attn.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    q, k, v = qkv(device)
    assert torch.equal(attn(q, k, v), other(q, k, v))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_heads"):
        FlashAttention(head_dim=64, use_smooth_softmax=False, learnable_sink=True)
    with pytest.raises(ValueError, match=r"dropout.*1\.5"):
        FlashAttention(head_dim=64, dropout=1.5)
    for softcap in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"softcap: .* got {softcap}"):
            FlashAttention(head_dim=64, softcap=softcap)
    with pytest.raises(TypeError, match=r"alibi_slopes.*got list"):
        FlashAttention(head_dim=64, alibi_slopes=[0.5])
    with pytest.raises(ValueError, match=r"head_dim.*600"):
        FlashAttention(head_dim=600)


def test_head_dim_is_checked(device: str) -> None:
    with pytest.raises(ValueError, match=r"head_dim.*64.*32|32.*head_dim.*64"):
        FlashAttention(head_dim=64)(*qkv(device, D=32))


def test_shows_its_options() -> None:
    text = repr(FlashAttention(head_dim=64, dropout=0.25, causal=True))
    assert "64" in text and "0.25" in text and "causal" in text


def test_the_repr_has_every_option() -> None:
    text = repr(FlashAttention(head_dim=64, window_size=(7, 0), softcap=2.0, invariant=True))
    assert "window_size=(7, 0)" in text and "softcap=2.0" in text and "invariant=True" in text


@pytest.mark.parametrize("q", [None, [1.0], 3])
def test_q_that_is_no_tensor(q: object) -> None:
    k = torch.randn(1, 3, 2, 64)
    for attn in (FlashAttention(64), FlashAttention(64, alibi_slopes=torch.ones(2))):
        with pytest.raises(TypeError, match=f"^q: expected a torch.Tensor, got {type(q).__name__}"):
            attn(q, k, k)
    with pytest.raises(ValueError, match="head_dim=64"):
        FlashAttention(64)(torch.tensor(1.0), k, k)


def test_fp8_with_slopes_is_refused_in_words() -> None:
    """torch does not promote float8, which raised its own error."""
    q = torch.randn(1, 3, 2, 64).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="alibi_slopes: a bias is not implemented for float8_e4m3fn"):
        FlashAttention(64, alibi_slopes=torch.ones(2))(q, q, q)


def given() -> dict[str, torch.Tensor]:
    return {"alibi_slopes": torch.tensor([0.25, 0.5]), "relative_bias": torch.arange(6.0).view(2, 3)}


@pytest.mark.parametrize("learned", [False, True])
def test_reset_parameters_makes_the_module_new(learned: bool, device: str) -> None:
    tensors = {name: nn.Parameter(t.to(device)) if learned else t.to(device) for name, t in given().items()}
    attn = FlashAttention(64, learnable_sink=True, num_heads=2, **tensors).to(device)
    names = ["sink", "alibi_slopes", "relative_bias"]
    parameters = dict(attn.named_parameters())
    for spoilt in (attn, copy.deepcopy(attn), pickle.loads(pickle.dumps(attn)), attn.half()):
        with torch.no_grad():
            for name in names:
                getattr(spoilt, name).fill_(math.nan)
        spoilt.reset_parameters()
        for name, expected in {"sink": torch.zeros(2), **given()}.items():
            assert torch.equal(getattr(spoilt, name).float().cpu(), expected)
    assert all(getattr(attn, name) is parameter for name, parameter in parameters.items())
    FlashAttention(64).reset_parameters()  # has none


def test_a_module_of_the_meta_device() -> None:
    with torch.device("meta"):
        attn = FlashAttention(
            64, learnable_sink=True, num_heads=2, alibi_slopes=torch.tensor([0.25, 0.5], device="cpu")
        )
        without_values = FlashAttention(64, learnable_sink=True, num_heads=2, relative_bias=torch.zeros(2, 3))
    attn.to_empty(device="cpu")
    attn.reset_parameters()
    assert not attn.sink.any() and torch.equal(attn.alibi_slopes, torch.tensor([0.25, 0.5]))
    without_values.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"relative_bias: was given on the meta device.*give it on the CPU"):
        without_values.reset_parameters()
