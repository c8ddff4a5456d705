"""The errors in `bench cuda`: which results are compared with attention in fp64, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flashattn_ext

from .bench_cases import Case
from .bench_contestants import Extras, window_size

REFERENCE_LIMIT_BYTES = 2 << 30  # size of the fp64 scores of the compared heads
RNG_SEED = 1234


def compared_heads(case: Case) -> tuple[int, int]:
    """How many of the first query and KV heads are compared with fp64: at most two KV heads.

    KV heads come with all of their query heads, as their gradients are sums over the query heads.
    """
    group = case.Hq // case.Hk
    fitting = REFERENCE_LIMIT_BYTES // (case.S * case.S * 8 * group)
    kv_heads = max(1, min(2, case.Hk, fitting))
    return kv_heads * group, kv_heads


def compared_results(case: Case, results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The compared heads, in fp64, of out or of (dq, dk, dv), of the first sequence."""
    query_heads, kv_heads = compared_heads(case)
    tensors = results if case.backward else (results,)
    heads = (query_heads, kv_heads, kv_heads)
    return [_first(case, t, count).double() for t, count in zip(tensors, heads, strict=False)]


def _first(case: Case, t: Tensor, heads: int) -> Tensor:
    """The first heads of the first sequence, [1, S, heads, D]."""
    return (t[None, : case.lengths[0]] if case.lengths else t[:1])[:, :, :heads]


def reference_results(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, extras: Extras) -> list[Tensor]:
    query_heads, kv_heads = compared_heads(case)
    if (scores := case.S * case.S * 8 * query_heads) > REFERENCE_LIMIT_BYTES and not case.lengths:
        raise ValueError(f"skipped: in fp64 the scores of {query_heads} heads take {scores / 2**30:.0f} GiB")
    slices = [
        _first(case, t.detach(), heads).double().requires_grad_(case.backward)
        for t, heads in ((q, query_heads), (k, kv_heads), (v, kv_heads))
    ]
    rng_seed = RNG_SEED if case.dropout else None
    options: dict[str, Any] = {
        "causal": case.causal, "window_size": window_size(case), "dropout_p": case.dropout, "rng_seed": rng_seed,
    }  # fmt: skip
    out = flashattn_ext.attention_reference(*slices, **options, **_keywords_of_heads(extras, query_heads))
    if not case.backward:
        return [out]
    return list(torch.autograd.grad(out, slices, _first(case, dout, query_heads).double()))


def _keywords_of_heads(extras: Extras, heads: int) -> dict[str, Any]:
    """The row's options for its first heads."""
    head_dimension = {"alibi_slopes": 0, "relative_bias": 0, "bias": 1}
    return {
        name: value.detach().narrow(head_dimension[name], 0, heads).double() if name in head_dimension else value
        for name, value in extras.keywords.items()
    }


def largest_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of all tensors; NaN if any of them has a NaN."""
    return torch.stack([(a - b).abs().max() for a, b in zip(got, expected, strict=True)]).max().item()
