"""softcap, slopes and biases as arguments of the public functions: results, their shapes and dtypes, and their cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import Case, allocated_bytes, check, cu_seqlens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn_ext

NAMES = ("alibi_slopes", "relative_bias", "bias")


def qkv(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, 33, 4, 16, device=device).to(dtype).requires_grad_() for _ in range(3))  # type: ignore


def biases(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"alibi_slopes": (2, 4), "relative_bias": (4, 9), "bias": (1, 4, 1, 33)}
    made = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    made["bias"] = made["bias"].to(dtype)
    return {name: t.requires_grad_() for name, t in made.items()}


@pytest.mark.dtypes("float32", "bfloat16")
def test_the_raw_backward_returns_what_autograd_does(device: str, dtype: torch.dtype) -> None:
    inputs, given = qkv(device, dtype), biases(device, dtype)
    sink = torch.randn(4, device=device, requires_grad=True)
    out, lse = flashattn_ext.forward(*inputs, **given, sink=sink, softcap=2.0, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad([out, lse], [*inputs, sink, *given.values()], [dout, dlse])
    with torch.no_grad():
        got = flashattn_ext.backward(dout, *inputs, out, lse, dlse=dlse, **given, sink=sink, softcap=2.0)
    assert len(got) == 7
    # Autograd also keeps the centres of rows (csrc/rules/bias.h), which the gradients of slopes and of the relative bias use.
    names = ("dq", "dk", "dv", "dsink", "dalibi_slopes", "drelative_bias", "dbias")
    for name, a, b in zip(names, got, expected, strict=True):
        takes_centres = name in ("dalibi_slopes", "drelative_bias")
        bound = 1e-4 if dtype == torch.float32 else 3e-2
        # It keeps the log-sum-exp in two words, too: those of lse alone round a log-sum-exp of 100 by 4e-6.
        close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 and a.device.type == "cuda" else {}
        torch.testing.assert_close(a, b, **(dict(rtol=bound, atol=bound) if takes_centres else close))


@pytest.mark.parametrize("name", NAMES)
def test_the_raw_backward_of_one_bias(device: str, name: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    given = {name: biases(device)[name].detach()}
    out, lse = flashattn_ext.forward(q, k, v, **given, return_lse=True)
    got = flashattn_ext.backward(out, q, k, v, out, lse, **given)
    assert [t is not None for t in got] == [True, True, True, False, *(name == other for other in NAMES)]
    assert len(flashattn_ext.backward(out, q, k, v, out, lse, softcap=0.0)) == 4


class Backwards(TorchDispatchMode):
    """Records for every backward which gradients of biases were requested and which were computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[bool, ...], tuple[bool, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.flashattn_ext.backward.default:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=True))
            needs = tuple(named[f"needs_d{name}"] for name in NAMES)
            self.seen.append((needs, tuple(t.numel() > 0 for t in results[4:])))
        return results


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_not_required_are_not_computed(device: str, name: str) -> None:
    inputs = qkv(device)
    given = {other: t.detach().requires_grad_(other == name) for other, t in biases(device).items()}
    with Backwards() as backwards:
        out = flashattn_ext.forward(*inputs, **given)
        torch.autograd.grad(out.sum(), [inputs[0], given[name]])
    wanted = tuple(name == other for other in NAMES)
    assert backwards.seen == [(wanted, wanted)]


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.dtypes("bfloat16")
def test_gradients_have_shapes_and_dtypes_of_their_inputs(
    device: str, dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    inputs = qkv(device, dtype)
    for shape in ((2, 4, 33, 33), (1, 4, 33, 33), (1, 1, 1, 33)):
        bias = torch.randn(shape, device=device).to(bias_dtype).requires_grad_()
        relative = torch.randn(4, 5, device=device).half().requires_grad_()
        out = flashattn_ext.forward(*inputs, bias=bias, relative_bias=relative)
        grads = torch.autograd.grad(out.float().square().sum(), [bias, relative])
        assert [(g.shape, g.dtype) for g in grads] == [(bias.shape, bias_dtype), (relative.shape, torch.float16)]


@pytest.mark.dtypes("float64")
def test_fp64_calls_take_fp32_biases(device: str, dtype: torch.dtype) -> None:
    inputs, given = qkv(device, dtype), biases(device)
    out = flashattn_ext.forward(*inputs, **given)
    expected = flashattn_ext.attention_reference(*inputs, **given)
    torch.testing.assert_close(out, expected)
    results = [torch.autograd.grad(o.square().sum(), list(given.values())) for o in (out, expected)]
    for got, ref in zip(*results, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, ref)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced", "strided"])
def test_a_bias_is_read_by_its_strides(device: str, kind: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    bias = torch.randn(2, 4, 33, 33, device=device)
    view = {
        "expanded": lambda: bias[:1, :, :1].expand(2, 4, 33, 33),
        "transposed": lambda: bias.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": lambda: torch.nn.functional.pad(bias, (3, 5), value=math.nan)[..., 3:-5],
        "strided": lambda: bias.transpose(-1, -2),
    }[kind]()
    results = []
    for given in (view, view.contiguous()):
        given = given.detach().requires_grad_()
        out = flashattn_ext.forward(q, k, v, bias=given)
        results.append((out, *torch.autograd.grad(out.square().sum(), given)))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_an_expanded_bias_is_not_copied() -> None:
    q = torch.randn(2, 512, 2, 16)
    bias = torch.randn(1, 1, 1, 512).expand(2, 2, 512, 512)
    in_memory = bias.contiguous()  # the workspace of a call depends on the number of threads
    needed = allocated_bytes(lambda: flashattn_ext.forward(q, q, q, bias=in_memory))
    assert allocated_bytes(lambda: flashattn_ext.forward(q, q, q, bias=bias)) < needed + bias.numel()


def test_rows_that_a_bias_hides_see_nothing(device: str) -> None:
    inputs = qkv(device)
    bias = torch.randn(2, 4, 33, 33, device=device)
    bias[:, 1, 7] = -math.inf
    bias.requires_grad_()
    out, lse = flashattn_ext.forward(*inputs, bias=bias, return_lse=True)
    assert not out[:, 7, 1].any() and (lse[:, 1, 7] == -math.inf).all()
    grads = torch.autograd.grad(out.square().sum(), [*inputs, bias])
    assert all(torch.isfinite(g).all() for g in grads)
    assert not grads[0][:, 7, 1].any() and not grads[3][:, 1, 7].any()
    sink = torch.randn(4, device=device)
    out, lse = flashattn_ext.forward(*inputs, bias=bias, sink=sink, return_lse=True)
    assert not out[:, 7, 1].any()
    torch.testing.assert_close(lse[:, 1, 7], sink[1].expand(2))


LARGE_CAPS = [1000.0, 1001.0, 3e4, 1e8, 1e17, 1e30]


@pytest.mark.every_isa
@pytest.mark.parametrize("softcap", LARGE_CAPS)
def test_large_softcap(device: str, dtype: torch.dtype, softcap: float) -> None:
    """The cap multiplied the error of the tanh: in 16 bits the error of lse was 1e-3 at a cap of 3e4 and 1 at 1e8."""
    check(Case(dtype=dtype, Sq=20, Sk=70, D=16, Dv=16, causal=True, softmax_scale=2.0, softcap=softcap), device)


@pytest.mark.parametrize("softcap", [2.0**60, 1e30, 3.2e38, 1e300])
def test_softcap_above_every_score_is_off(device: str, dtype: torch.dtype, softcap: float) -> None:
    """It does not overflow, in the reference either."""
    q, k, v = qkv(device, dtype)
    for function in (flashattn_ext.forward, flashattn_ext.attention_reference):
        out, lse = function(q, k, v, softcap=softcap, return_lse=True)
        expected = function(q, k, v, return_lse=True)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    q, k = (torch.randn(1, 9, 1, 16, dtype=torch.float64) * 1e3 for _ in "qk")
    below = flashattn_ext.attention_reference(q, k, k, softcap=2.0**60 * (1 - 2**-53))
    assert torch.equal(below, flashattn_ext.attention_reference(q, k, k))


def test_no_softcap_has_the_bits_of_a_call_without(device: str) -> None:
    q, k, v = qkv(device)
    assert torch.equal(flashattn_ext.forward(q, k, v, softcap=0.0), flashattn_ext.forward(q, k, v))


@pytest.mark.dtypes("bfloat16", "float16")
def test_autocast_casts_a_bias_of_16_bits_and_leaves_float32(device: str, dtype: torch.dtype) -> None:
    inputs, given = qkv(device), biases(device)
    others = {torch.float32, torch.float16, torch.bfloat16}
    with torch.autocast(device, dtype=dtype):
        for bias_dtype in others:
            bias = given["bias"].detach().to(bias_dtype)
            out = flashattn_ext.forward(*inputs, **{**given, "bias": bias})
            expected = bias if bias_dtype == torch.float32 else bias.to(dtype)
            with torch.autocast(device, enabled=False):
                cast = [t.to(dtype) for t in inputs]
                assert torch.equal(out, flashattn_ext.forward(*cast, **{**given, "bias": expected}))


def test_packed_sequences_have_slopes_of_their_own(device: str) -> None:
    q = torch.randn(40, 4, 16, device=device)
    starts, slopes = cu_seqlens([15, 0, 25], device), torch.rand(3, 4, device=device)
    relative = torch.randn(4, 9, device=device)
    out = flashattn_ext.varlen_forward(
        q, q, q, starts, starts, 25, 25, alibi_slopes=slopes, relative_bias=relative, softcap=3.0
    )
    for b, rows in ((0, slice(0, 15)), (2, slice(15, 40))):
        x = q[None, rows]
        alone = flashattn_ext.forward(x, x, x, alibi_slopes=slopes[b], relative_bias=relative, softcap=3.0)
        assert torch.equal(out[rows], alone[0])
