"""The backward pass: gradients against the reference, through out and through lse, and the raw `backward` function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import HEAD_DIMS, NARROW_V, Case, assert_same_bits, check, cotangents, make_inputs, measure

import flashattn_ext


@pytest.mark.every_isa
@pytest.mark.parametrize("Sq,Sk", [(1, 1), (1, 200), (64, 64), (65, 129), (200, 1), (257, 130)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_of_every_length_are_exact(device: str, dtype: torch.dtype, Sq: int, Sk: int, causal: bool) -> None:
    check(Case(dtype=dtype, Sq=Sq, Sk=Sk, causal=causal, D=64, Dv=64), device)


@pytest.mark.every_isa
@pytest.mark.parametrize("D,Dv", [*HEAD_DIMS, (7, 9), (100, 36)])
def test_gradients_of_every_head_dim_are_exact(device: str, dtype: torch.dtype, D: int, Dv: int) -> None:
    check(Case(dtype=dtype, Sq=66, Sk=70, D=D, Dv=Dv), device)


@pytest.mark.parametrize("D,Dv", NARROW_V)
@pytest.mark.parametrize(
    "options",
    [
        dict(Sq=257, Sk=300, Hq=4, causal=True, views=("packed", "transposed", "expanded")),
        dict(Sq=200, Sk=330, Hq=6, window_size=(70, 30), layout="bhsd"),
        dict(lengths_q=(150, 1, 260), lengths_k=(170, 33, 300), Hq=4, causal=True, use_lse=True),
        dict(Sq=130, Sk=257, sink_dtype=torch.float32, views=("offset", "padded", "strided_last")),
        dict(Sq=130, Sk=200, dropout_p=0.2, rng_seed=5),
        dict(Sq=130, Sk=200, mask="documents", causal=True),
    ],
    ids=["groups", "window", "packed", "sink", "dropout", "mask"],
)
def test_v_with_fewer_columns_than_q_and_k(device: str, dtype: torch.dtype, D: int, Dv: int, options: dict) -> None:
    """Latent attention has head dims like these. Hopper has dedicated kernels for plain calls with some of them."""
    check(Case(dtype=dtype, D=D, Dv=Dv, **options), device)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_grouped_query_heads(device: str, dtype: torch.dtype, groups: int) -> None:
    check(Case(dtype=dtype, Sq=70, Sk=90, Hq=3 * groups, Hk=3, causal=True), device)


@pytest.mark.parametrize("Sk", [40, 64, 65, 128, 129])
def test_keys_at_the_edges_of_two_thread_blocks(device: str, dtype: torch.dtype, Sk: int) -> None:
    """On Hopper two thread blocks have 64 keys each at this head dim, and exchange their dS."""
    check(Case(dtype=dtype, Sq=130, Sk=Sk, Hq=4, Hk=2, D=256, Dv=256), device)


def test_a_long_sequence(device: str, dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, B=1, Sq=1024, Sk=1024, D=64, Dv=64, causal=True), device)


def test_gradient_through_lse_alone(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, Sq=40, Sk=70), device)
    _, lse = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), [inputs.q, inputs.k, inputs.v], allow_unused=True)
    leaves = [t.detach().double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    _, lse_ref = flashattn_ext.attention_reference(*leaves, return_lse=True)
    dq_ref, dk_ref = torch.autograd.grad(lse_ref.sum(), leaves[:2])
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(dq.double(), dq_ref, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dk.double(), dk_ref, rtol=tolerance, atol=tolerance)
    assert dv is None or not dv.any()


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("sink",), ("q", "v"), ("k", "sink")], ids="+".join)
def test_only_some_inputs_need_a_gradient(device: str, dtype: torch.dtype, wanted: tuple[str, ...]) -> None:
    check(Case(dtype=dtype, needs_grad=wanted, sink_dtype=torch.float32, use_lse=True), device)


def test_no_graph_without_gradients(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype), device)
    with torch.no_grad():
        out, lse = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("kind", ["expanded", "transposed", "zero_stride"])
def test_layout_of_the_incoming_gradient(device: str, dtype: torch.dtype, kind: str) -> None:
    """out.sum() sends a gradient whose strides are all 0; others send transposed or expanded ones."""
    inputs = make_inputs(Case(dtype=dtype, Sq=40, Sk=50), device)
    out = flashattn_ext.forward(inputs.q, inputs.k, inputs.v)
    dout = {
        "expanded": torch.randn(1, *out.shape[1:], device=device).to(dtype).expand_as(out),
        "transposed": torch.randn(out.transpose(1, 2).shape, device=device).to(dtype).transpose(1, 2),
        "zero_stride": torch.ones((), device=device, dtype=dtype).expand_as(out),
    }[kind]
    leaves = [inputs.q, inputs.k, inputs.v]
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    expected = torch.autograd.grad(out, leaves, dout.contiguous())
    for name, a, b in zip("qkv", got, expected, strict=True):
        assert_same_bits(a, b, f"d{name}")


@pytest.mark.every_isa
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_raw_backward_equals_autograd(device: str, dtype: torch.dtype, varlen: bool) -> None:
    lengths = dict(lengths_q=(20, 45), lengths_k=(33, 64)) if varlen else {}
    case = Case(dtype=dtype, Sq=45, Sk=64, causal=True, dropout_p=0.2, rng_seed=11, sink_dtype=torch.float32, **lengths)
    inputs = make_inputs(case, device)
    function = flashattn_ext.varlen_forward if varlen else flashattn_ext.forward
    shared = {**inputs.cu_seqlens, **inputs.max_seqlens, **case.options(), "sink": inputs.sink}
    out, lse = function(inputs.q, inputs.k, inputs.v, **shared, return_lse=True)
    dout, _ = cotangents(case, out, lse)
    expected = torch.autograd.grad(out, [inputs.q, inputs.k, inputs.v, inputs.sink], dout)
    with torch.no_grad():
        got = flashattn_ext.backward(dout, inputs.q, inputs.k, inputs.v, out, lse, **shared)
    for name, a, b in zip(("dq", "dk", "dv", "dsink"), got, expected, strict=True):
        assert_same_bits(a, b, name)


def test_raw_backward_without_sink_returns_none(device: str) -> None:
    q = torch.randn(1, 4, 2, 8, device=device)
    out, lse = flashattn_ext.forward(q, q, q, return_lse=True)
    dq, dk, dv, dsink = flashattn_ext.backward(torch.ones_like(out), q, q, q, out, lse)
    assert dq.shape == dk.shape == dv.shape == q.shape
    assert dsink is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_row_of_one_key_has_no_dq(isa: str, dtype: torch.dtype) -> None:
    """Its weight is 1 whatever q is. delta from a rounded `out`, and dP summed in another order, leave 5e-5 of large values: so it is in the
    other backends, which take delta from `out`.
    """
    for head_dim, dropout_p in ((1, 0.5), (64, 0.0), (257, 0.75)):
        q = torch.randn(50, 7, 2, head_dim).to(dtype).requires_grad_()
        k, v = torch.randn(50, 1, 2, head_dim).to(dtype), torch.randn(50, 1, 2, 255).to(dtype)
        out = flashattn_ext.forward(q, k, v, dropout_p=dropout_p, rng_seed=5)
        (dq,) = torch.autograd.grad(out, q, torch.randn_like(out))
        assert dq.abs().max() <= 1e-5, f"head_dim {head_dim}"  # section 4's bound where plain PyTorch is exact


FAR = {
    "far keys": Case(Sq=140, Sk=900, Hq=4, Hk=2, use_lse=True),
    "documents": Case(B=1, Sq=300, Sk=900, Hq=4, Hk=1, D=64, Dv=64, causal=True, mask="documents", use_lse=True),
    "sink": Case(Sq=200, Sk=260, Hq=2, causal=True, sink_dtype=torch.float32, use_lse=True),
    "smooth, dropout": Case(Sq=100, Sk=300, smooth_softmax=True, dropout_p=0.2, rng_seed=3),
    "packed": Case(lengths_q=(70, 5, 130), lengths_k=(300, 40, 131), use_lse=True),
    "few keys": Case(Sq=129, Sk=2, Hk=1, D=99, Dv=99, softcap=0.3),
}


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "float16", "bfloat16")
@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("bias", ["alibi_slopes", "relative_bias"])
def test_sums_over_rows_of_far_keys(device: str, dtype: torch.dtype, name: str, bias: str) -> None:
    """Every dS of a row has the error of <dout, out>, which sums over rows multiply by the mean distance of the row's keys (csrc/rules/bias.h)."""
    backend = flashattn_ext._C.forced_backend() or device
    if backend.startswith(("ascend", "npu")) or (dtype == torch.float32 and backend != "cpu"):
        return  # these keep no centres of rows: tests/helpers.py has the bounds
    biases = {"alibi": "batch"} if bias == "alibi_slopes" else {"relative": 5}
    case = replace(FAR[name], dtype=dtype, **biases)
    errors = [measure(replace(case, seed=seed), device)[f"d{bias}"] for seed in range(5)]
    # The floor of fp32 allows every dS an error of 1e-5, which is as large as the error without centres.
    floors = 0.1 if dtype == torch.float32 else 1.0
    assert sum(e.got for e in errors) <= sum(1.2 * e.plain + floors * e.floor for e in errors), errors


@pytest.mark.every_isa
@pytest.mark.dtypes("float32")
def test_products_over_wide_heads_are_sums_of_short_sums(device: str, dtype: torch.dtype) -> None:
    """The rounding error of dP, a sum over the columns of V, grows in proportion to the length of one sum."""
    case = Case(
        dtype=dtype, Sq=7, Sk=31, Hq=9, Hk=3, D=17, Dv=355, causal=True, window_size=(24, 36), mask="flashmask", dropout_p=0.5,
        rng_seed=5136777, origin=(1, 1), views=("expanded", "plain", "plain"), needs_grad=("q",), use_lse=True,
    )  # fmt: skip
    check(case, device)
