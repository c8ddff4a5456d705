"""Dropout with an origin at any row and key: devices whose generator needs a row of 16 n and a key of 64 n get a larger call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_ext
from flashattn_ext import Mask, ops

B, SQ, SK, HQ, HK = 2, 37, 90, 4, 2
ORIGINS = [
    (1, 1, 21, 0),
    (1, 1, 16, 6),
    (0, 2, 21, 70),
    (0, 0, 1, 63),
    (0, 0, 15, 64),
    (1, 1, 21, 70, 45),
    (0, 0, 30, 0, -25),
]


def _qkv(device: str, dtype: torch.dtype, *lead: int) -> list[Tensor]:
    shapes = ((SQ, HQ, 16), (SK, HK, 16), (SK, HK, 24))
    return [torch.randn(*lead, *shape).to(device, dtype) for shape in shapes]


def _options(device: str) -> dict[str, dict[str, Any]]:
    per_head = torch.linspace(0.1, 0.6, HQ, device=device)
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window_size": (40, 7)},
        "mask": {"mask": Mask.chunked(30, SK, SK, device=device)},
        "mask and sink": {"mask": Mask.chunked(30, SK, SK, device=device), "sink": per_head},
        "smooth": {"smooth_softmax": True, "softcap": 2.0},
        "bias": {"bias": torch.randn(1, HQ, SQ, SK, device=device)},
        "bias of all rows": {"bias": torch.randn(B, 1, 1, SK, device=device)},
        "slopes": {"alibi_slopes": per_head},
        "relative bias": {"relative_bias": torch.randn(HQ, 31, device=device), "window_size": (-1, 30)},
        "bhsd": {"layout": "bhsd"},
    }


def _leaves(call: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in call.items() if isinstance(t, Tensor)}


def _close(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    scale = max(1.0, expected.double().abs().nan_to_num(0, 0, 0).max().item())
    got, expected = got.double(), expected.double()
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale, msg=lambda m: f"{name}: {m}")


def _loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.float().square().sum() + torch.where(torch.isfinite(lse), lse, 0).sum()


def _check(leaves: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Results and gradients of forward(), and gradients of backward(), against the reference."""
    names = list(leaves)
    out, lse = flashattn_ext.forward(**leaves, **options, return_lse=True)
    gradients = torch.autograd.grad(_loss(out, lse), list(leaves.values()))
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    expected_out, expected_lse = flashattn_ext.attention_reference(**exact, **options, return_lse=True)
    expected = torch.autograd.grad(_loss(expected_out, expected_lse), list(exact.values()))
    _close("out", out, expected_out, dtype)
    _close("lse", lse, expected_lse, dtype)
    for name, got, gradient in zip(names, gradients, expected, strict=True):
        assert got.shape == leaves[name].shape
        _close(f"d{name}", got, gradient, dtype)
    with torch.no_grad():
        dout, dlse = 2 * out.float(), torch.isfinite(lse).to(lse.dtype)
        raw = (
            flashattn_ext.backward(dout.to(dtype), *leaves.values(), out, lse, dlse=dlse, **options)
            if names == ["q", "k", "v"]
            else ()
        )
    for name, got, gradient in zip(names, raw, expected, strict=False):
        _close(f"d{name} of backward()", got, gradient, dtype)


@pytest.mark.dtypes("float32", "bfloat16")
@pytest.mark.parametrize("origin", ORIGINS, ids=str)
@pytest.mark.parametrize("name", _options("cpu"))
def test_a_call_at_any_row_and_key(device: str, dtype: torch.dtype, name: str, origin: tuple[int, ...]) -> None:
    option = _options(device)[name]
    q, k, v = _qkv(device, dtype, B)
    if option.get("layout") == "bhsd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    leaves = _leaves({"q": q, "k": k, "v": v, **option})
    plain = {key: value for key, value in option.items() if key not in leaves}
    _check(leaves, {**plain, "dropout_p": 0.4, "rng_seed": 3, "origin": origin}, dtype)


@pytest.mark.dtypes("bfloat16")
def test_it_drops_what_the_larger_call_drops(device: str, dtype: torch.dtype) -> None:
    """With an identity for v, out is the weights: the part's weights are 0 where the larger call's are."""
    D = 64
    q, k = (torch.randn(1, n, HQ, D).to(device, dtype) for n in (80, D))
    v = torch.eye(D)[None, :, None].expand(1, D, HQ, D).contiguous().to(device, dtype)
    call: dict[str, Any] = {"dropout_p": 0.5, "rng_seed": 11}
    whole = flashattn_ext.forward(q, k, v, **call, origin=(0, 0, 32, 64))
    for row, key in ((5, 0), (16, 3), (21, 40)):
        part = flashattn_ext.forward(q[:, row:], k[:, key:], v[:, key:], **call, origin=(0, 0, 32 + row, 64 + key))
        assert torch.equal(part[..., key:] == 0, whole[:, row:, :, key:] == 0)
        mask = flashattn_ext.dropout_mask(1, HQ, 80, D, 0.5, 11, device, origin=(0, 0, 32, 64))
        assert torch.equal(part[..., key:].transpose(1, 2) != 0, mask[:, :, row:, key:])


