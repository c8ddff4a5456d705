"""fp64 gradients against finite differences, through out and lse together."""

from __future__ import annotations

import pytest
import torch
from helpers import cu_seqlens
from torch.autograd import gradcheck

import flashattn_ext

OPTIONS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 2)),
    "scale": dict(softmax_scale=-0.7),
    "smooth": dict(smooth_softmax=True),
    "sink": dict(sink=True),
    "dropout": dict(dropout_p=0.4, rng_seed=17),
    "all": dict(causal=True, window_size=(4, -1), softmax_scale=0.5, sink=True, dropout_p=0.3, rng_seed=4),
}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check_gradients(function, q, k, v, options: dict) -> None:
    options = dict(options)
    sink = leaf(q.shape[-2]) if options.pop("sink", False) else None

    def both(q, k, v, sink=None):
        out, lse = function(q, k, v, sink=sink, **options, return_lse=True)
        return out, lse.masked_fill(lse.isneginf(), 0)  # finite differences of -inf have no meaning

    assert gradcheck(both, (q, k, v) if sink is None else (q, k, v, sink))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("Sq,Sk", [(5, 7), (7, 4)])
def test_gradients_are_those_of_finite_differences(name: str, Sq: int, Sk: int) -> None:
    check_gradients(flashattn_ext.forward, leaf(2, Sq, 4, 3), leaf(2, Sk, 2, 3), leaf(2, Sk, 2, 5), OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_packed_sequences_are_those_of_finite_differences(name: str) -> None:
    starts_q, starts_k = cu_seqlens([4, 0, 3], "cpu"), cu_seqlens([5, 2, 1], "cpu")

    def function(q, k, v, **options):
        return flashattn_ext.varlen_forward(q, k, v, starts_q, starts_k, 4, 5, **options)

    check_gradients(function, leaf(7, 2, 3), leaf(8, 1, 3), leaf(8, 1, 3), OPTIONS[name])


def test_gradients_across_tiles_are_those_of_finite_differences() -> None:
    check_gradients(flashattn_ext.forward, leaf(1, 3, 1, 2), leaf(1, 130, 1, 2), leaf(1, 130, 1, 1), OPTIONS["all"])
