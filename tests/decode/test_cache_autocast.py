"""Inside torch.autocast, decoding calls cast their inputs as forward() does."""

from __future__ import annotations

import pytest
import torch

import flashattn_ext


def _cache(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(2, 32, 2, 16, device=device).to(dtype) for _ in range(2)]


@pytest.mark.dtypes("bfloat16", "float16")
@pytest.mark.parametrize("of_cache", ["float32", "as autocast"])
def test_reading_a_cache_casts_as_forward_does(device: str, dtype: torch.dtype, of_cache: str) -> None:
    caches = _cache(device, torch.float32 if of_cache == "float32" else dtype)
    q = torch.randn(2, 3, 4, 16, device=device)
    with torch.autocast(device, dtype=dtype):
        out, lse = flashattn_ext.flash_attn_with_kvcache(q, *caches, return_softmax_lse=True)
        like_forward = flashattn_ext.forward(q, *caches)
    expected = flashattn_ext.flash_attn_with_kvcache(q.to(dtype), *(t.to(dtype) for t in caches))
    assert out.dtype == like_forward.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, expected)


@pytest.mark.dtypes("bfloat16", "float16")
@pytest.mark.parametrize("of_cache", ["float32", "as autocast"])
@pytest.mark.parametrize("of_new", ["float32", "as autocast"])
def test_new_keys_become_what_the_cache_is(device: str, dtype: torch.dtype, of_cache: str, of_new: str) -> None:
    """The cache is written in place, so it is not cast."""
    of_keys = torch.float32 if of_cache == "float32" else dtype
    caches = _cache(device, of_keys)
    q, new = torch.randn(2, 1, 4, 16, device=device), torch.randn(2, 1, 2, 16, device=device)
    if of_new != "float32":
        q, new = q.to(dtype), new.to(dtype)
    rotary = [torch.rand(32, 8, device=device) for _ in range(2)]
    copies = [t.clone() for t in caches]
    given = {"cache_seqlens": 5, "causal": True}
    with torch.autocast(device, dtype=dtype):
        out = flashattn_ext.flash_attn_with_kvcache(q, *caches, new, new, *rotary, **given)
    cast = [t.to(of_keys) for t in (q, new, *rotary)]
    expected = flashattn_ext.flash_attn_with_kvcache(cast[0], *copies, cast[1], cast[1], *cast[2:], **given)
    assert out.dtype == dtype and torch.equal(out, expected.to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))
    assert not torch.equal(caches[0][:, 5], torch.zeros_like(caches[0][:, 5]))


@pytest.mark.dtypes("bfloat16")
def test_pages_are_cast(device: str, dtype: torch.dtype) -> None:
    q, pages = torch.randn(2, 4, 16, device=device), torch.randn(2, 16, 2, 16, device=device)
    starts, lengths, table = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [0, 9, 20], [[1], [0]])
    )
    with torch.autocast(device, dtype=dtype):
        out = flashattn_ext.flash_attn_varlen_func(q, pages, pages, starts, lengths, 1, 11, block_table=table)
    assert out.dtype == dtype


@pytest.mark.dtypes("bfloat16", "float16")
@pytest.mark.parametrize("of_q", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_caches_of_fp8(
    device: str, dtype: torch.dtype, of_q: torch.dtype, appends: bool, out_dtype: torch.dtype | None
) -> None:
    """The other tensors become bfloat16 whatever autocast casts to: float16 was refused."""
    caches = _cache(device, torch.float8_e4m3fn)
    copies = [t.clone() for t in caches]
    q = torch.randn(2, 1, 4, 16, device=device).to(of_q)
    new = torch.randn(2, 1, 2, 16, device=device) if appends else None
    given = {"cache_seqlens": 5, "out_dtype": out_dtype}
    with torch.autocast(device, dtype=dtype):
        out = flashattn_ext.flash_attn_with_kvcache(q, *caches, new, new, **given)
    cast = q if of_q == torch.float8_e4m3fn else q.bfloat16()
    given["out_dtype"] = out_dtype or dtype
    wide = None if new is None else new.bfloat16()
    assert torch.equal(out, flashattn_ext.flash_attn_with_kvcache(cast, *copies, wide, wide, **given))
    assert out.dtype == given["out_dtype"]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(caches, copies, strict=True))


@pytest.mark.dtypes("bfloat16", "float16")
def test_pages_of_fp8(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 16, device=device)
    pages = torch.randn(2, 16, 2, 16, device=device).to(torch.float8_e4m3fn)
    starts, lengths, table = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [0, 9, 20], [[1], [0]])
    )
    with torch.autocast(device, dtype=dtype):
        out = flashattn_ext.flash_attn_varlen_func(q, pages, pages, starts, lengths, 1, 11, block_table=table)
    assert out.dtype == dtype
