"""fp64 gradients against finite differences, through out and lse together."""

from __future__ import annotations

import pytest
import torch
from helpers import cu_seqlens
from mask_cases import make_mask
from torch.autograd import gradcheck

import flashattn_ext

# A tensor stands for its shape, in letters: see `size_of`.
OPTIONS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 2)),
    "scale": dict(softmax_scale=-0.7),
    "smooth": dict(smooth_softmax=True),
    "sink": dict(sink="q"),
    "softcap": dict(softcap=0.6),
    "slopes": dict(alibi_slopes="q"),
    "slopes of each entry": dict(alibi_slopes="bq", causal=True),
    "relative": dict(relative_bias="q5"),
    "relative, one entry": dict(relative_bias="q1"),
    "biases": dict(softcap=1.5, alibi_slopes="q", relative_bias="q3", window_size=(4, 1), sink="q"),
    "dropout": dict(dropout_p=0.4, rng_seed=17),
    "mask": dict(mask="intervals"),
    "all": dict(
        causal=True, window_size=(4, -1), softmax_scale=0.5, sink="q", dropout_p=0.3, rng_seed=4, softcap=1.2,
        alibi_slopes="q", relative_bias="q5", mask="documents",
    ),
}  # fmt: skip
BROADCASTS = ["bqs", "1qs", "b1s", "bq1", "11s", "1q1", "b11", "111"]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check_gradients(function, q, k, v, options: dict, sizes: list[tuple[int, int]]) -> None:
    """sizes: (Sq, Sk) of each sequence."""
    size_of = {"b": len(sizes), "q": q.shape[-2], "s": sizes[0][0], "k": sizes[0][1]}
    leaves, given = {"q": q, "k": k, "v": v}, dict(options)
    for name in ("sink", "alibi_slopes", "relative_bias", "bias"):
        if name in given:
            leaves[name] = leaf(*(size_of.get(size) or int(size) for size in given.pop(name)))
    if "mask" in given:
        generator = torch.Generator().manual_seed(3)
        given["mask"] = make_mask(given["mask"], k.shape[-2], sizes, generator, packed=q.dim() == 3)

    def both(*tensors):
        out, lse = function(**dict(zip(leaves, tensors, strict=True)), **given, return_lse=True)
        return out, lse.masked_fill(lse.isneginf(), 0)  # finite differences of -inf have no meaning

    assert gradcheck(both, tuple(leaves.values()))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("Sq,Sk", [(5, 7), (7, 4)])
def test_gradients_are_those_of_finite_differences(name: str, Sq: int, Sk: int) -> None:
    tensors = leaf(2, Sq, 4, 3), leaf(2, Sk, 2, 3), leaf(2, Sk, 2, 5)
    check_gradients(flashattn_ext.forward, *tensors, OPTIONS[name], [(Sq, Sk)] * 2)


def test_gradients_of_wide_heads_are_those_of_finite_differences() -> None:
    check_gradients(flashattn_ext.forward, leaf(1, 2, 1, 300), leaf(1, 3, 1, 300), leaf(1, 3, 1, 512), {}, [(2, 3)])


@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "with all others"])
def test_gradients_of_a_bias_are_those_of_finite_differences(broadcast: str, together: bool) -> None:
    options = {**(OPTIONS["all"] if together else {}), "bias": broadcast + "k"}
    check_gradients(flashattn_ext.forward, leaf(2, 4, 2, 3), leaf(2, 5, 1, 3), leaf(2, 5, 1, 3), options, [(4, 5)] * 2)


def test_gradients_of_t5s_table_are_those_of_finite_differences() -> None:
    q, table = leaf(1, 9, 2, 3), leaf(8, 2)

    def out(q, table):
        bias = flashattn_ext.t5_relative_bias(table, 6, max_distance=6)
        return flashattn_ext.forward(q, q, q, softmax_scale=1.0, relative_bias=bias)

    assert gradcheck(out, (q, table))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_packed_sequences_are_those_of_finite_differences(name: str) -> None:
    starts_q, starts_k = cu_seqlens([4, 0, 3], "cpu"), cu_seqlens([5, 2, 1], "cpu")

    def function(q, k, v, **options):
        return flashattn_ext.varlen_forward(q, k, v, starts_q, starts_k, 4, 5, **options)

    sizes = [(4, 5), (0, 2), (3, 1)]
    check_gradients(function, leaf(7, 2, 3), leaf(8, 1, 3), leaf(8, 1, 3), OPTIONS[name], sizes)


def test_gradients_across_tiles_are_those_of_finite_differences() -> None:
    tensors = leaf(1, 3, 1, 2), leaf(1, 130, 1, 2), leaf(1, 130, 1, 1)
    check_gradients(flashattn_ext.forward, *tensors, OPTIONS["all"], [(3, 130)])
