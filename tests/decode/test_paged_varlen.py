"""flash_attn_varlen_func with a block_table is flash_attn_varlen_func on the gathered keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import cu_seqlens
from torch import Tensor

import flashattn_ext

LENGTHS_Q, LENGTHS_K = (1, 40, 7, 0), (70, 40, 0, 33)


def paged(lengths: tuple[int, ...], page_size: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pages in random order, their block table, and the packed rows that they hold; rows of no sequence are NaN."""
    pages = -(-max(lengths) // page_size)
    table = torch.randperm(len(lengths) * pages).view(-1, pages).to(torch.int32)
    cache = torch.full((table.numel(), page_size, heads, head_dim), float("nan"))
    rows = torch.randn(sum(lengths), heads, head_dim)
    given = iter(rows)
    for b, length in enumerate(lengths):
        for row in range(length):
            cache[int(table[b, row // page_size]), row % page_size] = next(given)
    return cache, table, rows


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window_size": (9, 0), "softcap": 5.0}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}],
    ids=["plain", "causal", "window_softcap", "alibi"],
)  # fmt: skip
def test_is_the_call_on_gathered_keys(page_size: int, options: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    k_cache, table, k = paged(LENGTHS_K, page_size, 2, 32)
    v_cache, v = torch.full_like(k_cache, float("nan")), torch.randn_like(k)
    v_cache[~k_cache.isnan()] = 0.0
    starts = cu_seqlens(LENGTHS_K, "cpu")
    for b, length in enumerate(LENGTHS_K):
        for row in range(length):
            v_cache[int(table[b, row // page_size]), row % page_size] = v[starts[b] + row]
    q = torch.randn(sum(LENGTHS_Q), 4, 32)
    q, k, v, k_cache, v_cache = (t.to(device, dtype) for t in (q, k, v, k_cache, v_cache))
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    lengths = (cu_seqlens(LENGTHS_Q, device), cu_seqlens(LENGTHS_K, device), max(LENGTHS_Q), max(LENGTHS_K))
    expected, lse, _ = flashattn_ext.flash_attn_varlen_func(q, k, v, *lengths, return_attn_probs=True, **options)
    out, paged_lse, _ = flashattn_ext.flash_attn_varlen_func(
        q, k_cache, v_cache, *lengths, return_attn_probs=True, block_table=table.to(device), **options
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(paged_lse, lse, rtol=max(tolerance / 10, 1e-12), atol=max(tolerance / 10, 1e-12))


def test_rows_of_no_sequence(device: str) -> None:
    q, cache = torch.randn(8, 2, 16, device=device), torch.randn(1, 16, 2, 16, device=device)
    starts, table = cu_seqlens((3,), device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    out, lse, _ = flashattn_ext.flash_attn_varlen_func(
        q, cache, cache, starts, starts, 3, 3, return_attn_probs=True, block_table=table
    )
    assert (out[3:] == 0).all() and (lse[:, 3:] == -torch.inf).all() and (out[:3] != 0).all()


def test_refuses_dropout(device: str) -> None:
    q, cache = torch.randn(8, 2, 16, device=device), torch.randn(1, 16, 2, 16, device=device)
    starts, table = cu_seqlens((8,), device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flashattn_ext.flash_attn_varlen_func(q, cache, cache, starts, starts, 8, 8, 0.1, block_table=table)


def test_lengths_beyond_the_table() -> None:
    q, cache = torch.randn(8, 2, 16), torch.randn(4, 16, 2, 16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flashattn_ext.flash_attn_varlen_func(
            q, cache, cache, cu_seqlens((8,), "cpu"), cu_seqlens((17,), "cpu"), 8, 17, block_table=table
        )
