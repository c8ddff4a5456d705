"""attention_reference against loops over Python floats written from the formulas, and against torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import cu_seqlens, reference_keep_mask
from torch import Tensor

from flashattn_ext import attention_reference

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
]


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
    for h in range(Hq):
        hk = h // (Hq // Hk)
        for i in range(Sq):
            at = i + Sk - Sq
            seen = [j for j in range(Sk) if (left < 0 or j >= at - left) and (right < 0 or j <= at + right)]
            s = {j: scale * sum(x * y for x, y in zip(q[i, h].tolist(), k[j, hk].tolist(), strict=False)) for j in seen}
            z = sum(math.exp(x) for x in s.values()) + (math.exp(sink[h]) if sink else 0.0)
            lse[h, i] = math.log(z) if z else -math.inf
            for j in seen:
                out[i, h] += math.exp(s[j]) / z * float(keep[h, i, j]) / p_keep * v[j, hk]
    return out, lse


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("Sq,Sk", [(7, 7), (4, 9), (9, 4), (3, 0)])
def test_dense_against_loops(options: dict, Sq: int, Sk: int) -> None:
    q, k, v = (torch.randn(2, S, H, D, dtype=torch.float64) for S, H, D in ((Sq, 2, 5), (Sk, 1, 5), (Sk, 1, 3)))
    given = {**options, "sink": torch.tensor(options["sink"], dtype=torch.float64)} if "sink" in options else options
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
    given = {**options, "sink": torch.tensor(options["sink"], dtype=torch.float64)} if "sink" in options else options
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
