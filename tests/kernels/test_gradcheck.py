"""fp64 derivatives of both orders and both modes against finite differences, through out and lse together.

A fast check compares the derivative along random directions of the inputs and outputs, a full one every element of the Jacobian. Full are
those of IN_FULL, and all under `--exhaustive`.
"""

from __future__ import annotations

import pytest
from gradcheck_cases import BROADCASTS, OPTIONS, leaf, out_and_lse, tensors_and_options
from helpers import cu_seqlens
from torch.autograd import gradcheck, gradgradcheck

import flashattn_ext

IN_FULL = "all"


@pytest.fixture
def fast_mode(request: pytest.FixtureRequest, exhaustive: bool) -> bool:
    names = getattr(request.node, "callspec", None)
    return not exhaustive and (names is None or names.params.get("name") != IN_FULL)


def check_gradients(function, q, k, v, options: dict, sizes: list[tuple[int, int]], fast_mode: bool) -> None:
    """sizes: (Sq, Sk) of each sequence."""
    leaves, given = tensors_and_options(q, k, v, options, sizes)
    inputs = tuple(leaves.values())
    assert gradcheck(out_and_lse(function, leaves, given), inputs, check_forward_ad=True, fast_mode=fast_mode)


def check_second_derivatives(function, q, k, v, options: dict, sizes: list[tuple[int, int]], fast_mode: bool) -> None:
    """Reverse over reverse, and forward over reverse. sizes: (Sq, Sk) of each sequence."""
    leaves, given = tensors_and_options(q, k, v, options, sizes)
    inputs = tuple(leaves.values())
    assert gradgradcheck(out_and_lse(function, leaves, given), inputs, check_fwd_over_rev=True, fast_mode=fast_mode)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("Sq,Sk", [(5, 7), (7, 4)])
def test_gradients_are_those_of_finite_differences(name: str, Sq: int, Sk: int, fast_mode: bool) -> None:
    tensors = leaf(2, Sq, 4, 3), leaf(2, Sk, 2, 3), leaf(2, Sk, 2, 5)
    check_gradients(flashattn_ext.forward, *tensors, OPTIONS[name], [(Sq, Sk)] * 2, fast_mode)


@pytest.mark.parametrize("name", [*OPTIONS, *(f"bias {shape}" for shape in BROADCASTS)])
def test_second_derivatives_are_those_of_finite_differences(name: str, fast_mode: bool) -> None:
    options = OPTIONS[name] if name in OPTIONS else {**OPTIONS["biases"], "bias": name.removeprefix("bias ") + "k"}
    tensors = leaf(2, 2, 2, 1), leaf(2, 3, 1, 1), leaf(2, 3, 1, 2)
    check_second_derivatives(flashattn_ext.forward, *tensors, options, [(2, 3)] * 2, fast_mode)


@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivatives_of_packed_sequences_are_those_of_finite_differences(name: str, fast_mode: bool) -> None:
    starts_q, starts_k = cu_seqlens([2, 0, 1], "cpu"), cu_seqlens([3, 1, 1], "cpu")

    def function(q, k, v, **options):
        return flashattn_ext.varlen_forward(q, k, v, starts_q, starts_k, 2, 3, **options)

    sizes = [(2, 3), (0, 1), (1, 1)]
    check_second_derivatives(function, leaf(3, 2, 1), leaf(5, 1, 1), leaf(5, 1, 2), OPTIONS[name], sizes, fast_mode)


def test_gradients_of_wide_heads_are_those_of_finite_differences() -> None:
    """In full for wide queries and keys. A full check keeps the results of all its backwards, one for each element of out, and between
    these small tensors the workspaces of wide calls fragment the heap, to 20 GB: so wide values are checked in one random direction."""
    narrow = leaf(1, 2, 1, 300), leaf(1, 3, 1, 300), leaf(1, 3, 1, 2)
    assert gradcheck(flashattn_ext.forward, narrow)
    leaves = leaf(1, 2, 1, 300), leaf(1, 3, 1, 300), leaf(1, 3, 1, 512)
    assert gradcheck(flashattn_ext.forward, leaves, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "with all others"])
def test_gradients_of_a_bias_are_those_of_finite_differences(broadcast: str, together: bool, fast_mode: bool) -> None:
    options = {**(OPTIONS["all"] if together else {}), "bias": broadcast + "k"}
    check_gradients(
        flashattn_ext.forward, leaf(2, 4, 2, 3), leaf(2, 5, 1, 3), leaf(2, 5, 1, 3), options, [(4, 5)] * 2, fast_mode
    )


def test_gradients_of_t5s_table_are_those_of_finite_differences() -> None:
    q, table = leaf(1, 9, 2, 3), leaf(8, 2)

    def out(q, table):
        bias = flashattn_ext.t5_relative_bias(table, 6, max_distance=6)
        return flashattn_ext.forward(q, q, q, softmax_scale=1.0, relative_bias=bias)

    assert gradcheck(out, (q, table))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_packed_sequences_are_those_of_finite_differences(name: str, fast_mode: bool) -> None:
    starts_q, starts_k = cu_seqlens([4, 0, 3], "cpu"), cu_seqlens([5, 2, 1], "cpu")

    def function(q, k, v, **options):
        return flashattn_ext.varlen_forward(q, k, v, starts_q, starts_k, 4, 5, **options)

    sizes = [(4, 5), (0, 2), (3, 1)]
    check_gradients(function, leaf(7, 2, 3), leaf(8, 1, 3), leaf(8, 1, 3), OPTIONS[name], sizes, fast_mode)


def test_gradients_across_tiles_are_those_of_finite_differences(fast_mode: bool) -> None:
    tensors = leaf(1, 3, 1, 2), leaf(1, 130, 1, 2), leaf(1, 130, 1, 1)
    check_gradients(flashattn_ext.forward, *tensors, OPTIONS["all"], [(3, 130)], fast_mode)
