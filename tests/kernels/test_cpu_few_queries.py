"""Forwards with few queries on the CPU: they run the kernels of decoding (csrc/cpu/few_queries.h)."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Case, allocated_bytes, assert_same_bits, check

import flashattn_ext

pytestmark = pytest.mark.usefixtures("deterministic")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [31, 32, 33, 64, 100])
def test_a_visible_nan_counts_if_its_weight_underflows(isa: str, dtype: torch.dtype, keys: int) -> None:
    """A masked or padding key in its group of keys does not hide it, and a masked NaN stays hidden."""
    q = torch.full((1, 1, 1, 8), 100.0, dtype=dtype)
    k, v = torch.zeros(1, keys, 1, 8, dtype=dtype), torch.ones(1, keys, 1, 8, dtype=dtype)
    k[0, 0], k[0, -1] = 1, -3
    v[0, -1] = math.nan
    assert flashattn_ext.forward(q, k, v, softmax_scale=1.0).isnan().all()
    hides_the_last = (0, 0, keys - 2, 0)  # the query is at the position of the key before it
    hidden = flashattn_ext.forward(q, k, v, softmax_scale=1.0, causal=True, origin=hides_the_last)
    assert (hidden == 1).all()


@pytest.mark.parametrize("Sq", [1, 64])
@pytest.mark.parametrize("invariant", [False, True])
def test_the_largest_logit_of_a_row_with_a_nan_is_nan(isa: str, Sq: int, invariant: bool) -> None:
    """Whichever kernel computes it, at any place among the keys."""
    for place in (0, 3, 63):
        q, k = torch.ones(1, Sq, 1, 8), torch.zeros(1, 64, 1, 8)
        k[0, 5], k[0, place] = 5, math.nan
        assert flashattn_ext.forward(q, k, k, invariant=invariant, return_max_logits=True)[1].isnan().all()
        k[0, place] = math.inf
        assert (flashattn_ext.forward(q, k, k, invariant=invariant, return_max_logits=True)[1] == math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_of_invariant_calls_have_one_sign(isa: str, dtype: torch.dtype) -> None:
    """A sink leaves nothing of small values; a longer call computes the row with another kernel."""
    q, k, v = (
        torch.randn(1, 40, 8, 32).to(dtype),
        torch.randn(1, 40, 2, 32).to(dtype),
        torch.randn(1, 40, 2, 512).to(dtype),
    )
    sink = torch.full((8,), 88.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    long = flashattn_ext.forward(q, k, v, sink=sink, invariant=True, causal=True)
    short = flashattn_ext.forward(q[:, -1:], k, v, sink=sink, invariant=True, causal=True)
    assert_same_bits(short, long[:, -1:], "out")
    assert (short.signbit() == long[:, -1:].signbit()).all()


def test_the_results_of_a_sequence_do_not_depend_on_longer_ones(isa: str) -> None:
    """One sequence has eight times the queries of the others, one has more than these kernels take."""
    lengths_q, lengths_k = [1, 8, 1, 30, 0, 2], [300, 64, 1, 40, 7, 2100]
    q, k, v = torch.randn(sum(lengths_q), 8, 64), torch.randn(sum(lengths_k), 2, 64), torch.randn(sum(lengths_k), 2, 64)
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    out, lse = flashattn_ext.varlen_forward(q, k, v, *starts, 30, 2100, causal=True, return_lse=True)
    for i, (queries, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, columns = slice(starts[0][i], starts[0][i + 1]), slice(starts[1][i], starts[1][i + 1])
        alone, lse_alone = flashattn_ext.forward(
            q[None, rows], k[None, columns], v[None, columns], causal=True, return_lse=True
        )
        assert alone.shape[1] == queries and columns.stop - columns.start == keys
        assert_same_bits(out[rows], alone[0], f"out of sequence {i}")
        assert_same_bits(lse[:, rows], lse_alone[0], f"lse of sequence {i}")


def test_memory_follows_the_rows_of_each_sequence() -> None:
    """One sequence of eight queries among 1000 of one needs as much as one more of one."""
    B, keys = 1000, 64
    starts_k = (torch.arange(B + 1) * keys).int()
    k, v = (torch.randn(B * keys, 1, 64) for _ in range(2))

    def bytes_with(queries: int) -> int:
        starts_q = torch.tensor([0, queries, *[1] * (B - 1)]).cumsum(0).int()
        q = torch.randn(B - 1 + queries, 16, 64)
        return allocated_bytes(lambda: flashattn_ext.varlen_forward(q, k, v, starts_q, starts_k, queries, keys))

    assert bytes_with(8) < 1.5 * bytes_with(1)


@pytest.mark.parametrize("Sq", [1, 3])
def test_a_call_without_a_cache_has_the_bits_of_one_with_it(isa: str, Sq: int) -> None:
    """They run the same kernels on the same splits; a call of more queries runs others."""
    q, k, v = torch.randn(2, 40, 8, 64), torch.randn(2, 3000, 2, 64), torch.randn(2, 3000, 2, 64)
    lengths = torch.full((2,), 3000, dtype=torch.int32)
    with_cache = flashattn_ext.flash_attn_with_kvcache(q[:, :Sq], k, v, cache_seqlens=lengths)
    assert_same_bits(flashattn_ext.forward(q[:, :Sq], k, v), with_cache)
    assert not torch.equal(flashattn_ext.forward(q, k, v)[:, :Sq], with_cache)


BIASES = {
    "of keys": {"bias": "", "causal": True},
    "of rows": {"bias": "q", "bias_dtype": torch.float32, "window_size": (700, 5)},
    "of scores": {"bias": "bhq", "bias_hides": 0.1, "alibi": "batch", "sink_dtype": torch.float32},
    "of hidden scores": {"bias": "bh", "bias_hides": 0.97, "max_logits": True, "softcap": 3.0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_biases(isa: str, dtype: torch.dtype, name: str) -> None:
    """Few queries and many keys; the last group of keys is not full. Slopes without a gradient, as centres would need others."""
    options = dict(BIASES[name])
    if dtype == torch.float64 and "sink_dtype" in options:
        options["sink_dtype"] = dtype
    for Sq, Hq, Hk, D in ((1, 8, 2, 40), (2, 3, 3, 33)):
        sizes = dict(dtype=dtype, B=2, Sq=Sq, Sk=1100, Hq=Hq, Hk=Hk, D=D, Dv=D + 5, use_lse=True)
        check(Case(**sizes, **options, needs_grad=("q", "k", "v", "bias")), "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_is_not_read_beyond_its_keys_and_hides_a_nan(isa: str, dtype: torch.dtype) -> None:
    """A bias of -inf hides a score of NaN. The memory after a row of the bias, and a bias that causal hides, are NaN."""
    q, k, v = (
        torch.randn(1, 2, 4, 40).to(dtype),
        torch.randn(1, 77, 2, 40).to(dtype),
        torch.randn(1, 77, 2, 40).to(dtype),
    )
    bias = torch.full((1, 1, 2, 90), math.nan, dtype=dtype)[..., :77]
    bias[...] = torch.randn(77).to(dtype)
    bias[..., 0, 76] = math.nan
    bias[..., 5] = -math.inf
    expected = flashattn_ext.attention_reference(q, k, v, bias=bias.nan_to_num(0, neginf=-math.inf), causal=True)
    k[:, 5] = math.nan
    assert flashattn_ext.supports(q, k, v, bias=bias, causal=True).slow == ""
    out = flashattn_ext.forward(q, k, v, bias=bias, causal=True)
    torch.testing.assert_close(out, expected, atol=2e-2 if dtype.itemsize == 2 else 1e-5, rtol=0)
