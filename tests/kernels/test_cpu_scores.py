"""Guarantees of the CPU kernels alone: the same bits for every number of threads, and a tanh as exact as the inputs.

Sizes have several tiles of keys and of queries (128 x 192, or 64 x 64 in fp64).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Case, assert_same_bits, check, make_inputs, run
from torch import Tensor

import flashattn_ext
from flashattn_ext import Mask

SIZES = dict(B=2, Sq=300, Sk=420, Hq=4, Hk=2, D=24, Dv=16)
CASES = {
    "diagonals": Case(**SIZES, alibi="batch", relative=50, causal=True),
    "long relative bias": Case(**SIZES, alibi="heads", relative=1000, softcap=3.0),
    "bias of heads": Case(**SIZES, bias="hq", bias_dtype=torch.float32, bias_hides=0.1),
    "bias of keys": Case(**SIZES, bias="", bias_dtype=torch.float32, causal=True),
    "bias of scores": Case(**SIZES, bias="bhq", softcap=2.0, softmax_scale=-0.3),
    # Each head sees other tiles, and heads alternate in the tiles that are fully masked for them, too.
    "masked shared bias": Case(**SIZES, bias="q", bias_dtype=torch.float32, mask="and", mask_heads="q", use_lse=True),
    "masked": Case(**SIZES, mask="documents", causal=True, dropout_p=0.3, rng_seed=1, sink_dtype=torch.float32),
    "packed": Case(
        lengths_q=(130, 0, 7, 300), lengths_k=(300, 3, 7, 130), mask="intervals", mask_heads="k", relative=20, Hq=4
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(isa: str, dtype: torch.dtype, name: str) -> None:
    check(replace(CASES[name], dtype=dtype), "cpu")


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_thread_count(isa: str, name: str, restore_threads: None) -> None:
    inputs = make_inputs(CASES[name], "cpu")
    torch.set_num_threads(1)
    expected = run(CASES[name], inputs)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        got = run(CASES[name], inputs)
        assert_same_bits(got.out, expected.out, "out")
        for leaf, grad in expected.grads.items():
            assert_same_bits(got.grads[leaf], grad, f"d{leaf}")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 6e-7), (torch.float64, 4e-15)], ids=["float32", "float64"]
)
def test_capped_scores_are_exact_for_small_and_large_arguments(isa: str, dtype: torch.dtype, tolerance: float) -> None:
    """With one key the log-sum-exp is its logit."""
    sizes = torch.logspace(-6, 3, 1000, dtype=torch.float64)
    products = torch.cat([-sizes, sizes]).to(dtype)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    q = products.view(1, -1, 1, 1)
    _, lse = flashattn_ext.forward(q, one, one, softmax_scale=1.0, softcap=30.0, return_lse=True)
    expected = 30 * torch.tanh(products.double() / 30)
    error = ((lse.flatten().double() - expected) / expected).abs().max().item()
    assert error <= tolerance, f"relative error {error:.2e}"


def document_gradients(tensors: list[Tensor], dout: Tensor, mask: Mask, softcap: float) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    causal = softcap == 0
    out, lse = flashattn_ext.forward(*leaves, causal=causal, mask=mask, softcap=softcap, return_lse=True)
    return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["causal", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_what_a_document_holds_stays_in_it(isa: str, dtype: torch.dtype, softcap: float, poison: float) -> None:
    lengths = torch.tensor([70, 131, 5, 94])
    ids = torch.repeat_interleave(torch.arange(4), lengths)[None]
    mask = Mask.documents(ids)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 300, heads, 32, generator=generator).to(dtype) for heads in (2, 1, 1)]
    dout = torch.randn(1, 300, 2, 32, generator=generator).to(dtype)
    clean = document_gradients(tensors, dout, mask, softcap)
    inside = ids[0] == 1
    for t in (*tensors, dout):
        t[:, inside] = poison
    got = document_gradients(tensors, dout, mask, softcap)
    assert not got[0][:, inside].isfinite().any()
    for name, x, expected in zip(("out", "lse", "dq", "dk", "dv"), got, clean, strict=True):
        assert_same_bits(x[:, ~inside], expected[:, ~inside], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("Sq,Sk", [(16, 64), (25, 196), (64, 64), (33, 300)])
def test_the_gradient_of_a_relative_bias_leaves_that_of_a_bias_of_keys(
    isa: str, dtype: torch.dtype, Sq: int, Sk: int
) -> None:
    """Query 0 alone sees nearly all keys, so that most lanes of their sums are 0. The reach exceeds all distances."""
    keys = torch.arange(Sk)
    mask = Mask(torch.stack([0 * keys, torch.where(keys % 16 == 5, Sq, 1)], -1).int()[None, None])
    q, k, v, dout = (torch.randn(1, length, 2, 16, dtype=dtype) for length in (Sq, Sk, Sk, Sq))
    relative_bias, bias = torch.randn(2, 801, dtype=torch.float64).to(dtype), torch.randn(1, 1, 1, Sk, dtype=dtype)
    found = []
    for needs_relative in (True, False):
        leaves = [bias.clone().requires_grad_(), relative_bias.clone().requires_grad_(needs_relative)]
        out = flashattn_ext.forward(q, k, v, mask=mask, bias=leaves[0], relative_bias=leaves[1])
        found.append(torch.autograd.grad(out, leaves[: 1 + needs_relative], dout)[0])
    assert found[0].abs().min() > 0
    assert_same_bits(found[0], found[1])
