"""origin: calls on parts of a sequence compute what the whole call computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor

import flashattn_ext
from flashattn_ext import Mask

B, S, HQ, HK = 3, 130, 4, 2


def _qkv(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(B, S, heads, width).to(device, dtype) for heads, width in ((HQ, 16), (HK, 16), (HK, 24))]


def _sum_of_gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.float().square().sum(), leaves)


@pytest.mark.dtypes("float32", "bfloat16")
def test_a_part_of_batch_and_heads_drops_what_the_whole_drops(device: str, dtype: torch.dtype) -> None:
    whole = [t.requires_grad_() for t in _qkv(device, dtype)]
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "rng_seed": 9}
    expected, expected_lse = flashattn_ext.forward(*whole, **options, return_lse=True)
    expected_gradients = _sum_of_gradients(expected, whole)
    part = [whole[0][1:, :, 2:], whole[1][1:, :, 1:], whole[2][1:, :, 1:]]
    part = [t.detach().requires_grad_() for t in part]
    out, lse = flashattn_ext.forward(*part, **options, origin=(1, 2), return_lse=True)
    torch.testing.assert_close(out, expected[1:, :, 2:])
    torch.testing.assert_close(lse, expected_lse[1:, 2:])
    for name, got, gradient, first_head in zip(
        "qkv", _sum_of_gradients(out, part), expected_gradients, (2, 1, 1), strict=True
    ):
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            got, gradient[1:, :, first_head:], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}"
        )
    moved = flashattn_ext.forward(*part, **options)
    assert not torch.equal(moved, out)


def test_packed_sequences_count_from_the_origin(device: str) -> None:
    q, k, v = _qkv(device)
    options: dict[str, Any] = {"dropout_p": 0.3, "rng_seed": 9}
    cu_seqlens = torch.arange(0, 3 * S, S, dtype=torch.int32, device=device)
    got = flashattn_ext.varlen_forward(
        *(t[1:].flatten(0, 1) for t in (q, k, v)), cu_seqlens, cu_seqlens, S, S, **options, origin=(1, 0)
    )
    assert_same_bits(got.unflatten(0, (2, S)), flashattn_ext.forward(q, k, v, **options)[1:])


@pytest.mark.parametrize(("row", "key"), [(0, 0), (64, 0), (16, 64), (48, 128)])
def test_a_part_of_a_dropout_mask(device: str, row: int, key: int) -> None:
    whole = flashattn_ext.dropout_mask(3, 4, 200, 300, 0.4, 7, device)
    part = flashattn_ext.dropout_mask(2, 2, 100, 150, 0.4, 7, device, origin=(1, 2, row, key))
    assert torch.equal(part, whole[1:, 2:, row : row + 100, key : key + 150])


# Visibility in a call on a part of the rows and of the keys: rows from `row` on, keys from `key` on.
PARTS = [(0, 70, 0, 130), (64, 60, 0, 124), (64, 66, 64, 66), (0, 64, 64, 66), (96, 34, 0, 64), (80, 50, 0, 30)]
RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (20, -1)},
    {"window_size": (40, 7)},
    {"window_size": (-1, 3), "dropout_p": 0.25, "rng_seed": 5},
    {"causal": True, "dropout_p": 0.5, "rng_seed": 5},
]


def _agrees_with_the_reference(tensors: list[Tensor], origin: tuple[int, ...], rule: dict[str, Any]) -> None:
    leaves, exact = ([t.detach().to(d).requires_grad_() for t in tensors] for d in (torch.float32, torch.float64))
    extra = {name: t for name, t in rule.items() if isinstance(t, (Tensor, Mask))}
    options = {name: value for name, value in rule.items() if name not in extra}
    out, lse = flashattn_ext.forward(*leaves, **options, **extra, origin=origin, return_lse=True)
    widened = {name: t.double() if isinstance(t, Tensor) else t for name, t in extra.items()}
    expected, expected_lse = flashattn_ext.attention_reference(
        *exact, **options, **widened, origin=origin, return_lse=True
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)
    for name, got, gradient in zip(
        "qkv", _sum_of_gradients(out, leaves), _sum_of_gradients(expected, exact), strict=True
    ):
        torch.testing.assert_close(got.double(), gradient, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("row", "rows", "key", "keys"), PARTS)
def test_rows_and_keys_are_where_the_origin_places_them(
    device: str, row: int, rows: int, key: int, keys: int, rule: dict[str, Any]
) -> None:
    q, k, v = _qkv(device)
    part = [q[:, row : row + rows], k[:, key : key + keys], v[:, key : key + keys]]
    _agrees_with_the_reference(part, (0, 0, row, key), rule)


def test_the_parts_of_a_causal_call_are_its_rows(device: str) -> None:
    """As in context parallelism: the rows of a rank, and all keys up to them."""
    q, k, v = _qkv(device)
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.2, "rng_seed": 1}
    whole = flashattn_ext.forward(q, k, v, **options)
    for row, end in ((0, 64), (64, 130)):
        part = flashattn_ext.forward(q[:, row:end], k[:, :end], v[:, :end], **options, origin=(0, 0, row, 0))
        torch.testing.assert_close(part, whole[:, row:end], rtol=1e-5, atol=1e-6)


def test_biases_and_masks_are_counted_from_the_origin(device: str) -> None:
    tensors = _qkv(device)
    part = [tensors[0][:, 64:], tensors[1][:, :80], tensors[2][:, :80]]
    documents = Mask.documents((torch.arange(S, device=device) // 50).expand(B, S)).intervals[:, :, :80]
    rules: list[dict[str, Any]] = [
        {"alibi_slopes": torch.rand(HQ, device=device)},
        {"relative_bias": torch.randn(HQ, 2 * 20 + 1, device=device), "causal": True},
        {"mask": Mask(documents)},
        {"mask": Mask(documents), "causal": True, "dropout_p": 0.25, "rng_seed": 3},
    ]
    for rule in rules:
        _agrees_with_the_reference(part, (0, 0, 64, 0), rule)


@pytest.mark.parametrize("more_keys", [0, 90, -50])
def test_parts_of_a_call_with_more_keys_than_rows_or_fewer(device: str, more_keys: int) -> None:
    """The fifth number is the shift of the whole call, whose rows and keys are aligned at their ends."""
    q, k, v = _qkv(device)
    k, v = (torch.randn(B, S + more_keys, HK, t.shape[-1], device=device) for t in (k, v))
    slopes, mask = torch.rand(HQ, device=device), Mask.chunked(30, S, S + more_keys, device=device)
    for options in (
        {"causal": True, "dropout_p": 0.2, "rng_seed": 1},
        {"window_size": (40, 7), "mask": mask},
        {"causal": True, "alibi_slopes": slopes, "dropout_p": 0.2, "rng_seed": 1},
    ):
        whole = flashattn_ext.forward(q, k, v, **options)
        for row, end in ((0, 64), (64, 130)):
            part = flashattn_ext.forward(q[:, row:end], k, v, **options, origin=(0, 0, row, 0, more_keys))
            torch.testing.assert_close(part, whole[:, row:end], rtol=1e-5, atol=1e-6)
        keys = slice(64, None)
        own = options | ({"mask": Mask(mask.intervals[..., keys, :])} if "mask" in options else {})
        _agrees_with_the_reference([q, k[:, keys], v[:, keys]], (0, 0, 0, 64, more_keys), own)


@pytest.mark.parametrize("origin", [(0, 0, 5, 3), (2, 1, 17, 70)])
def test_an_origin_anywhere_on_the_cpu(origin: tuple[int, ...]) -> None:
    rule = {"causal": True, "dropout_p": 0.5, "rng_seed": 5}
    _agrees_with_the_reference(_qkv("cpu"), origin, rule)
    b, h, row, key = origin
    whole = flashattn_ext.dropout_mask(4, 5, 40, 140, 0.5, 7)
    part = flashattn_ext.dropout_mask(2, 2, 20, 66, 0.5, 7, origin=origin)
    assert torch.equal(part, whole[b : b + 2, h : h + 2, row : row + 20, key : key + 66])


@pytest.mark.every_isa
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("window_size", [(-1, -1), (3, 2)], ids=["causal", "window"])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_keys_that_no_row_sees_have_no_gradient(
    device: str, dtype: torch.dtype, rows: int, window_size: tuple[int, int], packed: bool
) -> None:
    """Rows end before the keys do, at an odd number: the second bfloat16 of the last row's pair was never set."""
    q, k, v = (torch.randn(length, 2, 64).to(device, dtype).requires_grad_() for length in (rows, 65, 65))
    options: dict[str, Any] = {"causal": window_size[0] < 0, "window_size": window_size, "origin": (0, 0, 0, 0)}
    if packed:
        starts = [torch.tensor([0, length], dtype=torch.int32, device=device) for length in (rows, 65)]
        out = flashattn_ext.varlen_forward(q, k, v, *starts, rows, 65, **options)
    else:
        out = flashattn_ext.forward(q[None], k[None], v[None], **options)
    dq, dk, dv = _sum_of_gradients(out, [q, k, v])
    seen = rows + max(window_size[1], 0)
    assert torch.isfinite(dq).all()
    assert not dk[seen:].any() and not dv[seen:].any()
    assert torch.isfinite(dk).all() and dv[:seen].any()


