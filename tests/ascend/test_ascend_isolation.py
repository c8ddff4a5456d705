"""Masks on the emulated Ascend C kernels with non-finite values in single rows of every input, in masks of any form. Results
that do not see them keep their bits; results that do are not finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from helpers import assert_same_bits

import flashattn_ext
from flashattn_ext import Mask

MODES = ("mode=eager,cores=1", "mode=late,cores=2", "mode=random,seed=1,cores=3", "mode=random,seed=2,cores=2")
INPUTS = ("q", "k", "v", "dout")


@dataclass
class Call:
    """Sequences (dense ones are equally long) under random intervals of rows, one for each key and head of the Mask."""

    lengths_q: tuple[int, ...] = (300,)
    lengths_k: tuple[int, ...] = (700,)
    heads: tuple[int, int, int] = (2, 1, 1)  # Hq, Hk, Hm
    D: int = 64
    Dv: int = 64
    packed: bool = False
    causal: bool = False
    left: int = -1
    bias: bool = False
    options: dict[str, object] = field(default_factory=dict)


DROPOUT = dict(dropout_p=0.3, rng_seed=1)
CALLS = {
    "intervals": Call(),
    "of query heads": Call((150, 150), (260, 260), heads=(4, 2, 4), D=40, Dv=72),
    "causal": Call((330,), (330,), causal=True, D=128, Dv=128),
    "window": Call((150,), (400,), causal=True, left=90, D=17, Dv=100),
    "packed": Call((5, 0, 140, 200), (9, 30, 0, 300), packed=True, causal=True),
    "wide": Call((40,), (150,), D=256, Dv=256),
    "wide, one buffer of scores": Call((140,), (600,), D=40, Dv=256, bias=True, options=DROPOUT),
    "softcap": Call((150,), (260,), options=dict(softcap=2.0)),
    "softcap, dropout": Call((150,), (260,), options=dict(softcap=2.0, **DROPOUT)),
    "dropout": Call((150,), (600,), D=128, Dv=128, options=DROPOUT),
    "bias": Call((70, 70), (150, 150), heads=(4, 2, 2), bias=True, options=dict(softcap=2.0)),
    "smooth": Call((20,), (600,), options=dict(smooth_softmax=True)),
}


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    with flashattn_ext.use_backend("ascend-emulator"):
        yield


def draw(call: Call, dtype: torch.dtype) -> tuple[Mask, dict[str, torch.Tensor]]:
    """A Mask, and packed tensors [rows, heads, dim] of all sequences."""
    generator = torch.Generator().manual_seed(11)
    Hq, Hk, Hm = call.heads
    rows_q, rows_k = sum(call.lengths_q), sum(call.lengths_k)
    first = torch.randint(-40, max(call.lengths_q), (Hm, rows_k), generator=generator)
    last = first + torch.randint(-10, max(call.lengths_q) // 4, (Hm, rows_k), generator=generator)
    intervals = torch.stack([first, last], -1).int()
    if not call.packed:
        intervals = torch.stack(intervals.split(call.lengths_k, 1))
    shapes = dict(q=(rows_q, Hq, call.D), k=(rows_k, Hk, call.D), v=(rows_k, Hk, call.Dv), dout=(rows_q, Hq, call.Dv))
    return Mask(intervals), {name: torch.randn(s, generator=generator).to(dtype) for name, s in shapes.items()}


def results(call: Call, mask: Mask, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of every row, packed: [rows, heads, ..], and the gradient of a bias."""
    options = dict(call.options, mask=mask, causal=call.causal, window_size=(call.left, -1), deterministic=True)
    leaves = {name: tensors[name].detach().requires_grad_() for name in "qkv"}
    B, Sq, Sk = len(call.lengths_q), call.lengths_q[0], call.lengths_k[0]
    if call.bias:
        bias = torch.linspace(-1, 1, B * call.heads[0] * Sq * Sk).view(B, call.heads[0], Sq, Sk).to(tensors["q"].dtype)
        leaves["bias"] = options["bias"] = bias.requires_grad_()
    if call.packed:
        starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (call.lengths_q, call.lengths_k)]
        longest = max(call.lengths_q), max(call.lengths_k)
        three = [leaves[name] for name in "qkv"]
        out, lse = flashattn_ext.varlen_forward(*three, *starts, *longest, return_lse=True, **options)
        lse = lse.T
    else:
        three = [leaves[name].unflatten(0, (B, -1)) for name in "qkv"]
        out, lse = flashattn_ext.forward(*three, return_lse=True, **options)
        out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    seeds = [tensors["dout"], torch.linspace(-1, 1, lse.numel()).view(lse.shape)]
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), seeds)
    got = {"out": out.detach(), "lse": lse.detach()[..., None]}
    return got | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def touched(call: Call, mask: Mask, bad: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which rows and heads of each result see one of the bad rows ([rows, heads]) of an input, and which pairs of the bias do."""
    Hq, Hk, Hm = call.heads
    group = Hq // Hk
    sizes = dict(out="q", lse="q", dq="q", dk="k", dv="v")
    touches = {name: torch.zeros_like(bad[like]) for name, like in sizes.items()}
    pairs = []
    intervals = mask.intervals if call.packed else mask.intervals.transpose(0, 1).flatten(1, 2)
    begin_q = begin_k = 0
    for Sq, Sk in zip(call.lengths_q, call.lengths_k, strict=True):
        i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
        rows, keys = slice(begin_q, begin_q + Sq), slice(begin_k, begin_k + Sk)
        begin_q, begin_k = begin_q + Sq, begin_k + Sk
        for h in range(Hq):
            first, last = intervals[h * Hm // Hq, keys].unbind(-1)
            seen = (i >= first) & (i < last)
            if call.causal:
                seen &= j <= i + Sk - Sq
            if call.left >= 0:
                seen &= j >= i + Sk - Sq - call.left
            some = seen.any(1)
            of_q, of_dout = bad["q"][rows, h], bad["dout"][rows, h]
            of_k, of_v = bad["k"][keys, h // group], bad["v"][keys, h // group]
            weights = (of_q & some) | (seen & of_k).any(1)  # of a row: they are NaN
            out = weights | (seen & of_v).any(1)
            scores = (out | of_dout) & some  # their gradients
            touches["lse"][rows, h] |= weights
            touches["out"][rows, h] |= out
            touches["dq"][rows, h] |= scores
            touches["dk"][keys, h // group] |= (seen & scores[:, None]).any(0)
            touches["dv"][keys, h // group] |= (seen & (weights | of_dout)[:, None]).any(0)
            pairs.append(seen & scores[:, None])
    if call.bias:
        touches["dbias"] = torch.stack(pairs).unflatten(0, (len(call.lengths_q), Hq))
    return touches


@functools.lru_cache(maxsize=2)  # of the two dtypes: the tests of a call differ in what is not finite
def clean_results(name: str, dtype: torch.dtype, mode: str) -> dict[str, torch.Tensor]:
    return results(CALLS[name], *draw(CALLS[name], dtype))


def check(name: str, dtype: torch.dtype, where: str, poison: float, mode: str = "") -> None:
    call = CALLS[name]
    mask, tensors = draw(call, dtype)
    clean = clean_results(name, dtype, mode)
    generator = torch.Generator().manual_seed(5)
    bad = {name: torch.zeros(t.shape[:2], dtype=torch.bool) for name, t in tensors.items()}
    for of in INPUTS if where == "all" else [where]:
        rows = torch.randint(len(tensors[of]), (2,), generator=generator)
        bad[of][rows, 0] = True
        tensors[of] = tensors[of].masked_fill(bad[of][..., None], poison)
    got, seen = results(call, mask, tensors), touched(call, mask, bad)
    for of, expected in clean.items():
        assert not seen[of].all(), f"{of}: the case leaves nothing to compare"
        assert_same_bits(got[of][~seen[of]], expected[~seen[of]], of)
        if math.isnan(poison) and not call.options.get("dropout_p"):
            assert not got[of][seen[of]].isfinite().any(), of


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("where", [*INPUTS, "all"])
@pytest.mark.parametrize("name", CALLS)
def test_other_results_keep_their_bits(name: str, where: str, dtype: torch.dtype) -> None:
    check(name, dtype, where, math.nan)


@pytest.mark.parametrize("poison", [math.inf, -math.inf])
@pytest.mark.parametrize("where", INPUTS)
@pytest.mark.parametrize("name", ["intervals", "packed", "softcap"])
def test_an_infinity(name: str, where: str, poison: float) -> None:
    check(name, torch.bfloat16, where, poison)


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["of query heads", "packed", "softcap, dropout", "bias"])
@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode(monkeypatch: pytest.MonkeyPatch, mode: str, name: str, dtype: torch.dtype) -> None:
    monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", mode)
    check(name, dtype, "all", math.nan, mode)


@pytest.mark.parametrize("sizes", [(0, 3, 5), (1, 0, 5), (1, 3, 0)], ids=["no batch", "no rows", "no keys"])
def test_nothing_to_check(sizes: tuple[int, int, int]) -> None:
    B, Sq, Sk = sizes
    mask = Mask(torch.zeros(B, 1, Sk, 2, dtype=torch.int32))
    q, k, v = (torch.ones(B, S, 1, 16, dtype=torch.float16, requires_grad=True) for S in (Sq, Sk, Sk))
    out = flashattn_ext.forward(q, k, v, mask=mask)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out.any() and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("of", ["q", "k", "v"])
@pytest.mark.parametrize("row", [0, 31, 32, 63, 69])
def test_in_one_row_of_a_chunk(row: int, of: str) -> None:
    """The check looks at 32 rows at a time."""
    mask = Mask(torch.tensor([0, 2**31 - 1] * 70).view(1, 1, 70, 2).int())
    mask.intervals[0, 0, row] = 0  # no row sees the key
    tensors = {name: torch.randn(1, 70, 1, 16).half() for name in "qkv"}
    poisoned = {**tensors, of: tensors[of].index_fill(1, torch.tensor([row]), math.nan)}
    got, expected = (flashattn_ext.forward(*each.values(), mask=mask) for each in (poisoned, tensors))
    rows = torch.arange(70) != (row if of == "q" else -1)
    assert_same_bits(got[:, rows], expected[:, rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["intervals", "packed", "wide, one buffer of scores", "softcap, dropout"])
def test_a_hidden_nan_never_reaches_the_cube(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """Mmad must not get a NaN, which may raise an execution error: what hides in v is found before the first product."""
    monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", "nan=refuse")
    call = CALLS[name]
    mask, tensors = draw(call, dtype)
    bad = torch.randint(sum(call.lengths_k), (3,), generator=torch.Generator().manual_seed(7))
    intervals = mask.intervals.clone()
    keys = intervals.flatten(0, -3) if call.packed else intervals.transpose(0, 1).flatten(1, 2)
    keys[:, bad] = 0  # no row sees them
    if not call.packed:
        intervals = torch.stack(keys.split(call.lengths_k, 1))
    options = dict(call.options, mask=Mask(intervals), causal=call.causal, window_size=(call.left, -1))
    sequences = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (call.lengths_q, call.lengths_k)]

    def out(v: torch.Tensor) -> torch.Tensor:
        three = [tensors["q"], tensors["k"], v]
        if call.packed:
            return flashattn_ext.varlen_forward(*three, *sequences, max(call.lengths_q), max(call.lengths_k), **options)
        return flashattn_ext.forward(*(t.unflatten(0, (len(call.lengths_q), -1)) for t in three), **options)

    poisoned = tensors["v"].index_fill(0, bad, math.nan)
    assert_same_bits(out(poisoned), out(tensors["v"]), "out")
    tensors["k"] = tensors["k"].index_fill(0, bad, math.nan)
    with pytest.raises(RuntimeError, match="Mmad: a NaN in B may raise an execution error"):
        out(poisoned)
