"""The forward pass on named shapes: its results, and their error against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import HEAD_DIMS, Case, assert_same_bits, assert_within_rule, check, make_inputs

import flashattn_ext

NO_GRAD = ()


@pytest.mark.every_isa
@pytest.mark.parametrize("Sq,Sk", [(1, 1), (1, 1000), (64, 64), (128, 257), (300, 77)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_forward_of_every_length_is_exact(device: str, dtype: torch.dtype, Sq: int, Sk: int, causal: bool) -> None:
    check(Case(dtype=dtype, Sq=Sq, Sk=Sk, causal=causal, D=64, Dv=64, needs_grad=NO_GRAD), device)


@pytest.mark.every_isa
@pytest.mark.parametrize("D,Dv", [*HEAD_DIMS, (7, 7), (100, 100)])
def test_forward_of_every_head_dim_is_exact(device: str, dtype: torch.dtype, D: int, Dv: int) -> None:
    check(Case(dtype=dtype, Sq=66, Sk=70, D=D, Dv=Dv, needs_grad=NO_GRAD), device)


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16")
def test_head_dims_of_every_remainder(device: str, dtype: torch.dtype) -> None:
    for D in range(1, 513, 3):
        check(Case(dtype=dtype, B=1, Sq=3, Sk=5, Hq=1, Hk=1, D=D, Dv=513 - D, needs_grad=NO_GRAD), device)


@pytest.mark.dtypes("float16", "bfloat16")
@pytest.mark.parametrize("D", [320, 512])
@pytest.mark.parametrize(
    "options",
    [
        dict(Sq=129, Sk=65, causal=True),
        dict(Sq=190, Sk=450, window_size=(20, 0)),
        dict(Sq=300, Sk=300, Hq=6, window_size=(-1, 3)),
        dict(lengths_q=(1, 64, 65, 190), lengths_k=(70, 0, 129, 31), sink_dtype=torch.float32),
    ],
    ids=["causal", "window", "groups", "packed"],
)
def test_query_tiles_that_share_their_keys_see_different_ones(
    device: str, dtype: torch.dtype, D: int, options: dict
) -> None:
    """On Hopper two thread blocks load the keys of 128 queries together, and either may see tiles that the other does not."""
    B = len(options.get("lengths_q", (0, 0)))
    check(Case(dtype=dtype, B=B, D=D, Dv=D, needs_grad=NO_GRAD, **options), device)


def test_two_thousand_keys(device: str, dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, B=1, Sq=2048, Sk=2048, D=64, Dv=64, causal=True, needs_grad=NO_GRAD), device)


def test_scale_defaults_to_inverse_root_of_head_dim(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, D=48, Dv=16), device)
    default = flashattn_ext.forward(inputs.q, inputs.k, inputs.v)
    explicit = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, softmax_scale=1 / math.sqrt(48))
    assert torch.equal(default, explicit)


def test_lse_is_returned_on_demand(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, B=3, Sq=5, Sk=9, Hq=4, Hk=2, D=16, Dv=24), device)
    out = flashattn_ext.forward(inputs.q, inputs.k, inputs.v)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (3, 5, 4, 24) and out.dtype == dtype and out.device == inputs.q.device
    both = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert isinstance(both, tuple) and torch.equal(both[0], out)
    assert both[1].shape == (3, 4, 5)


def test_layouts_give_the_same_bits(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, Sq=70, Sk=90, Hq=4, Hk=2), device)
    out, lse = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    swapped = [t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v)]
    out_bhsd, lse_bhsd = flashattn_ext.forward(*swapped, causal=True, layout="bhsd", return_lse=True)
    assert torch.equal(out_bhsd.transpose(1, 2), out)
    assert torch.equal(lse_bhsd, lse)


@pytest.mark.every_isa
def test_extreme_scores_do_not_overflow(device: str, dtype: torch.dtype) -> None:
    big = 200.0 if dtype == torch.float16 else 1e4
    q = torch.full((1, 4, 1, 16), big, device=device, dtype=dtype)
    k = torch.full((1, 70, 1, 16), big, device=device, dtype=dtype)
    k[:, ::2] *= -1
    v = torch.randn(1, 70, 1, 16, device=device).to(dtype)
    for sink in (None, torch.tensor([3.0], device=device), torch.tensor([1e5], device=device)):
        out, lse = flashattn_ext.forward(q, k, v, sink=sink, return_lse=True)
        ref = flashattn_ext.attention_reference(
            q.double(), k.double(), v.double(), sink=None if sink is None else sink.double(), return_lse=True
        )
        plain = flashattn_ext.attention_reference(q.float(), k.float(), v.float(), sink=sink).to(dtype)
        assert_within_rule("out", out, ref[0], plain)
        torch.testing.assert_close(lse.double(), ref[1], rtol=1e-5, atol=1e-3)


def test_scores_far_below_zero_keep_their_relative_weights(device: str, dtype: torch.dtype) -> None:
    """Every score is about -1000: a fixed reference point would underflow to zero."""
    q = torch.full((1, 2, 1, 8), 4.0, device=device, dtype=dtype)
    k = torch.full((1, 90, 1, 8), -32.0, device=device, dtype=dtype)
    v = torch.randn(1, 90, 1, 8, device=device).to(dtype)
    out, lse = flashattn_ext.forward(q, k, v, softmax_scale=1.0, return_lse=True)
    mean = v.double().mean(1, keepdim=True).expand(1, 2, 1, 8)
    assert_within_rule("out", out, mean, mean.to(dtype))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(90) - 1024), rtol=1e-5, atol=0)


@pytest.mark.parametrize("D", [40, 64, 80, 112, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (90, 7)}, {"causal": True, "smooth_softmax": True}],
    ids=["full", "causal", "window", "smooth"],
)
@pytest.mark.parametrize(
    "S", [(600, 600), (512, 512), (256, 256), (230, 230), (197, 197), (224, 256), (256, 200)], ids=str
)
@pytest.mark.parametrize("group", [1, 2])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(
    device: str, D: int, options: dict[str, Any], S: tuple[int, int], group: int
) -> None:
    """On Hopper 8 heads alone have smaller tiles than 320 heads, or another kernel."""
    B = 40 if device.startswith("cuda") else 3
    q = torch.randn(B, S[0], 8, D, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, B, S[1], 8 // group, D, device=device, dtype=torch.bfloat16)
    v[:, 100, 0] = torch.inf
    out, lse = flashattn_ext.forward(q, k, v, return_lse=True, **options)
    alone, lse_alone = flashattn_ext.forward(q[2:3], k[2:3], v[2:3], return_lse=True, **options)
    assert_same_bits(out[2:3], alone)
    assert_same_bits(lse[2:3], lse_alone)