def test_bad_origins(device: str) -> None:
    tensors = _qkv(device)
    for origin, kind, message in (
        ((1,), ValueError, r"origin: expected None, \(batch, head\) or \(batch, head, row, key\)"),
        (3, ValueError, r"origin: expected None"),
        ((0, 0.5), TypeError, "origin: expected an int"),
        ((0, -1), ValueError, r"origin: expected numbers from 0 to 2\^29"),
        ((0, 0, 0, 2**30), ValueError, r"origin: expected numbers from 0 to 2\^29"),
    ):
        with pytest.raises(kind, match=message):
            flashattn_ext.forward(*tensors, origin=origin)
        with pytest.raises(kind, match=message):
            flashattn_ext.dropout_mask(1, 1, 1, 1, 0.5, 1, device, origin=origin)


def test_compiled_calls_take_origins_that_change(device: str) -> None:
    """As in a loop over the parts of a sequence: row and key of the origin become symbolic."""
    tensors = _qkv(device)
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "rng_seed": 9}
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v, row: flashattn_ext.forward(q, k, v, **options, origin=(1, 0, row, 0)),
        fullgraph=True,
        backend="aot_eager",
    )
    for row in (0, 16, 64, 128):
        expected = flashattn_ext.forward(*tensors, **options, origin=(1, 0, row, 0))
        torch.testing.assert_close(compiled(*tensors, row), expected, rtol=0, atol=0)


