"""Decoding on GPUs: split-KV over thread blocks, prefill by the forward kernels, CUDA graphs, no synchronisation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from cache_cases import CacheCase, check
from helpers import assert_same_bits

import flashattn_ext

BACKENDS = [name for name in flashattn_ext.build_info()["backends"] if name.startswith("cuda-")]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def cache(B: int, room: int, Hk: int, D: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(B, room, Hk, D, device="cuda").to(dtype) for _ in range(2))
    return k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256, 512, 33])
@pytest.mark.parametrize("Sq", [1, 30])
def test_every_compiled_tile(Sq: int, D: int, dtype: torch.dtype) -> None:
    """Narrow and wide tiles; 33 columns are not a multiple of a vector load."""
    case = CacheCase((700, 64, 0, 333), Sq=Sq, new=Sq, Hq=4, Hk=2, D=D, Dv=D, room=768, causal=True, sink=True)
    check(case, "cuda", dtype)
    check(dataclasses.replace(case, page_size=48, num_splits=3), "cuda", dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [0, 112])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "new": 300, "rotary_dim": 32, "interleaved": False},
        {"window_size": (200, 20), "softcap": 4.0, "sink": True},
        {"alibi": "batch", "extra_entries": 3, "smooth_softmax": True},
        {"leftpad": (0, 100, 400, 0, 17), "causal": True},
    ],
    ids=str,
)
def test_prefill(options: dict[str, object], page_size: int, backend: str) -> None:
    """Enough queries for the forward kernels, over sequences shorter and longer than the queries."""
    lengths = (600, 350, 400, 0, 299)
    sizes = {"Sq": 300, "Hq": 16, "Hk": 4, "D": 64, "Dv": 64, "room": 1008, "page_size": page_size}
    case = CacheCase(lengths, batch_idx=page_size == 0, **sizes, **options)
    with flashattn_ext.use_backend(backend):
        check(case, "cuda", torch.bfloat16)


@pytest.mark.parametrize("lengths", [(1, 9000, 3, 0, 64, 4097), (0, 0, 0), (65,), tuple(range(200))], ids=len)
@pytest.mark.parametrize("Hk", [1, 6])
def test_splits_of_uneven_lengths(Hk: int, lengths: tuple[int, ...]) -> None:
    k, v = cache(len(lengths), max(*lengths, 1, 1), Hk, 128)
    q = torch.randn(len(lengths), 2, 2 * Hk, 128, device="cuda", dtype=torch.bfloat16)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": seqlens, "causal": True}
    out, lse = flashattn_ext.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    expected, expected_lse = flashattn_ext.kvcache_reference(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)


def test_a_batch_does_not_change_the_bits_of_fixed_splits() -> None:
    k, v = cache(6, 4096, 2, 128)
    q = torch.randn(6, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 4000, 1, 777, 64, 2500], dtype=torch.int32, device="cuda")
    together = flashattn_ext.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=5)
    for b in range(6):
        part = slice(b, b + 1)
        alone = flashattn_ext.flash_attn_with_kvcache(
            q[part], k[part], v[part], cache_seqlens=lengths[part], num_splits=5
        )
        assert_same_bits(together[part], alone)


@pytest.mark.parametrize("Sq", [1, 200])
def test_a_graph_replays_with_other_lengths(Sq: int) -> None:
    """A replay appends, rotates and attends with the lengths at the time of the replay, and nothing synchronises."""
    k, v = cache(4, 2048, 4, 128)
    q, k_new, v_new = (torch.randn(4, Sq, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 4, 4))
    angles = torch.rand(2048, 32, device="cuda") * 2 * math.pi
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    lengths = torch.tensor([5, 1000, 0, 300], dtype=torch.int32, device="cuda")

    def call(caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return flashattn_ext.flash_attn_with_kvcache(
            q, *caches, k_new, v_new, cos, sin, cache_seqlens=lengths, causal=True
        )

    call((k.clone(), v.clone()))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = call((k, v))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for now in ([1800, 1, 64, 1500], [0, 0, 0, 0]):
        lengths.copy_(torch.tensor(now))
        caches = k.clone(), v.clone()
        graph.replay()
        assert_same_bits(out, call(caches))
        assert_same_bits(k, caches[0])
        assert_same_bits(v, caches[1])


@pytest.mark.parametrize("num_splits", [0, 3])
def test_calls_in_a_row_wait_for_what_they_read(num_splits: int) -> None:
    """Programmatic dependent launch: a call reads lengths, new keys and queries that earlier kernels write while it starts."""

    def steps(synchronize: Callable[[], None]) -> torch.Tensor:
        torch.manual_seed(0)
        k, v = cache(3, 1500, 2, 64)
        q = torch.randn(3, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([1400, 2, 700], dtype=torch.int32, device="cuda")
        for _ in range(30):
            new = q[:, :, :2].contiguous()
            q = flashattn_ext.flash_attn_with_kvcache(
                q, k, v, new, new, cache_seqlens=lengths, causal=True, num_splits=num_splits
            )
            synchronize()
            lengths += 1
            q = flashattn_ext.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=num_splits)
            synchronize()
        return q

    assert_same_bits(steps(lambda: None), steps(torch.cuda.synchronize))


@pytest.mark.parametrize("num_splits", [0, 3])
def test_calls_of_known_lengths_wait_for_what_they_read(num_splits: int) -> None:
    """Where the host knows all lengths, a call divides its work before the previous kernel has ended."""

    def steps(synchronize: Callable[[], None]) -> torch.Tensor:
        torch.manual_seed(0)
        k, v = cache(3, 1500, 2, 64)
        q = torch.randn(3, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
        for step in range(30):
            new = q[:, :, :2].contiguous()
            q = flashattn_ext.flash_attn_with_kvcache(
                q, k, v, new, new, cache_seqlens=1400 + step, num_splits=num_splits
            )
            synchronize()
            q = flashattn_ext.flash_attn_with_kvcache(q, k, v, num_splits=num_splits)
            synchronize()
            k[:, 40 * step] = q[:, 0, :2]
            synchronize()
            q = flashattn_ext.forward(q, k, v)
            synchronize()
            q = q + flashattn_ext.forward(q, k[:, :700], v[:, :700], causal=True)
        return q

    assert_same_bits(steps(lambda: None), steps(torch.cuda.synchronize))


def test_block_tables_that_lead_outside() -> None:
    k, v = cache(20, 16, 2, 64)
    q = torch.randn(3, 1, 4, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.randint(-(2**31), 2**31 - 1, (3, 50), device="cuda", dtype=torch.int32)
    with torch.inference_mode():  # this call does not read lengths on the host, so it refuses nothing
        lengths = torch.tensor([2**31 - 1, -5, 700], dtype=torch.int32, device="cuda")
        out = flashattn_ext.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
    expected, _ = flashattn_ext.kvcache_reference(
        q.double(), k.double(), v.double(), cache_seqlens=lengths, block_table=table
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
