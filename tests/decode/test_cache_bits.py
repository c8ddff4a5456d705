"""The bits of a sequence's decoding result depend on that sequence alone."""

from __future__ import annotations

from typing import Any

import poison
import pytest
import torch
from torch import Tensor

import flashattn_ext


def batch(device: str, Sq: int) -> dict[str, Any]:
    k, v = torch.randn(2, 3, 3000, 2, 32, device=device).unbind(0)
    lengths = torch.tensor([3000, 17, 2100], dtype=torch.int32, device=device)
    return {"q": torch.randn(3, Sq, 8, 32, device=device), "k_cache": k, "v_cache": v, "cache_seqlens": lengths}


def one_of(given: dict[str, Any], b: int) -> dict[str, Any]:
    return {name: t[b : b + 1] if isinstance(t, Tensor) else t for name, t in given.items()}


@pytest.mark.parametrize("num_splits", [0, 1, 5])
@pytest.mark.parametrize("Sq", [1, 20])
def test_do_not_depend_on_the_batch(num_splits: int, Sq: int, device: str) -> None:
    if device != "cpu":
        num_splits = max(num_splits, 1)  # accelerators choose the splits by the whole batch
    given = {**batch(device, Sq), "causal": True, "num_splits": num_splits}
    together = flashattn_ext.flash_attn_with_kvcache(**given)
    for b in range(3):
        assert torch.equal(flashattn_ext.flash_attn_with_kvcache(**one_of(given, b))[0], together[b])


def test_do_not_depend_on_pages(device: str) -> None:
    given = {**batch(device, 1), "num_splits": 4}
    table = torch.randperm(3 * 12, device=device).view(3, 12).to(torch.int32)
    pages = {}
    for name in ("k_cache", "v_cache"):
        padded = torch.nn.functional.pad(given[name], (0, 0, 0, 0, 0, 72)).view(36, 256, 2, 32)
        pages[name] = torch.empty_like(padded)
        pages[name][table.flatten().long()] = padded
    paged = flashattn_ext.flash_attn_with_kvcache(**{**given, **pages}, block_table=table)
    assert torch.equal(paged, flashattn_ext.flash_attn_with_kvcache(**given))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("Sq", [1, 20])
def test_do_not_depend_on_threads(Sq: int) -> None:
    given = batch("cpu", Sq)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(flashattn_ext.flash_attn_with_kvcache(**given))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_do_not_depend_on_the_heads_around(device: str) -> None:
    given = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in batch(device, 1).items()}
    intervals = torch.tensor([0, 1], dtype=torch.int32, device=device).repeat(1, 2, 40, 1)
    intervals[:, 0, 7:20] = 0  # keys that only the second KV head sees
    together = flashattn_ext.flash_attn_with_kvcache(**given, mask=flashattn_ext.Mask(intervals), num_splits=2)
    for hk in range(2):
        alone = {**given, "q": given["q"][:, :, 4 * hk : 4 * hk + 4]}
        alone |= {name: given[name][:, :, hk : hk + 1] for name in ("k_cache", "v_cache")}
        mask = flashattn_ext.Mask(intervals[:, hk : hk + 1].contiguous())
        expected = flashattn_ext.flash_attn_with_kvcache(**alone, mask=mask, num_splits=2)
        assert torch.equal(expected, together[:, :, 4 * hk : 4 * hk + 4])


def test_a_key_that_is_no_number_stays_in_its_sequence_and_head(device: str) -> None:
    given = batch(device, 1)
    clean = flashattn_ext.flash_attn_with_kvcache(**given)
    given["k_cache"][2, 40, 1, 3] = float("nan")
    given["v_cache"][0, 2000, 0, 5] = float("inf")
    given["k_cache"][1, 17:], given["v_cache"][1, 17:] = float("nan"), float("nan")  # after the end of the sequence
    out = flashattn_ext.flash_attn_with_kvcache(**given)
    assert torch.equal(out[1], clean[1]) and torch.equal(out[0, :, 4:], clean[0, :, 4:])
    assert torch.equal(out[2, :, :4], clean[2, :, :4]) and out[2, :, 4:].isnan().all()
    assert torch.equal(out[0, :, :4, :5], clean[0, :, :4, :5]) and not out[0, :, :4, 5].isfinite().any()
    if device == "cpu":  # CUDA splits fp32 operands; a part may be 0, and 0 times infinity is NaN
        assert out[0, :, :4, 5].isinf().all()


def test_results_are_poisoned_before_a_kernel_gets_them(device: str) -> None:
    q, cache = torch.randn(2, 1, 4, 16, device=device), torch.randn(2, 33, 2, 16, device=device)
    poison.allocated.clear()
    out = flashattn_ext.flash_attn_with_kvcache(q, cache, cache)
    assert (out.dtype, tuple(out.shape)) in poison.allocated and out.isfinite().all()