@pytest.mark.dtypes("bfloat16", "float16", "float32")
@pytest.mark.parametrize("has_sink", [False, True])
def test_the_backward_of_a_part_is_given_what_the_whole_call_has(
    device: str, dtype: torch.dtype, has_sink: bool
) -> None:
    """Keys are split over two calls, as between devices: given out and lse of the whole, the gradients add up."""
    q, k, v = (t[:1].requires_grad_() for t in _qkv(device, dtype))
    sink = torch.linspace(-1, 2, HQ, device=device).requires_grad_() if has_sink else None
    leaves = [q, k, v] if sink is None else [q, k, v, sink]
    out, lse = flashattn_ext.forward(q, k, v, causal=True, sink=sink, return_lse=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, dout)
    cut = 64
    call: dict[str, Any] = {"causal": True}
    first = flashattn_ext.backward(dout, q, k[:, :cut], v[:, :cut], out, lse, **call, sink=sink, origin=(0, 0, 0, 0))
    second = flashattn_ext.backward(dout, q, k[:, cut:], v[:, cut:], out, lse, **call, origin=(0, 0, 0, cut))
    got = [first[0].float() + second[0].float(), *(torch.cat([first[i], second[i]], 1).float() for i in (1, 2))]
    for a, b in zip([*got, *([] if sink is None else [first[3]])], expected, strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(a, b.float(), rtol=tolerance, atol=tolerance)
