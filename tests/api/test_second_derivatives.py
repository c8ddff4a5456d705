"""Second derivatives and forward mode: torch.autograd, torch.func and torch.compile, against plain PyTorch in fp64.

Every test runs with `forward` and with FlashAttentionFunction, whose nodes are written in C++ and in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hvp, vhp
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

import flashattn_ext
from flashattn_ext import FlashAttentionFunction, attention_reference
from flashattn_ext.options import CallOptions

OPTIONS = {"causal": True, "softmax_scale": 0.35, "softcap": 1.5}
CALL_OPTIONS = CallOptions(**OPTIONS)

Attention = Callable[..., tuple[Tensor, Tensor]]


def by_forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, lse = flashattn_ext.forward(q, k, v, sink=sink, **OPTIONS, return_lse=True)
    return out, lse


def by_function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    nothing = (None,) * 5
    out, lse, *_ = FlashAttentionFunction.apply(q, k, v, None, None, sink, *nothing, None, CALL_OPTIONS, False)
    return out, lse


def by_reference(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, lse = attention_reference(q, k, v, sink=sink, **OPTIONS, return_lse=True)
    return out, lse


each_way = pytest.mark.parametrize("attention", [by_forward, by_function], ids=["forward", "Function"])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a sink."""
    return [torch.randn(shape, dtype=dtype) for shape in ((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 3), (2,))]


