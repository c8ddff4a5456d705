"""Block masks through the kernels: against the reference, over whole, partial and hidden blocks, lists of any length, and hostile values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import test_derivatives
import torch
from helpers import Case, assert_same_bits, check, make_inputs, run
from mask_cases import BLOCK_KINDS
from torch import Tensor

import flashattn_ext
from flashattn_ext import BlockMask, Mask

pytestmark = pytest.mark.no_emulator  # the Ascend C kernels have no block masks: tests/api/test_block_mask_calls.py


@pytest.mark.every_isa
@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_every_constructor(device: str, dtype: torch.dtype, kind: str, causal: bool) -> None:
    case = Case(
        dtype=dtype, Sq=280, Sk=300, Hq=4, Hk=2, D=16, Dv=16, mask=kind, mask_heads="q", causal=causal, use_lse=True,
        max_logits=True,
    )  # fmt: skip
    check(case, device)


@pytest.mark.parametrize("heads", ["1", "k", "q"])
@pytest.mark.parametrize("D,Dv", [(1, 3), (64, 64), (96, 128), (256, 256)])
def test_heads_and_head_dims(device: str, dtype: torch.dtype, heads: str, D: int, Dv: int) -> None:
    check(
        Case(
            dtype=dtype, Sq=200, Sk=290, Hq=4, Hk=2, D=D, Dv=Dv, mask="block_pairs", mask_heads=heads, mask_batch=False
        ),
        device,
    )


@pytest.mark.every_isa
@pytest.mark.parametrize("Sq,Sk", [(1, 1), (1, 300), (127, 129), (129, 64), (64, 257), (300, 16), (40, 0), (0, 40)])
@pytest.mark.parametrize("kind", ["block_pairs", "block_halves", "block_and"])
def test_edges_of_blocks(device: str, dtype: torch.dtype, Sq: int, Sk: int, kind: str) -> None:
    check(Case(dtype=dtype, Sq=Sq, Sk=Sk, D=16, Dv=16, mask=kind, use_lse=True, seed=Sq + Sk), device)


@pytest.mark.every_isa
@pytest.mark.parametrize(
    "options",
    [
        dict(window_size=(100, 10)),
        dict(smooth_softmax=True),
        dict(sink_dtype=torch.float32, causal=True),
        dict(softmax_scale=-0.3),
        dict(softcap=3.0, causal=True),
        dict(alibi="heads"),
        dict(relative=40, causal=True),
        dict(bias="q", bias_dtype=torch.float32),
        dict(dropout_p=0.3, rng_seed=5, origin=(2, 3)),
        dict(dropout_p=0.3, rng_seed=5, softcap=3.0, bias="bhq", bias_hides=0.2),
    ],
    ids=lambda options: "-".join(options),
)
def test_with_other_options(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(
        Case(dtype=dtype, Sq=140, Sk=270, Hq=4, Hk=2, D=16, Dv=16, mask="block_pairs", use_lse=True, seed=1, **options),
        device,
    )


@pytest.mark.every_isa
@pytest.mark.parametrize("options", [{}, dict(causal=True, softcap=2.0, alibi="heads")], ids=["plain", "general"])
@pytest.mark.parametrize("kind", ["block_pairs", "block_router"])
def test_derivatives_over_several_blocks(device: str, dtype: torch.dtype, kind: str, options: dict[str, Any]) -> None:
    case = Case(
        dtype=dtype, B=1, Sq=140, Sk=270, Hq=4, Hk=2, D=16, Dv=16, mask=kind, mask_heads="q", use_lse=True, **options
    )
    test_derivatives.check(case, device)


def some_rows(device: str, dtype: torch.dtype, S: int, heads: int = 2) -> list[Tensor]:
    return [torch.randn(1, S, heads, 16, device=device).to(dtype).requires_grad_() for _ in range(3)]


def test_a_long_row_of_blocks_and_rows_of_none(device: str, dtype: torch.dtype) -> None:
    """Block rows of 0, 1 and all blocks, in any order of heads: a block of dq has one, two, or ten parts."""
    S = 10 * 128 - 5
    visible = torch.zeros(1, 2, 10, 10, dtype=torch.bool)
    visible[0, 0, 3], visible[0, 0, :, 7], visible[0, 1, 9, 0], visible[0, 1, 0, 9] = True, True, True, True
    mask = BlockMask.from_blocks(visible, S, S).to(device)
    q, k, v = some_rows(device, dtype, S)
    out, lse = flashattn_ext.forward(q, k, v, mask=mask, return_lse=True)
    empty = ~mask.dense().any(3).cpu()
    assert empty[0, 1].sum() == S - 128 - 123 and not empty[0, 0].any()
    assert (out.transpose(1, 2)[empty.to(device)] == 0).all() and torch.equal(lse.isneginf().cpu(), empty)
    bias = torch.where(mask.dense(), 0.0, -math.inf).to(dtype)
    expected = flashattn_ext.forward(q, k, v, bias=bias)
    dout = torch.randn_like(out)
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-4
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for got, ref in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(got, ref, rtol=tolerance, atol=tolerance)


@pytest.mark.dtypes("float32", "bfloat16")
def test_the_bits_do_not_depend_on_the_number_of_threads(device: str, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, B=1, Sq=600, Sk=600, Hq=4, Hk=1, mask="block_pairs", mask_heads="q", alibi="heads")
    inputs = make_inputs(case, device)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(run(case, inputs))
    torch.set_num_threads(threads)
    assert_same_bits(results[0].out, results[1].out, "out")
    for name, gradient in results[0].grads.items():
        if device == "cpu":
            assert_same_bits(gradient, results[1].grads[name], f"d{name}")


def test_a_mask_of_everything_is_no_mask(device: str, dtype: torch.dtype) -> None:
    q, k, v = some_rows(device, dtype, 300)
    whole = BlockMask.from_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool, device=device), 300, 300)
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
    for options in ({}, {"causal": True}):
        out = flashattn_ext.forward(q, k, v, mask=whole, **options)
        torch.testing.assert_close(out, flashattn_ext.forward(q, k, v, **options), rtol=tolerance, atol=tolerance)


def test_the_blocks_of_a_mask_are_the_mask(device: str, dtype: torch.dtype) -> None:
    q, k, v = some_rows(device, dtype, 300)
    mask = Mask.documents(torch.arange(300, device=device)[None] // 90)
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
    expected = flashattn_ext.forward(q, k, v, mask=mask, causal=True)
    out = flashattn_ext.forward(q, k, v, mask=BlockMask.from_mask(mask, 300), causal=True)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


POISON = [math.nan, math.inf, -math.inf]


@pytest.mark.every_isa
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["plain", "general"])
def test_hidden_values_reach_no_result(device: str, dtype: torch.dtype, poison: float, softcap: float) -> None:
    """Keys that no row sees, of a hidden block and of a partial one, and rows that see no key."""
    S = 300
    visible = torch.rand(1, 2, S, S, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[..., 128:256], visible[..., 7] = False, False  # a column of hidden blocks, and a key of the others
    visible[:, :, 20], visible[:, :, 256:] = False, False
    mask = BlockMask.from_dense(visible).to(device)
    hidden_keys, hidden_rows = [7, *range(128, 256)], [20, *range(256, S)]
    q, k, v = some_rows(device, dtype, S)
    dout = torch.randn(1, S, 2, 16, device=device).to(dtype)

    def results() -> list[Tensor]:
        out, lse = flashattn_ext.forward(q, k, v, mask=mask, softcap=softcap, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]

    clean = results()
    with torch.no_grad():
        for t in (k, v):
            t[:, hidden_keys] = poison
        for t in (q, dout):
            t[:, hidden_rows] = poison
    for name, got, ref in zip(("out", "lse", "dq", "dk", "dv"), results(), clean, strict=True):
        assert_same_bits(got, ref, name)
    assert (clean[0][:, hidden_rows] == 0).all() and (clean[2][:, hidden_rows] == 0).all()
    assert (clean[3][:, hidden_keys] == 0).all() and (clean[4][:, hidden_keys] == 0).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("poison", POISON)
def test_a_value_reaches_those_who_see_it_alone(device: str, dtype: torch.dtype, poison: float) -> None:
    visible = torch.rand(1, 1, 150, 150, generator=torch.Generator().manual_seed(2)) < 0.5
    mask = BlockMask.from_dense(visible).to(device)
    q, k, v = some_rows(device, dtype, 150)
    clean = flashattn_ext.forward(q, k, v, mask=mask)
    with torch.no_grad():
        v[:, 40] = poison
    out = flashattn_ext.forward(q, k, v, mask=mask)
    sees = visible[0, 0, :, 40].to(device)
    assert_same_bits(out[:, ~sees], clean[:, ~sees], "rows that do not see the value")
    assert not out[:, sees].isfinite().any()


@pytest.mark.dtypes("float32", "float64")
def test_gradients_of_hidden_pairs_are_zero(device: str, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, Sq=150, Sk=280, mask="block_pairs", bias="bhq", use_lse=True)
    inputs = make_inputs(case, device)
    assert isinstance(inputs.mask, BlockMask)
    of_bias = run(case, inputs).grads["bias"]
    visible = inputs.mask.dense().expand(of_bias.shape)
    assert (of_bias[~visible] == 0).all() and (of_bias[visible] != 0).double().mean() > 0.99
