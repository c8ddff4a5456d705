"""flash_attn_with_kvcache agrees with the reference, appends new keys, and reads only the keys of its sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_cases import CacheCase, check, random_case

import flashattn_ext

CASES = {
    "one_query": CacheCase(),
    "whole_cache": CacheCase(lengths=(128, 128), int_length=True),
    "empty_sequence": CacheCase(lengths=(0, 5)),
    "empty_sequence_with_sink": CacheCase(lengths=(0, 5), sink=True),
    "no_batch": CacheCase(lengths=()),
    "no_query": CacheCase(Sq=0, new=3),
    "append_one": CacheCase(new=1),
    "append_to_empty": CacheCase(lengths=(0, 0), Sq=4, new=4, causal=True),
    "append_to_the_end": CacheCase(lengths=(124, 120), Sq=4, new=4, causal=True),
    "append_fewer_than_queries": CacheCase(Sq=5, new=2, causal=True),
    "append_more_than_queries": CacheCase(Sq=2, new=9, causal=True),
    "more_queries_than_keys": CacheCase(lengths=(0, 3), Sq=9, new=2, causal=True),
    "batch_idx": CacheCase(batch_idx=True, extra_entries=3, new=1),
    "leftpad": CacheCase(leftpad=(31, 37), new=2, Sq=2, causal=True),
    "leftpad_paged": CacheCase(leftpad=(31, 5), new=2, Sq=2, causal=True, page_size=16),
    "rotary_interleaved": CacheCase(new=3, Sq=3, causal=True, rotary_dim=16),
    "rotary_halves": CacheCase(new=3, Sq=3, causal=True, rotary_dim=32, interleaved=False),
    "rotary_at_one_position": CacheCase(new=3, Sq=3, rotary_dim=16),
    "rotary_leftpad": CacheCase(new=3, Sq=3, rotary_dim=16, causal=True, leftpad=(3, 30)),
    "rotary_many_queries": CacheCase(new=40, Sq=40, rotary_dim=16, causal=True, room=200),
    "window": CacheCase(Sq=5, window_size=(20, 2), lengths=(100, 9)),
    "window_many_queries": CacheCase(Sq=50, window_size=(20, 2), lengths=(100, 9)),
    "softcap": CacheCase(softcap=3.0),
    "alibi": CacheCase(Sq=3, alibi="heads", causal=True),
    "alibi_batch": CacheCase(Sq=3, alibi="batch", causal=True),
    "alibi_many_queries": CacheCase(Sq=30, alibi="batch", causal=True),
    "sink": CacheCase(sink=True, Sq=3),
    "smooth": CacheCase(smooth_softmax=True, Sq=3),
    "tree": CacheCase(tree=True, Sq=8, new=8),
    "tree_longer_than_sequence": CacheCase(tree=True, Sq=12, new=0, lengths=(5, 3)),
    "tree_of_heads": CacheCase(tree=True, Sq=8, new=8, mask_heads=2, page_size=16),
    "tree_many_queries": CacheCase(tree=True, Sq=30, new=30, lengths=(60, 98), causal=True),
    "tree_many_queries_paged": CacheCase(tree=True, Sq=30, new=30, lengths=(60, 98), page_size=16),
    "many_heads": CacheCase(Hq=34, Hk=2, Sq=9, causal=True, D=16),
    "rows_of_two_blocks": CacheCase(Hq=48, Hk=3, Sq=16, causal=True, D=16, num_splits=2),
    "blocks_of_queries": CacheCase((900, 1, 0, 620), Sq=20, Hq=8, D=64, Dv=128, room=1000, causal=True, sink=True),
    "blocks_of_queries_append": CacheCase(
        (900, 37), Sq=33, new=33, Hq=8, D=128, Dv=96, room=1000, rotary_dim=32, batch_idx=True, extra_entries=1
    ),
    "blocks_of_queries_leftpad": CacheCase(
        (2900, 37), Sq=40, Hq=10, D=200, Dv=256, room=3000, leftpad=(300, 5), window_size=(1500, 3), sink=True
    ),
    "negative_scale": CacheCase(softmax_scale=-0.3),
    "odd_head_dims": CacheCase(D=33, Dv=7, new=1),
    "largest_head_dim": CacheCase(D=256, Dv=256, new=1),
}


@pytest.mark.every_isa
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str, device: str, dtype: torch.dtype) -> None:
    check(CASES[name], device, dtype)


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 256])
@pytest.mark.parametrize("Sq", [1, 6, 33])
def test_pages(page_size: int, Sq: int, device: str, dtype: torch.dtype) -> None:
    # Before, at and after a page boundary; a full page.
    lengths = (page_size - 1, page_size, max(2 * page_size - Sq, 0), 3 * page_size - 1)
    room = 3 * page_size + (Sq // page_size + 1) * page_size
    check(
        CacheCase(lengths, Sq=Sq, new=Sq, room=room, page_size=page_size, causal=True, extra_entries=2), device, dtype
    )


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 64, 256])
def test_splits(num_splits: int, device: str, dtype: torch.dtype) -> None:
    check(CacheCase(lengths=(700, 64, 0, 1), room=704, num_splits=num_splits, sink=True), device, dtype)
    check(
        CacheCase(lengths=(700, 65), Sq=4, new=4, room=704, page_size=16, num_splits=num_splits, window_size=(500, 0)),
        device,
        dtype,
    )


def test_splits_of_long_sequences(device: str) -> None:
    check(CacheCase(lengths=(6000, 300), room=6016, D=16, Dv=16, new=1), device, torch.float32)


@pytest.mark.parametrize("seed", range(120))
def test_options_in_all_combinations(seed: int, device: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16] + ([torch.float64] if device == "cpu" else [])
    check(random_case(seed), device, dtypes[seed % len(dtypes)])


APPENDED = {  # views of caches [2, 32, 2, 16] whose memory new keys are written to
    "k where it goes": dict(k=lambda k, v: k[:, 2:5]),
    "k a row further": dict(k=lambda k, v: k[:, 3:6]),
    "k a row before": dict(k=lambda k, v: k[:, 1:4]),
    "k of the first entry": dict(k=lambda k, v: k[:1, 2:5].expand(2, -1, -1, -1)),
    "k where v goes": dict(k=lambda k, v: v[:, 2:5]),
    "v where k goes": dict(v=lambda k, v: k[:, 4:7]),
    "q": dict(q=lambda k, v: k[:, 4:7]),
}


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("name", APPENDED)
def test_what_is_appended_may_lie_in_the_cache(device: str, name: str, rotary: bool) -> None:
    """q, k and v were read after appended rows had overwritten them."""
    caches = [torch.randn(2, 32, 2, 16, device=device) for _ in "kv"]
    given = {name: torch.randn(2, 3, 2, 16, device=device) for name in "qkv"}
    options: dict[str, Any] = {"cache_seqlens": torch.tensor([2, 3], dtype=torch.int32, device=device), "causal": True}
    if rotary:
        options |= {f"rotary_{t}": torch.randn(32, 8, device=device) for t in ("cos", "sin")}

    def result(*, copies: bool) -> list[torch.Tensor]:
        k_cache, v_cache = (t.clone() for t in caches)
        views = {which: view(k_cache, v_cache) for which, view in APPENDED[name].items()}
        inputs = given | {which: view.clone() if copies else view for which, view in views.items()}
        q, k, v = (inputs[which] for which in "qkv")
        out = flashattn_ext.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
        return [out, k_cache, v_cache]

    for got, expected in zip(result(copies=False), result(copies=True), strict=True):
        assert torch.equal(got, expected)


def test_keys_are_appended_without_query_heads(device: str) -> None:
    """CUDA returned before the append."""
    k_cache, v_cache = torch.zeros(2, 2, 32, 2, 16, device=device)
    k, v = torch.randn(2, 2, 3, 2, 16, device=device)
    q = torch.zeros(2, 3, 0, 16, device=device)
    out = flashattn_ext.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5)
    assert out.shape == q.shape and torch.equal(k_cache[:, 5:8], k) and torch.equal(v_cache[:, 5:8], v)