def losses(
    attention: Attention, tensors: list[Tensor]
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A loss of out and lse as a function of q, and the same by attention_reference."""

    def loss_of(function: Attention) -> Callable[[Tensor], Tensor]:
        return lambda q: sum(t.square().sum() for t in function(q, *tensors[1:]))

    return loss_of(attention), loss_of(by_reference)


# --- torch.autograd ---------------------------------------------------------------------------------------------------


@each_way
def test_finite_differences(attention: Attention) -> None:
    leaves = [t.requires_grad_() for t in inputs()]
    assert torch.autograd.gradcheck(attention, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attention, leaves, check_fwd_over_rev=True)


@each_way
def test_a_gradient_penalty(attention: Attention) -> None:
    """A loss of gradients trains every input, those of values and of a sink too."""
    found = []
    for function in (attention, by_reference):
        torch.manual_seed(0)
        leaves = [t.requires_grad_() for t in inputs()]
        out, lse = function(*leaves)
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), leaves, create_graph=True)
        penalty = sum(g.square().sum() for g in gradients)
        found.append(torch.autograd.grad(penalty + out.sum(), leaves))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@each_way
def test_tangents_of_some_inputs(attention: Attention) -> None:
    """Without a tangent of the others, and with zeros that torch does not store."""
    tensors = inputs()
    for n, t in enumerate(tensors):
        tangent = torch.randn_like(t)
        results = []
        for function in (attention, by_reference):
            with forward_ad.dual_level():
                given = [*tensors[:n], forward_ad.make_dual(t, tangent), *tensors[n + 1 :]]
                results.append([forward_ad.unpack_dual(result).tangent for result in function(*given)])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got) if expected is None else expected)
    with forward_ad.dual_level():
        zero = forward_ad.make_dual(tensors[0], torch._efficientzerotensor(tensors[0].shape, dtype=torch.float64))
        tangent = forward_ad.unpack_dual(attention(zero, *tensors[1:])[0]).tangent
        assert tangent is None or not tangent.any()


@each_way
def test_forward_over_reverse_in_one_level(attention: Attention) -> None:
    """Dual numbers through torch.autograd.grad; a tangent of dout alone is a backward of it."""
    tensors, results = inputs(), []
    t = torch.randn_like(tensors[0])
    weight = torch.randn(1, 3, 2, 3, dtype=torch.float64)
    for function in (attention, by_reference):
        with forward_ad.dual_level():
            q = forward_ad.make_dual(tensors[0].clone().requires_grad_(), t)
            out, lse = function(q, *tensors[1:])
            (dq,) = torch.autograd.grad(out.square().sum() + lse.sum(), q)
            plain = tensors[0].clone().requires_grad_()
            dout = forward_ad.make_dual(torch.ones_like(weight), weight)
            (of_dout,) = torch.autograd.grad(function(plain, *tensors[1:])[0], plain, dout)
            results.append([forward_ad.unpack_dual(each).tangent for each in (dq, of_dout)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@each_way
@pytest.mark.parametrize("create_graph", [False, True])
def test_products_of_torch_autograd_functional(attention: Attention, create_graph: bool) -> None:
    """hvp is a backward of a double backward, with respect to the vector of the latter."""
    given, t = tuple(inputs()), tuple(inputs())
    for product in (hvp, vhp):
        results = [
            product(lambda *x, of=of: sum(each.square().sum() for each in of(*x)), given, t, create_graph=create_graph)
            for of in (attention, by_reference)
        ]
        for got, expected in zip(results[0][1], results[1][1], strict=True):
            torch.testing.assert_close(got, expected)


@each_way
def test_products_of_vectors_with_tangents(attention: Attention) -> None:
    """A double backward in a dual level is linear in its vector and in dout: their tangents are allowed, those of q are not."""
    q, *others = inputs()
    weight, tweight = torch.randn(2, 1, 3, 2, 3, dtype=torch.float64)
    t, tt = torch.randn(2, *q.shape, dtype=torch.float64)
    results = []
    for function in (attention, by_reference):
        with forward_ad.dual_level():
            x = q.clone().requires_grad_()
            dout, vector = forward_ad.make_dual(weight, tweight), forward_ad.make_dual(t, tt)
            of = []
            for loss, times in (
                (lambda out, dout=dout: (out * dout).sum(), t),
                (lambda out: out.pow(3).sum(), vector),
                (lambda out, dout=dout: (out.square() * dout).sum(), vector),
            ):
                (dq,) = torch.autograd.grad(loss(function(x, *others)[0]), x, create_graph=True)
                (product,) = torch.autograd.grad(dq, x, times)
                of += forward_ad.unpack_dual(product)
        results.append(of)
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_raw_backward_is_differentiable() -> None:
    """As if its out and lse were computed from q, k and v in it: their own gradients are none."""
    q, k, v, _ = (t.requires_grad_() for t in inputs())
    dout = torch.randn(1, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    out, lse = (t.detach() for t in flashattn_ext.forward(q, k, v, return_lse=True))
    got = flashattn_ext.backward(dout, q, k, v, out, lse)[:3]
    expected = torch.autograd.grad(attention_reference(q, k, v), (q, k, v), dout, create_graph=True)
    for gradients in (got, expected):
        torch.testing.assert_close(gradients, expected)
    pair = [
        torch.autograd.grad(sum(g.square().sum() for g in gradients), (q, k, v, dout)) for gradients in (got, expected)
    ]
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b)


# --- torch.func -------------------------------------------------------------------------------------------------------


def forward_over_reverse(loss: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
    return jvp(grad(loss), (x,), (t,))[1]


def reverse_over_forward(loss: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
    return grad(lambda x: jvp(loss, (x,), (t,))[1])(x)


def reverse_over_reverse(loss: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
    return vjp(grad(loss), x)[1](t)[0]


def transposed(product: Any) -> Any:
    """The gradient of a product with respect to its vector: the same product, because a Hessian is symmetric."""

    def of_vector(loss: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
        return vjp(lambda vector: product(loss, x, vector), torch.zeros_like(t))[1](t)[0]

    of_vector.__name__ = f"transposed_{product.__name__}"
    return of_vector


PRODUCTS = [
    forward_over_reverse,
    reverse_over_forward,
    reverse_over_reverse,
    transposed(forward_over_reverse),
    transposed(reverse_over_reverse),
]


@each_way
def test_jacobians_and_hessians(attention: Attention) -> None:
    tensors = inputs()
    loss, expected = losses(attention, tensors)
    torch.testing.assert_close(jacfwd(loss)(tensors[0]), jacrev(expected)(tensors[0]))
    whole = jacrev(jacrev(expected))(tensors[0])
    for of in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacrev(jacfwd(f))):
        torch.testing.assert_close(of(loss)(tensors[0]), whole)


@each_way
@pytest.mark.parametrize("product", PRODUCTS)
def test_hessian_vector_products(attention: Attention, product: Any) -> None:
    """Also under vmap over the vectors and over the points."""
    tensors = inputs()
    loss, reference = losses(attention, tensors)
    q, directions = tensors[0], torch.randn(3, *tensors[0].shape, dtype=torch.float64)
    expected = torch.stack([product(reference, q, t) for t in directions])
    torch.testing.assert_close(product(loss, q, directions[0]), expected[0])
    torch.testing.assert_close(torch.vmap(lambda t: product(loss, q, t))(directions), expected)
    points = torch.stack([q, 2 * q, -q])
    expected = torch.stack([product(reference, x, t) for x, t in zip(points, directions, strict=True)])
    torch.testing.assert_close(torch.vmap(lambda x, t: product(loss, x, t))(points, directions), expected)


@pytest.mark.parametrize("product", PRODUCTS)
def test_vectors_become_entries_of_the_batch(product: Any) -> None:
    """Without tensors of heads one call computes all products; the loss has a tangent of lse, too."""
    q, directions = torch.randn(2, 5, 2, 4, dtype=torch.float64), torch.randn(3, 2, 5, 2, 4, dtype=torch.float64)

    def loss(function: Any) -> Callable[[Tensor], Tensor]:
        def of(q: Tensor) -> Tensor:
            out, lse = function(q, q, q, return_lse=True)
            return out.sin().sum() + lse.cos().sum()

        return of

    got = torch.vmap(lambda t: product(loss(flashattn_ext.forward), q, t))(directions)
    torch.testing.assert_close(got, torch.stack([product(loss(attention_reference), q, t) for t in directions]))


@each_way
@pytest.mark.parametrize("product", PRODUCTS)
def test_derivatives_of_mapped_calls(attention: Attention, product: Any) -> None:
    """vmap inside, where the tests above have it outside."""
    tensors = inputs()
    points, t = torch.randn(2, 3, *tensors[0].shape, dtype=torch.float64)

    def together(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda points: torch.vmap(loss)(points).square().sum()

    got, expected = (product(together(loss), points, t) for loss in losses(attention, tensors))
    torch.testing.assert_close(got, expected)


@each_way
@pytest.mark.parametrize(
    ("product", "backend"), [*((product, "aot_eager") for product in PRODUCTS), (forward_over_reverse, "inductor")]
)
def test_they_compile_without_a_graph_break(attention: Attention, product: Any, backend: str) -> None:
    tensors = inputs()
    loss, reference = losses(attention, tensors)
    t = torch.randn_like(tensors[0])
    compiled = torch.compile(lambda q, t: product(loss, q, t), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(tensors[0], t), product(reference, tensors[0], t))


@each_way
def test_a_compiled_tangent_has_a_gradient(attention: Attention) -> None:
    tensors = inputs()
    loss, reference = losses(attention, tensors)
    q, t = tensors[0].requires_grad_(), torch.randn_like(tensors[0])
    compiled = torch.compile(lambda q: jvp(loss, (q,), (t,))[1], fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(q), q)
    torch.testing.assert_close(got, reverse_over_forward(reference, q.detach(), t))


@pytest.mark.parametrize("mapped", ["tbias", "bias", "both", "slopes"])
def test_vmap_over_tangents_of_biases(mapped: str) -> None:
    """A tangent that is mapped over while its tensor is not, and the other way round."""
    q, k, v, _ = inputs()
    options = dict(dtype=torch.float64)
    of_each = {"tbias": (None, 0), "bias": (0, None), "both": (0, 0), "slopes": (None, 0)}[mapped]
    name, shape = ("alibi_slopes", (2,)) if mapped == "slopes" else ("bias", (1, 2, 1, 4))
    primal, tangent = (torch.randn(shape if dim is None else (3, *shape), **options) for dim in of_each)

    def push(function: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda b, t: jvp(lambda b: function(q, k, v, **{name: b}), (b,), (t,))[1]

    got = torch.vmap(push(flashattn_ext.forward), of_each)(primal, tangent)
    torch.testing.assert_close(got, torch.vmap(push(attention_reference), of_each)(primal, tangent))


# --- what there is not ------------------------------------------------------------------------------------------------


@each_way
def test_a_third_derivative_is_refused(attention: Attention) -> None:
    tensors = inputs()
    loss, _ = losses(attention, tensors)
    t = torch.randn_like(tensors[0])
    for product in (forward_over_reverse, reverse_over_reverse):
        with pytest.raises(NotImplementedError, match=r"no third derivatives; use flashattn_ext\.attention_reference"):
            grad(lambda q, product=product: product(loss, q, t).sum())(tensors[0])
    with pytest.raises(NotImplementedError, match="no third derivatives"):
        jvp(lambda q: reverse_over_reverse(loss, q, t), (tensors[0],), (t,))
    with pytest.raises(NotImplementedError, match=r"a jvp of a jvp.*torch\.func\.hessian"):
        jacfwd(jacfwd(loss))(tensors[0])
    q = tensors[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="no third derivatives"):
        hvp(loss, q, t, create_graph=True)[1].sum().backward()


@each_way
def test_the_gradient_of_a_product_with_respect_to_dout_is_refused(attention: Attention) -> None:
    """It is a second derivative, but one that neither J nor H computes: the tangent of a tangent."""
    tensors = inputs()
    q, weight = tensors[0].requires_grad_(), torch.randn(1, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    (dq,) = torch.autograd.grad(attention(*tensors)[0], q, weight, create_graph=True)
    (product,) = torch.autograd.grad(dq, q, torch.ones_like(q), create_graph=True)
    with pytest.raises(NotImplementedError, match=r"a jvp of a jvp.*attention_reference"):
        torch.autograd.grad(product.sum(), weight)


def refusals(device: str) -> None:
    q, k, v = (torch.randn(1, 5, 1, 8, device=device, dtype=torch.float16).requires_grad_() for _ in range(3))
    names = re.escape("the ops jvp (forward mode) and second (second derivatives) are not implemented here; use")
    with pytest.raises(NotImplementedError, match=names):
        jvp(lambda q: flashattn_ext.forward(q, k, v), (q.detach(),), (q.detach(),))
    (dq,) = torch.autograd.grad(flashattn_ext.forward(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=names):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.dtypes("float16")
def test_a_backend_without_them_says_so(device: str, dtype: torch.dtype) -> None:
    """The kernels of the CPU and of CUDA have them; the others name what has."""
    if device in ("cpu", "cuda") and flashattn_ext._C.forced_backend() in ("", "cuda-sm80", "cuda-sm90"):
        q = torch.randn(1, 5, 1, 8, device=device, dtype=dtype)
        assert jvp(lambda q: flashattn_ext.forward(q, q, q), (q,), (q,))[1].isfinite().all()
    else:
        refusals(device)
