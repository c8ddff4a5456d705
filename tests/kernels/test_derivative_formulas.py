"""The formulas of docs/derivatives.md, J and H, against autograd through attention_reference in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from derivative_formulas import Tangents, jvp, second
from gradcheck_cases import BROADCASTS, OPTIONS, leaf, out_and_lse, tensors_and_options
from helpers import cu_seqlens
from torch import Tensor
from torch.autograd import forward_ad

import flashattn_ext
from flashattn_ext import ops
from flashattn_ext.calls import convert, lengths_of
from flashattn_ext.options import CallOptions, CallTensors

CASES = {**OPTIONS, **{f"bias {shape}": {**OPTIONS["biases"], "bias": shape + "k"} for shape in BROADCASTS}}
LENGTHS = {"cu_seqlens_q": cu_seqlens([4, 0, 3, 2], "cpu"), "cu_seqlens_k": cu_seqlens([5, 2, 1, 0], "cpu")}


def op_arguments(leaves: dict[str, Tensor], given: dict[str, Any]) -> tuple[CallTensors, CallOptions, Tensor | None]:
    """The tensors, options and dropout state with which the ops run this call."""
    given, tensors = dict(given), {name: t.detach() for name, t in leaves.items()}
    lengths = lengths_of(*(given.pop(name, None) for name in LENGTHS), 0, 0)
    seed, layout = given.pop("rng_seed", None), given.pop("layout", "bshd")
    call, options = convert("forward", *(tensors.pop(name) for name in "qkv"), lengths, layout, **tensors, **given)
    return call, options, ops.dropout_state(call.q, options.dropout_p, seed)


def check(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
    leaves, given = tensors_and_options(q, k, v, options, sizes)
    if q.dim() == 3:
        given |= LENGTHS
    both = out_and_lse(flashattn_ext.attention_reference, leaves, given)
    directions = {name: torch.randn_like(t) for name, t in leaves.items()}
    arguments = op_arguments(leaves, given)

    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(t, directions[name]) for name, t in leaves.items())
        expected = [forward_ad.unpack_dual(t).tangent for t in both(*duals)]
    results = tout, tlse = jvp(*arguments, Tangents(**directions))
    for name, got, ref in zip(("out", "lse"), results, expected, strict=True):
        torch.testing.assert_close(got, ref.detach(), rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")

    dout, dlse = torch.randn_like(tout), torch.randn_like(tlse)
    primals, cotangents = tuple(leaves.values()), [dout, dlse]
    firsts = torch.autograd.grad(both(*primals), primals, cotangents, create_graph=True)
    seconds = torch.autograd.grad(firsts, primals, tuple(directions.values()), materialize_grads=True)
    got = second(*arguments, dout, dlse, Tangents(**directions))._asdict()
    for name, ref in zip(leaves, seconds, strict=True):
        torch.testing.assert_close(got[name], ref, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("Sq,Sk", [(5, 7), (7, 4)])
def test_dense_calls(name: str, Sq: int, Sk: int) -> None:
    check(leaf(2, Sq, 4, 3), leaf(2, Sk, 2, 3), leaf(2, Sk, 2, 5), CASES[name], [(Sq, Sk)] * 2)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences(name: str) -> None:
    check(leaf(10, 2, 3), leaf(9, 1, 3), leaf(9, 1, 4), OPTIONS[name], [(4, 5), (0, 2), (3, 1), (2, 0)])


@pytest.mark.parametrize("origin", [(1, 2), (1, 2, 3, 2)])
def test_a_part_of_a_larger_call(origin: tuple[int, ...]) -> None:
    options = {**OPTIONS["all"], "origin": origin, "layout": "bhsd"}
    q, k, v = leaf(2, 4, 5, 3), leaf(2, 2, 7, 3), leaf(2, 2, 7, 5)
    del options["mask"]
    for name, shape in (("sink", "4"), ("alibi_slopes", "4"), ("relative_bias", "43")):
        options[name] = shape
    check(q, k, v, options, [(5, 7)] * 2)
