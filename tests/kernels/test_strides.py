"""Any strides: results do not depend on how the inputs lie in memory, and views are read in place."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import VIEWS, Case, allocated_bytes, assert_same_bits, check, make_inputs, run, strided_view

import flashattn_ext


@pytest.mark.every_isa
@pytest.mark.parametrize(
    "views", [(kind,) * 3 for kind in VIEWS] + [("packed", "expanded", "strided_last")], ids="-".join
)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_views_against_the_reference(
    device: str, dtype: torch.dtype, views: tuple[str, str, str], varlen: bool
) -> None:
    lengths = dict(lengths_q=(20, 33), lengths_k=(40, 17)) if varlen else {}
    check(Case(dtype=dtype, Sq=40, Sk=65, D=24, Dv=40, views=views, causal=True, **lengths), device)


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_strides_do_not_change_a_bit(device: str, dtype: torch.dtype, layout: str) -> None:
    case = Case(dtype=dtype, Sq=70, Sk=65, D=24, Dv=40, layout=layout, causal=True)
    plain = make_inputs(case, device)
    expected = run(case, plain)
    for kind, which in itertools.product(("transposed", "packed", "padded", "offset", "strided_last"), "qkv"):
        inputs = make_inputs(case, device)
        setattr(inputs, which, strided_view(getattr(plain, which).detach(), kind).requires_grad_())
        got = run(case, inputs)
        assert_same_bits(got.out, expected.out, f"out for a {kind} {which}")
        for name in "qkv":
            assert_same_bits(got.grads[name], expected.grads[name], f"d{name} for a {kind} {which}")


def test_gradients_reach_the_packed_tensor(device: str) -> None:
    """One qkv projection, sliced: its gradient holds dq, dk and dv side by side."""
    qkv = torch.randn(2, 33, 3, 2, 16, device=device, requires_grad=True)
    flashattn_ext.forward(*qkv.unbind(2)).sum().backward()
    parts = [t.detach().contiguous().requires_grad_() for t in qkv.unbind(2)]
    flashattn_ext.forward(*parts).sum().backward()
    assert_same_bits(qkv.grad, torch.stack([p.grad for p in parts], 2))


def test_gradient_of_an_expanded_batch_is_summed(device: str) -> None:
    q = torch.randn(3, 20, 2, 16, device=device)
    k = torch.randn(1, 30, 2, 16, device=device, requires_grad=True)
    v = torch.randn(1, 30, 2, 16, device=device, requires_grad=True)
    flashattn_ext.forward(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1)).sum().backward()
    dk, dv = k.grad, v.grad
    k.grad = v.grad = None
    flashattn_ext.forward(q, k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1)).sum().backward()
    torch.testing.assert_close(dk, k.grad)
    torch.testing.assert_close(dv, v.grad)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_output_has_the_layout_of_q_and_is_contiguous(device: str, layout: str) -> None:
    inputs = make_inputs(Case(Sq=20, Sk=30, D=8, Dv=12, layout=layout, views=("transposed",) * 3), device)
    out = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, layout=layout)
    assert out.shape == (*inputs.q.shape[:-1], 12) and out.is_contiguous()


@pytest.mark.parametrize("kind", ["transposed", "packed", "padded", "expanded"])
def test_views_are_not_copied(kind: str) -> None:
    """The largest block that a call on a view allocates stays far below one input."""
    case = Case(B=4, Sq=512, Sk=512, Hq=4, Hk=4, D=64, Dv=64, views=("plain", kind, kind), needs_grad=())
    inputs = make_inputs(case, "cpu")
    input_bytes = inputs.k.numel() * inputs.k.element_size()
    contiguous = [t.contiguous() for t in (inputs.q, inputs.k, inputs.v)]
    in_place = allocated_bytes(lambda: flashattn_ext.forward(inputs.q, inputs.k, inputs.v))
    assert in_place - allocated_bytes(lambda: flashattn_ext.forward(*contiguous)) < input_bytes // 2


# Incoming gradients of sum(), of a mean over heads or rows, and of a loss on a transposed result.
GRADIENTS = {
    "one number": lambda t: torch.full((), 0.5, dtype=t.dtype, device=t.device).expand_as(t),
    "the same in every batch": lambda t: t[:1].expand_as(t),
    "the same in every row": lambda t: t[:, :1].expand_as(t),
    "the same in every head": lambda t: t[:, :, :1].expand_as(t),
    "the same in every column": lambda t: t[..., :1].expand_as(t),
    "transposed": lambda t: t.transpose(1, -1).contiguous().transpose(1, -1),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_come_with_any_strides(device: str, dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, 2, 16, device=device).to(dtype) for _ in range(3))
    out, lse = flashattn_ext.forward(q, k, v, causal=True, return_lse=True)
    dout, dlse = GRADIENTS[kind](torch.randn_like(out)), GRADIENTS[kind](torch.randn_like(lse))
    got = flashattn_ext.backward(dout, q, k, v, out, lse, dlse=dlse, causal=True, deterministic=True)
    plain = (dout.contiguous(), q, k, v, out, lse)
    expected = flashattn_ext.backward(*plain, dlse=dlse.contiguous(), causal=True, deterministic=True)
    for a, b in zip(got[:3], expected[:3], strict=True):
        assert_same_bits(a, b)


def test_inputs_may_repeat_one_row(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(2, 40, 2, 16, device=device).to(dtype)
    k, v = (torch.randn(2, 1, 2, 16, device=device).to(dtype).expand(2, 50, 2, 16) for _ in range(2))
    assert_same_bits(flashattn_ext.forward(q, k, v), flashattn_ext.forward(q, k.contiguous(), v.contiguous()))


def test_the_gradient_of_a_sum_is_not_unfolded() -> None:
    q = torch.randn(4, 512, 4, 64)
    out, lse = flashattn_ext.forward(q, q, q, return_lse=True)
    one = torch.ones(())
    in_place = allocated_bytes(lambda: flashattn_ext.backward(one.expand_as(out), q, q, q, out, lse))
    plain = allocated_bytes(lambda: flashattn_ext.backward(out, q, q, q, out, lse))
    assert in_place - plain < q.nbytes // 2
