"""Block tables where lengths cannot be read on the host: on the meta device, in a FakeTensorMode and under torch.vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flashattn_ext

INT32 = torch.int32


def call(q: Tensor, pages: Tensor, lengths: Tensor, table: Tensor, new: Tensor | None = None) -> Any:
    return flashattn_ext.flash_attn_with_kvcache(
        q, pages, pages.clone(), new, new, cache_seqlens=lengths, block_table=table, return_softmax_lse=True
    )


def inputs(device: str = "cpu") -> list[Tensor]:
    lengths, table = torch.tensor([3, 20], dtype=INT32), torch.tensor([[0, 1], [2, 3]], dtype=INT32)
    return [t.to(device) for t in (torch.randn(2, 1, 4, 16), torch.randn(4, 16, 2, 16), lengths, table)]


@pytest.mark.parametrize("appends", [False, True])
def test_meta_tensors(appends: bool) -> None:
    new = torch.empty(2, 1, 2, 16, device="meta") if appends else None
    out, lse = call(*inputs("meta"), new)
    assert out.is_meta and out.shape == (2, 1, 4, 16) and lse.shape == (2, 4, 1)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        out, lse = call(*inputs())
    assert out.shape == (2, 1, 4, 16) and lse.shape == (2, 4, 1)


@pytest.mark.parametrize("mapped", ["q", "lengths", "table"])
def test_vmap(device: str, mapped: str) -> None:
    given = dict(zip(("q", "pages", "lengths", "table"), inputs(device), strict=True))
    other = {
        "q": torch.randn_like(given["q"]),
        "lengths": torch.tensor([31, 1], dtype=INT32, device=device),
        "table": given["table"].flip(0),
    }
    stacked = torch.stack([given[mapped], other[mapped]])
    results = torch.vmap(lambda t: call(**{**given, mapped: t}))(stacked)
    for i, one in enumerate(stacked):
        for got, expected in zip(results, call(**{**given, mapped: one}), strict=True):
            assert torch.equal(got[i], expected)


def test_lengths_beyond_the_table_under_vmap() -> None:
    """The op checks what the host cannot read."""
    q, pages, lengths, table = inputs()
    lengths[0] = 33
    with pytest.raises(ValueError, match="cache_seqlens: expected 0 to 32 for sequence 0, got 33"):
        torch.vmap(lambda x: call(q, pages, x, table))(lengths[None])
