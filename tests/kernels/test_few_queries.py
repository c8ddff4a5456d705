"""Few queries for many keys: kernels may split the keys; every option works, and bits do not depend on the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import Case, assert_same_bits, check, cu_seqlens

import flashattn_ext

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.no_emulator,
    pytest.mark.dtypes("float16", "bfloat16", "float32"),
]

HEADS = [(2, 2), (8, 2), (16, 1)]
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (700, 5)},
    "narrow window": {"window_size": (20, 0)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": "batch", "needs_grad": ("q", "k", "v")},
    "sink": {"sink_dtype": torch.float32, "use_lse": True},
    "smooth": {"smooth_softmax": True, "softmax_scale": -0.2},
    "dropout": {"dropout_p": 0.3, "rng_seed": 3},
    "mask": {"mask": "documents"},
    "max logits": {"max_logits": True, "causal": True, "sink_dtype": torch.float32},
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("Sq", [1, 5, 12, 32])
def test_heads_in_a_tile(device: str, dtype: torch.dtype, Sq: int, heads: tuple[int, int]) -> None:
    """Rows of a GQA group that fill part of a tile, one tile and several tiles."""
    Hq, Hk = heads
    check(Case(dtype=dtype, B=2, Sq=Sq, Sk=1100, Hq=Hq, Hk=Hk, D=64, Dv=64, causal=True, use_lse=True), device)


@pytest.mark.shapes_for("cuda", D=(64,))
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("Sq", [1, 16, 40])
def test_many_splits(device: str, dtype: torch.dtype, Sq: int, D: int) -> None:
    """Splits of narrow and of wide tiles."""
    options = dict(sink_dtype=torch.float32, max_logits=True, use_lse=True)
    check(Case(dtype=dtype, B=1, Sq=Sq, Sk=9000, Hq=4, Hk=1, D=D, Dv=D, causal=True, **options), device)  # type: ignore[arg-type]


@pytest.mark.shapes_for("cuda", D=(64, 200))
@pytest.mark.parametrize("D,Dv", [(64, 64), (96, 128), (128, 128), (200, 256)])
@pytest.mark.parametrize("Sq,Hq,Hk", [(9, 8, 2), (33, 8, 2), (64, 3, 1), (17, 18, 1)])
def test_blocks_of_queries(device: str, dtype: torch.dtype, Sq: int, Hq: int, Hk: int, D: int, Dv: int) -> None:
    """Rows of several heads that fill part of a tile, one tile and several; packed sequences of other lengths."""
    sizes = dict(dtype=dtype, B=2, Sq=Sq, Sk=1300, Hq=Hq, Hk=Hk, D=D, Dv=Dv, use_lse=True)
    check(Case(**sizes, causal=True, sink_dtype=torch.float32), device)  # type: ignore[arg-type]
    check(Case(**sizes, window_size=(1200, 7), max_logits=True), device)  # type: ignore[arg-type]
    lengths = dict(lengths_q=(Sq, 0, 1, Sq - 2, 16), lengths_k=(1300, 40, 0, 700, 3))
    check(Case(**sizes, **lengths, causal=True, smooth_softmax=True), device)  # type: ignore[arg-type]


@pytest.mark.shapes_for("cuda", D=(64, 40))
@pytest.mark.parametrize("D,Dv", [(64, 64), (40, 64), (128, 128), (96, 128)])
@pytest.mark.parametrize(
    "Sq,Hq,Hk", [(1, 6, 1), (16, 8, 2), (61, 1, 1), (17, 4, 1), (16, 16, 2), (128, 2, 2), (43, 3, 1)]
)
def test_gradients(device: str, dtype: torch.dtype, Sq: int, Hq: int, Hk: int, D: int, Dv: int) -> None:
    """Rows of a KV head that fill part of 64 rows, all of them, part of 128 rows, all, and more; keys that few rows see, and none."""
    sizes = dict(dtype=dtype, B=2, Sq=Sq, Sk=1300, Hq=Hq, Hk=Hk, D=D, Dv=Dv, use_lse=True)
    check(Case(**sizes, causal=True, sink_dtype=torch.float32), device)  # type: ignore[arg-type]
    check(Case(**sizes, window_size=(400, 5), softmax_scale=-0.2), device)  # type: ignore[arg-type]


@pytest.mark.parametrize("Hk", [0, 1])
def test_no_query_heads(device: str, dtype: torch.dtype, Hk: int) -> None:
    """A group has no heads, and without KV heads its size is 0 / 0."""
    check(Case(dtype=dtype, B=2, Sq=4, Sk=600, Hq=0, Hk=Hk, D=64, Dv=64, use_lse=True), device)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("Sq,Hq,Hk", [(2, 8, 2), (16, 8, 2), (32, 8, 2), (64, 2, 2)])
def test_a_batch_does_not_change_the_bits_of_gradients(
    device: str, dtype: torch.dtype, Sq: int, Hq: int, Hk: int, D: int
) -> None:
    """On a GPU more parts of keys than it computes at a time."""
    B, Sk = 4 if device == "cpu" else 40, 1100
    q = torch.randn(B, Sq, Hq, D, device=device).to(dtype)
    k, v = (torch.randn(B, Sk, Hk, D, device=device).to(dtype) for _ in range(2))

    def gradients(batch: slice, **options: object) -> tuple[torch.Tensor, ...]:
        leaves = [t[batch].requires_grad_() for t in (q, k, v)]
        out = flashattn_ext.forward(*leaves, **options)  # type: ignore[arg-type]
        return torch.autograd.grad(out, leaves, q[batch].detach().flip(1))

    for options in ({}, {"window_size": (300, 0)}):
        every = gradients(slice(0, B), **options)
        for b in (0, B // 5 + 1, B - 1):
            for got, whole in zip(gradients(slice(b, b + 1), **options), every, strict=True):
                assert_same_bits(got, whole[b : b + 1])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: str, dtype: torch.dtype, name: str, packed: bool) -> None:
    """Packed: no keys, fewer keys than queries, one split and many; no query, one and several."""
    lengths = dict(lengths_q=(3, 0, 7, 1, 4, 2), lengths_k=(1500, 40, 0, 1, 3, 600)) if packed else {}
    case = Case(dtype=dtype, B=2, Sq=7, Sk=1500, Hq=8, Hk=2, D=40, Dv=64, **lengths, **OPTIONS[name])  # type: ignore[arg-type]
    check(case, device)


@pytest.mark.parametrize("D,Dv", [(32, 32), (96, 80), (128, 128), (160, 96), (256, 256), (300, 512), (33, 70)])
def test_head_dims(device: str, dtype: torch.dtype, D: int, Dv: int) -> None:
    """Rows of the last head dims are not a multiple of a vector load."""
    for Sq in (1, 12):
        check(Case(dtype=dtype, Sq=Sq, Sk=700, Hq=4, Hk=2, D=D, Dv=Dv, causal=True), device)


@pytest.mark.parametrize("kind", ["transposed", "packed", "offset", "expanded"])
def test_memory(device: str, dtype: torch.dtype, kind: str) -> None:
    check(Case(dtype=dtype, B=2, Sq=4, Sk=1100, Hq=4, Hk=2, D=64, Dv=64, views=("plain", kind, kind)), device)
    check(Case(dtype=dtype, B=2, Sq=4, Sk=1100, Hq=4, Hk=2, D=64, Dv=64, layout="bhsd"), device)
    check(Case(dtype=dtype, B=2, Sq=20, Sk=1100, Hq=4, Hk=2, D=128, Dv=128, views=(kind, "plain", kind)), device)


@pytest.mark.parametrize("Sq,Hq,Hk", [(1, 8, 2), (1, 2, 2), (16, 8, 2), (32, 4, 4), (50, 8, 2)])
def test_a_batch_does_not_change_the_bits(device: str, dtype: torch.dtype, Sq: int, Hq: int, Hk: int) -> None:
    """Alone, in a batch, and as a packed sequence between others, with equal max_seqlen_q and max_seqlen_k."""
    B, Sk = 5, 3000
    q = torch.randn(B, Sq, Hq, 64, device=device).to(dtype)
    k, v = (torch.randn(B, Sk, Hk, 64, device=device).to(dtype) for _ in range(2))
    for options in ({}, {"causal": True}, {"window_size": (1000, 0), "softcap": 5.0}):
        batch, batch_lse = flashattn_ext.forward(q, k, v, **options, return_lse=True)
        for b in (0, B - 1):
            one = slice(b, b + 1)
            alone, lse = flashattn_ext.forward(q[one], k[one], v[one], **options, return_lse=True)
            assert_same_bits(batch[one], alone)
            assert_same_bits(batch_lse[one], lse)
        rows, keys = [Sq, 1, Sq], [Sk, 77, Sk]
        packed = [
            torch.cat([t[0], torch.randn(count, *t.shape[2:], device=device).to(dtype), t[1]])
            for t, count in ((q, 1), (k, 77), (v, 77))
        ]
        out, lse = flashattn_ext.varlen_forward(
            *packed, cu_seqlens(rows, device), cu_seqlens(keys, device), Sq, Sk, **options, return_lse=True
        )
        assert_same_bits(torch.stack([out[:Sq], out[Sq + 1 :]]), batch[:2], "packed")
        assert_same_bits(torch.stack([lse[:, :Sq], lse[:, Sq + 1 :]]), batch_lse[:2], "lse of packed sequences")


@pytest.mark.parametrize("Sq,Hq,Hk", [(1, 8, 2), (16, 8, 2), (40, 4, 1)])
def test_packed_neighbours_do_not_change_the_bits(device: str, dtype: torch.dtype, Sq: int, Hq: int, Hk: int) -> None:
    """Sequences of many parts, of one and of none beside each other; each has the bits that it has alone."""
    keys, rows = [6000, 1, 0, 513, 5999, 2, 2048, 6000], [Sq, Sq, Sq, 1, 0, Sq, Sq, Sq]
    q = torch.randn(sum(rows), Hq, 64, device=device).to(dtype)
    k, v = (torch.randn(sum(keys), Hk, 64, device=device).to(dtype) for _ in range(2))

    def outputs(q, k, v, rows, keys):  # type: ignore[no-untyped-def]
        return flashattn_ext.varlen_forward(
            q, k, v, cu_seqlens(rows, device), cu_seqlens(keys, device), Sq, 6000, causal=True, return_lse=True
        )

    out, lse = outputs(q, k, v, rows, keys)
    each = zip(q.split(rows), k.split(keys), v.split(keys), out.split(rows), lse.split(rows, dim=1), strict=True)
    for one_q, one_k, one_v, one_out, one_lse in each:
        alone, alone_lse = outputs(one_q, one_k, one_v, [len(one_q)], [len(one_k)])
        assert_same_bits(one_out, alone)
        assert_same_bits(one_lse, alone_lse)


def test_random_calls(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    for seed in range(8):
        Hk, D = 1 + below(3), 8 * (1 + below(24))
        case = Case(dtype=dtype, B=1 + below(4), Sq=1 + below(32), Sk=512 + below(2000), Hq=Hk * (1 + below(6)), Hk=Hk, D=D,
                    Dv=D if below(2) else 8 * (1 + below(24)), causal=bool(below(2)), seed=seed, use_lse=bool(below(2)),
                    window_size=(below(2000) if below(2) else -1, -1), softcap=3.0 * below(2), smooth_softmax=bool(below(2)))  # fmt: skip
        if below(2):
            lengths = [(below(33), below(2000)) for _ in range(1 + below(6))]
            case = dataclasses.replace(
                case, lengths_q=(1, *(a for a, _ in lengths)), lengths_k=(700, *(b for _, b in lengths))
            )
        check(case, device)