@pytest.mark.dtypes("bfloat16")
@pytest.mark.parametrize("origin", [(1, 2, 21, 70), (0, 0, 3, 0), (0, 0, 16, 9)])
def test_a_part_of_the_mask(device: str, dtype: torch.dtype, origin: tuple[int, ...]) -> None:
    b, h, row, key = origin
    whole = flashattn_ext.dropout_mask(4, 6, 60, 180, 0.4, 7, device)
    part = flashattn_ext.dropout_mask(2, 3, 37, 90, 0.4, 7, device, origin=origin)
    assert torch.equal(part, whole[b : b + 2, h : h + 3, row : row + 37, key : key + 90])


@pytest.mark.dtypes("float32", "bfloat16")
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("origin", [(1, 1, 21, 70), (0, 0, 5, 0), (0, 0, 0, 3)])
def test_packed_sequences(device: str, dtype: torch.dtype, origin: tuple[int, ...], has_mask: bool) -> None:
    """The origin applies to each sequence. Rows after the last sequence belong to none and have no origin."""
    lengths_q, lengths_k = (20, 0, 9), (33, 40, 12)
    starts = [torch.tensor([0, *lengths]).cumsum(0).int().to(device) for lengths in (lengths_q, lengths_k)]
    leaves = [t.requires_grad_() for t in _qkv(device, dtype)]
    mask = Mask(torch.randint(0, 60, (HK, SK, 2), dtype=torch.int32).sort(-1).values.to(device)) if has_mask else None
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.4, "rng_seed": 3}
    out, lse = flashattn_ext.varlen_forward(
        *leaves, *starts, 20, 40, **options, mask=mask, origin=origin, return_lse=True
    )
    assert out.shape == (SQ, HQ, 24) and lse.shape == (HQ, SQ)
    gradients = torch.autograd.grad(_loss(out[:29], lse[:, :29]), leaves)
    raw = flashattn_ext.backward(
        torch.cat([2 * out[:29].detach().float(), torch.zeros(8, HQ, 24, device=device)]).to(dtype), *(t.detach() for t in leaves),
        out.detach(), lse.detach(), dlse=torch.isfinite(lse).to(lse.dtype), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        max_seqlen_q=20, max_seqlen_k=40, **options, mask=mask, origin=origin,
    )  # fmt: skip
    at_q, at_k = 0, 0
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        parts = [
            t.detach()[None, at : at + n].double()
            for t, at, n in zip(leaves, (at_q, at_k, at_k), (n_q, n_k, n_k), strict=True)
        ]
        parts = [t.requires_grad_() for t in parts]
        own = None if mask is None else Mask(mask.intervals[None, :, at_k : at_k + n_k])
        expected, expected_lse = flashattn_ext.attention_reference(
            *parts, **options, mask=own, origin=(origin[0] + b, *origin[1:]), return_lse=True
        )
        _close("out", out[at_q : at_q + n_q], expected[0], dtype) if n_q else None
        exact = torch.autograd.grad(_loss(expected, expected_lse), parts)
        for name, got, of_backward, gradient, at, n in zip(
            "qkv", gradients, raw, exact, (at_q, at_k, at_k), (n_q, n_k, n_k), strict=False
        ):
            if n:
                _close(f"d{name} {b}", got[at : at + n], gradient[0], dtype)
                _close(f"d{name} {b} of backward()", of_backward[at : at + n], gradient[0], dtype)
        at_q, at_k = at_q + n_q, at_k + n_k


@pytest.mark.dtypes("bfloat16")
def test_what_no_row_sees_stays_out(device: str, dtype: torch.dtype) -> None:
    """The rows added in front would see keys that are masked for every row of the call; a NaN there must not reach gradients."""
    leaves = [t.requires_grad_() for t in _qkv(device, dtype, 1)]
    with torch.no_grad():
        for t in leaves[1:]:
            t[:, :6] = torch.nan
    options: dict[str, Any] = {"causal": True, "window_size": (20, 0), "dropout_p": 0.4, "rng_seed": 3}
    out, lse = flashattn_ext.forward(*leaves, **options, origin=(0, 0, 30, 3), return_lse=True)
    gradients = torch.autograd.grad(_loss(out, lse), leaves)
    assert out.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.dtypes("bfloat16")
def test_messages_name_the_tensors_that_were_given(device: str, dtype: torch.dtype) -> None:
    q, k, v = _qkv(device, dtype, 1)
    options: dict[str, Any] = {"dropout_p": 0.4, "rng_seed": 3, "origin": (0, 0, 5, 3)}
    with pytest.raises(ValueError, match=r"v: .*\[1, 89, 2, 24\]"):
        flashattn_ext.forward(q, k, v[:, 1:], **options)
    with pytest.raises(ValueError, match=r"origin: expected numbers from 0 .*-5"):
        flashattn_ext.forward(q, k, v, **{**options, "origin": (0, 0, -5, 3)})
    out, lse = flashattn_ext.forward(q, k, v, **options, return_lse=True)
    with pytest.raises(ValueError, match=r"dout: .*\[1, 36, 4, 24\]"):
        flashattn_ext.backward(out[:, 1:], q, k, v, out, lse, **options)


@pytest.mark.dtypes("bfloat16")
def test_other_calls_are_made_as_they_are(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = ops.forward
    monkeypatch.setattr(ops, "forward", lambda q, *rest: sizes.append(q.shape[1]) or real(q, *rest))
    q, k, v = _qkv(device, dtype, 1)
    for options in (
        {"origin": (0, 0, 5, 3)},
        {"origin": (3, 1), "dropout_p": 0.4},
        {"origin": (0, 0, 32, 64), "dropout_p": 0.4},
    ):
        flashattn_ext.forward(q, k, v, rng_seed=3, **options)
    assert sizes == [SQ] * 3
