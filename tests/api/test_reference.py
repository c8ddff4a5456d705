"""attention_reference against loops over Python floats written from the formulas, and against torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import cu_seqlens, reference_keep_mask
from torch import Tensor

from flashattn_ext import Mask, attention_reference

OPTIONS = [
    dict(),
    dict(causal=True),
    dict(window_size=(2, 1)),
    dict(window_size=(-1, 3)),
    dict(window_size=(1, -1), causal=True),
    dict(softmax_scale=-0.7),
    dict(softmax_scale=0.0),
    dict(smooth_softmax=True),
    dict(sink=[0.5, -1.5]),
    dict(dropout_p=0.4, rng_seed=3),
    dict(dropout_p=0.4, rng_seed=3, causal=True, window_size=(3, -1), sink=[1.0, 0.0], softmax_scale=0.5),
    dict(softcap=0.8),
    dict(alibi_slopes=[0.5, 0.25]),
    dict(relative_bias=[[0.3, -1.0, 0.7, 2.0, -0.4], [1.0, 0.1, -0.2, 0.0, 0.6]]),
    dict(softcap=1.5, alibi_slopes=[0.5, -0.25], relative_bias=[[0.1, 0.2, -0.3]] * 2, causal=True, sink=[0.2, 0.3]),
    dict(intervals=True),
    dict(intervals=True, causal=True, softcap=2.0, dropout_p=0.3, rng_seed=9, sink=[0.5, -1.5]),
]
# Intervals of key j, drawn to be long, short, empty, reversed and out of range.
INTERVALS = [(0, 99), (2, 4), (3, 3), (4, 1), (-7, 2), (1, 9), (5, 6), (0, 3), (2, 99)]


def loops(q: Tensor, k: Tensor, v: Tensor, b: int = 0, **options: object) -> tuple[Tensor, Tensor]:
    """One sequence, [S, H, D]: out [Sq, Hq, Dv] and lse [Hq, Sq], one float at a time."""
    (Sq, Hq, D), (Sk, Hk, Dv) = q.shape, v.shape
    left, right = options.get("window_size", (-1, -1))
    right = min(right, 0) if options.get("causal") and right >= 0 else (0 if options.get("causal") else right)
    scale = options.get("softmax_scale", 1 / math.sqrt(D))
    sink = options.get("sink", [0.0] * Hq if options.get("smooth_softmax") else None)
    p_drop = options.get("dropout_p", 0.0)
    keep = reference_keep_mask(b + 1, Hq, Sq, Sk, p_drop, options.get("rng_seed", 0))[b]
    p_keep = math.floor(256 * (1 - p_drop) + 0.5) / 256
    out, lse = torch.zeros(Sq, Hq, Dv, dtype=torch.float64), torch.zeros(Hq, Sq, dtype=torch.float64)

    def logit(h: int, distance: int, product: float) -> float:
        s = scale * product
        cap, slopes, bias = (options.get(name) for name in ("softcap", "alibi_slopes", "relative_bias"))
        if cap:
            s = cap * math.tanh(s / cap)
        if slopes:
            s -= slopes[h] * abs(distance)
        if bias:
            L = len(bias[h]) // 2
            s += bias[h][min(max(distance, -L), L) + L]
        return s

    for h in range(Hq):
        hk = h // (Hq // Hk)
        for i in range(Sq):
            at = i + Sk - Sq
            seen = [j for j in range(Sk) if (left < 0 or j >= at - left) and (right < 0 or j <= at + right)]
            if options.get("intervals"):
                seen = [j for j in seen if INTERVALS[j][0] <= i < INTERVALS[j][1]]
            products = {j: sum(x * y for x, y in zip(q[i, h].tolist(), k[j, hk].tolist(), strict=False)) for j in seen}
            s = {j: logit(h, j - at, product) for j, product in products.items()}
            z = sum(math.exp(x) for x in s.values()) + (math.exp(sink[h]) if sink else 0.0)
            lse[h, i] = math.log(z) if z else -math.inf
            for j in seen:
                out[i, h] += math.exp(s[j]) / z * float(keep[h, i, j]) / p_keep * v[j, hk]
    return out, lse


def arguments(options: dict, lengths_k: list[int]) -> dict:
    """The options of loops() as attention_reference takes them."""
    given = dict(options)
    for name in ("sink", "alibi_slopes", "relative_bias"):
        if name in given:
            given[name] = torch.tensor(given[name], dtype=torch.float64)
    if given.pop("intervals", False):
        rows = torch.tensor([interval for length in lengths_k for interval in INTERVALS[:length]], dtype=torch.int32)
        packed = rows.reshape(1, -1, 2)
        given["mask"] = Mask(packed if len(lengths_k) > 1 else packed[None])
    return given


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("Sq,Sk", [(7, 7), (4, 9), (9, 4), (3, 0)])
def test_dense_against_loops(options: dict, Sq: int, Sk: int) -> None:
    q, k, v = (torch.randn(2, S, H, D, dtype=torch.float64) for S, H, D in ((Sq, 2, 5), (Sk, 1, 5), (Sk, 1, 3)))
    given = arguments(options, [Sk])
    out, lse = attention_reference(q, k, v, **given, return_lse=True)
    for b in range(2):
        out_b, lse_b = loops(q[b], k[b], v[b], b, **options)
        torch.testing.assert_close(out[b], out_b)
        torch.testing.assert_close(lse[b], lse_b)
    swapped = attention_reference(*(t.transpose(1, 2) for t in (q, k, v)), **given, layout="bhsd")
    torch.testing.assert_close(swapped.transpose(1, 2), out)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen_against_loops(options: dict) -> None:
    lengths_q, lengths_k = [3, 0, 5, 2], [4, 2, 5, 0]
    q = torch.randn(10, 2, 5, dtype=torch.float64)
    k, v = torch.randn(11, 1, 5, dtype=torch.float64), torch.randn(11, 1, 3, dtype=torch.float64)
    given = arguments(options, lengths_k)
    cu_q, cu_k = cu_seqlens(lengths_q, "cpu"), cu_seqlens(lengths_k, "cpu")
    out, lse = attention_reference(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **given, return_lse=True)
    assert lse.shape == (2, 10)
    for b in range(4):
        rows_q, rows_k = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        out_b, lse_b = loops(q[rows_q], k[rows_k], v[rows_k], b, **options)
        torch.testing.assert_close(out[rows_q], out_b)
        torch.testing.assert_close(lse[:, rows_q], lse_b)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_against_torch(causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 33, 16, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(attention_reference(q, k, v, causal=causal, layout="bhsd"), expected)


def test_masked_rows_have_clean_gradients() -> None:
    q, k, v = (torch.randn(1, S, 1, 4, dtype=torch.float64, requires_grad=True) for S in (6, 2, 2))
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    assert not out[:, :4].any() and torch.isneginf(lse[..., :4]).all()
    grads = torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
    assert all(torch.isfinite(g).all() for g in grads)
    assert not grads[0][:, :4].any()


def inputs(Sq: int, Sk: int, B: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(B, S, 2, 5, dtype=torch.float64) for S in (Sq, Sk, Sk))  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [(2, 2, 4, 6), (1, 2, 4, 6), (2, 1, 1, 6), (1, 1, 4, 6)], ids=str)
def test_a_bias_is_added_and_its_minus_infinity_hides(shape: tuple[int, ...]) -> None:
    q, k, v = inputs(4, 6)
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., 2] = -math.inf
    bias[..., -1, :] = -math.inf
    bias.requires_grad_()
    out, lse = attention_reference(q, k, v, bias=bias, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(5) + bias.detach()
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0), v)
    torch.testing.assert_close(out, expected)
    (grad,) = torch.autograd.grad(out.square().sum(), bias)
    assert grad.shape == bias.shape and torch.isfinite(grad).all() and not grad[..., 2].any()


def test_slopes_of_each_batch_entry() -> None:
    q, k, v = inputs(4, 6)
    slopes = torch.rand(2, 2, dtype=torch.float64)
    out = attention_reference(q, k, v, alibi_slopes=slopes)
    for b in range(2):
        alone = attention_reference(q[b : b + 1], k[b : b + 1], v[b : b + 1], alibi_slopes=slopes[b])
        torch.testing.assert_close(out[b : b + 1], alone)


def test_a_part_with_its_origin_computes_what_the_whole_computes_there() -> None:
    """Queries 5 to 12 of heads 2 and 3 of the second batch entry, with the keys up to 12: later keys are fully masked."""
    options = dict(causal=True, window_size=(7, -1), dropout_p=0.4, rng_seed=5)
    q, k, v = (torch.randn(2, 12, 4, 5, dtype=torch.float64) for _ in range(3))
    slopes, bias = torch.rand(4, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    ids = torch.tensor([[0] * 8 + [1] * 4] * 2)
    whole = attention_reference(q, k, v, **options, alibi_slopes=slopes, relative_bias=bias, mask=Mask.documents(ids))
    part = [t[1:, start:, 2:] for t, start in ((q, 5), (k, 2), (v, 2))]
    mask = Mask(Mask.documents(ids).intervals[1:, :, 2:])
    here = dict(origin=(1, 2, 5, 2), alibi_slopes=slopes[2:], relative_bias=bias[2:], mask=mask)
    hidden = attention_reference(*part, **options, **here)
    visible = (torch.arange(12)[:, None] - 7 <= torch.arange(12)) & (torch.arange(12) < 2)
    reached = visible[5:].any(1)  # rows whose window reaches keys that the part lacks
    torch.testing.assert_close(hidden[0, ~reached], whole[1, 5:, 2:][~reached])
    assert (~reached).any()
    heads = attention_reference(q[1:, :, 2:], k[1:, :, 2:], v[1:, :, 2:], **options, origin=(1, 2))
    torch.testing.assert_close(heads[0], attention_reference(q, k, v, **options)[1, :, 2:])


@pytest.mark.parametrize("size", [-1e9, -2.5e38, -torch.finfo(torch.float32).max, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_whose_keys_all_have_a_large_bias(size: float, dtype: torch.dtype) -> None:
    """exp(logit - lse) is 1 for each of n such keys, because lse rounds to the bias: out and the gradients were n times too large."""
    q, k, v = (t.to(dtype).requires_grad_() for t in inputs(4, 50))
    bias = torch.full((1, 1, 1, 50), size, dtype=dtype, requires_grad=True)
    out, lse = attention_reference(q, k, v, bias=bias, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(5) + bias
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.full_like(lse, size))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], [q, k, v, bias], [dout, dlse], create_graph=True)
    # The gradient of the logits is p (dp - <dout, out> + dlse).
    weights, dp = scores.softmax(-1), torch.einsum("bihd,bjhd->bhij", dout, v)
    ds = weights * (dp - torch.einsum("bihd,bihd->bhi", dout, expected)[..., None] + dlse[..., None])
    of_scores = torch.autograd.grad(scores, [q, k, bias], ds, retain_graph=True)
    of_v = torch.einsum("bhij,bihd->bjhd", weights, dout)
    for a, b in zip(got, (*of_scores[:2], of_v, of_scores[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # And the derivative of the gradients, in which a weight of 1 for each key would show again.
    x = torch.randn_like(q)
    (second,) = torch.autograd.grad((got[0] * x).sum(), v, retain_graph=True)
    (expected_second,) = torch.autograd.grad(
        (torch.autograd.grad(expected, q, dout, create_graph=True)[0] * x).sum(), v
    )
    torch.testing.assert_close(second, expected_second, rtol=1e-4, atol=1e-5)


def test_a_sum_of_biases_beyond_the_range_hides_no_key() -> None:
    least = torch.finfo(torch.float32).min
    q, k, v = (t.float().requires_grad_() for t in inputs(3, 6, B=1))
    relative = torch.full((2, 3), least, requires_grad=True)
    bias = torch.full((1, 1, 1, 6), least, requires_grad=True)
    out, lse = attention_reference(q, k, v, relative_bias=relative, bias=bias, return_lse=True)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))
    assert (lse == least).all()
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, [v, bias], dout)
    torch.testing.assert_close(got[0], (dout.sum(1, keepdim=True) / 6).expand_as(v))
    dp = torch.einsum("bihd,bjhd->bhij", dout, v)
    ds = (dp - dp.mean(-1, keepdim=True)) / 6
    torch.testing.assert_close(got[1], ds.sum((0, 1, 2), keepdim=True))
    mixed = torch.tensor([least, least, least, 3e38, 0.0, least]).expand(1, 1, 1, 6)
    out = attention_reference(q, k, v, relative_bias=relative.detach() * 0.9, bias=mixed)
    torch.testing.assert_close(out, v[:, 3:4].expand_as(out))


def test_sinks_at_the_ends_of_the_range() -> None:
    q, k, v = (t.float() for t in inputs(3, 6))
    out, lse = attention_reference(q, k, v, sink=torch.tensor([3e38, -3e38]), return_lse=True)
    plain, plain_lse = attention_reference(q, k, v, return_lse=True)
    assert not out[:, :, 0].any() and (lse[:, 0] == 3e38).all()
    torch.testing.assert_close(out[:, :, 1], plain[:, :, 1])
    torch.testing.assert_close(lse[:, 1], plain_lse[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_rounds_nothing(dtype: torch.dtype) -> None:
    q, k, v = (8 * t.to(dtype) for t in inputs(4, 50))
    expected = attention_reference(q, k, v, causal=True, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = attention_reference(q, k, v, causal=True, return_lse=True)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
