"""Hessian-vector products of both orders of differentiation, and their own derivatives, against plain PyTorch in fp64.

A product is linear in its vector and in the gradients of out and lse. Its derivatives with respect to these are products again,
which `torch.autograd.functional.hvp` relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gradcheck_cases import BROADCASTS, OPTIONS, leaf, out_and_lse, tensors_and_options
from helpers import cu_seqlens
from torch import Tensor
from torch.autograd import forward_ad, functional, grad

import flashattn_ext

# The Ascend C kernels have no second derivatives.
pytestmark = pytest.mark.no_emulator

CASES = {**OPTIONS, **{f"bias {shape}": {**OPTIONS["biases"], "bias": shape + "k"} for shape in BROADCASTS}}
LENGTHS = {"cu_seqlens_q": cu_seqlens([4, 0, 3, 2], "cpu"), "cu_seqlens_k": cu_seqlens([5, 2, 1, 0], "cpu")}
SIZES = [(4, 5), (0, 2), (3, 1), (2, 0)]

Tensors = Sequence[Tensor]
Loss = Callable[..., Tensor]


def times(a: Tensors, b: Tensors) -> Tensor:
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def copies(points: Tensors) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in points]


def gradient(loss: Loss, x: Tensors, **options: Any) -> tuple[Tensor, ...]:
    return grad(loss(*x), x, create_graph=True, materialize_grads=True, **options)


# The ways. Each returns the product of the Hessian at `points` and the vectors `v`; those that differentiate a product once
# more multiply with `w` in place of `v`, because a Hessian is symmetric.


def by_hvp(loss: Loss, points: Tensors, v: Tensors, _w: Tensors) -> Tensors:
    return functional.hvp(loss, tuple(points), tuple(v))[1]


def by_vhp(loss: Loss, points: Tensors, v: Tensors, _w: Tensors) -> Tensors:
    return functional.vhp(loss, tuple(points), tuple(v))[1]


def by_two_backwards(loss: Loss, points: Tensors, v: Tensors, _w: Tensors) -> Tensors:
    x = copies(points)
    return grad(times(gradient(loss, x), v), x, materialize_grads=True)


def by_dual_numbers(loss: Loss, points: Tensors, v: Tensors, _w: Tensors) -> Tensors:
    x = copies(points)
    with forward_ad.dual_level():
        gradients = grad(loss(*map(forward_ad.make_dual, x, v)), x, materialize_grads=True)
        return [tangent_of(t) for t in gradients]


def by_the_gradient_of_dual_numbers(loss: Loss, points: Tensors, v: Tensors, w: Tensors) -> Tensors:
    """The gradient of the tangents of a backward with respect to the tangents of the inputs, inside the dual level."""
    x, vectors = copies(points), copies(v)
    with forward_ad.dual_level():
        product = [tangent_of(t) for t in gradient(loss, list(map(forward_ad.make_dual, x, vectors)))]
        return grad(times(product, w), vectors, materialize_grads=True)


def by_the_gradient_of_two_backwards(loss: Loss, points: Tensors, v: Tensors, w: Tensors) -> Tensors:
    x, vectors = copies(points), copies(v)
    product = grad(times(gradient(loss, x), vectors), x, create_graph=True, materialize_grads=True)
    return grad(times(product, w), vectors, materialize_grads=True)


def by_the_tangent_of_two_backwards(loss: Loss, points: Tensors, v: Tensors, w: Tensors) -> Tensors:
    x = copies(points)
    with forward_ad.dual_level():
        vectors = list(map(forward_ad.make_dual, v, w))
        product = grad(times(gradient(loss, x), vectors), x, materialize_grads=True)
        return [tangent_of(t) for t in product]


def tangent_of(t: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(t).tangent
    return torch.zeros_like(t) if tangent is None else tangent


WAYS = [
    by_hvp,
    by_vhp,
    by_two_backwards,
    by_dual_numbers,
    by_the_gradient_of_dual_numbers,
    by_the_gradient_of_two_backwards,
    by_the_tangent_of_two_backwards,
]


def losses(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[list[Tensor], list[Loss]]:
    """The differentiable tensors of a call, and a loss of out and lse as a function of them, ours and the reference's."""
    packed = q.dim() == 3
    sizes = SIZES if packed else [(q.shape[1], k.shape[1])] * q.shape[0]
    leaves, given = tensors_and_options(q, k, v, options, sizes)

    def varlen(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
        starts_q, starts_k = LENGTHS.values()
        return flashattn_ext.varlen_forward(q, k, v, starts_q, starts_k, 4, 5, **others)

    ours = out_and_lse(varlen if packed else flashattn_ext.forward, leaves, given)
    plain = out_and_lse(flashattn_ext.attention_reference, leaves, {**given, **(LENGTHS if packed else {})})
    both = [lambda *x, of=of: sum(t.pow(3).sum() for t in of(*x)) for of in (ours, plain)]
    return [t.detach() for t in leaves.values()], both


def check(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], way: Any) -> None:
    points, (ours, plain) = losses(q, k, v, options)
    vectors, others = ([torch.randn_like(t) for t in points] for _ in range(2))
    expected = way(plain, points, vectors, others)
    for got, ref in zip(way(ours, points, vectors, others), expected, strict=True):
        torch.testing.assert_close(got, ref, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_dense_calls(name: str, way: Any) -> None:
    check(leaf(2, 5, 4, 3), leaf(2, 7, 2, 3), leaf(2, 7, 2, 5), CASES[name], way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences(name: str, way: Any) -> None:
    check(leaf(9, 2, 3), leaf(8, 1, 3), leaf(8, 1, 4), OPTIONS[name], way)


@pytest.mark.dtypes("float32")
@pytest.mark.parametrize("way", WAYS)
def test_every_backend(way: Any, device: str, dtype: torch.dtype) -> None:
    """In fp32, with options that every backend with second derivatives runs."""
    shapes = (2, 65, 4, 32), (2, 80, 2, 32), (2, 80, 2, 48), (4,)
    points, vectors, others = ([torch.randn(shape) for shape in shapes] for _ in range(3))
    found = []
    for of, type_ in ((flashattn_ext.forward, dtype), (flashattn_ext.attention_reference, torch.float64)):

        def loss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, of: Any = of) -> Tensor:
            out, lse = of(q, k, v, sink=sink, softcap=2.0, window_size=(40, 30), return_lse=True)
            return out.pow(3).sum() + lse.sin().sum()

        found.append(way(loss, *([t.to(device, type_) for t in each] for each in (points, vectors, others))))
    for got, expected in zip(*found, strict=True):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < 1e-5, f"{way.__name__}: relative error {error:.1e}"
