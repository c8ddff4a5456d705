"""FlashAttentionFunction as a torch.autograd.Function: alone, under torch.func and torch.compile, with hooks and checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashattn_ext
from flashattn_ext import FlashAttentionFunction
from flashattn_ext.options import CallOptions

PLAIN = CallOptions(
    max_seqlen_q=0, max_seqlen_k=0, bhsd=False, softmax_scale=0.35, softcap=0.0, causal=True, window_left=-1, window_right=-1,
    dropout_p=0.0, smooth_softmax=False, deterministic=False, origin=None,
)  # fmt: skip
BIASES = {"sink": (4,), "alibi_slopes": (4,), "relative_bias": (4, 5), "bias": (1, 4, 1, 9)}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def attend(
    q: Tensor, k: Tensor, v: Tensor, *biases: Tensor, seed: int | None = None, function: Any = FlashAttentionFunction,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse); biases in the order of BIASES."""
    given = (*biases, *[None] * (len(BIASES) - len(biases)))
    out, lse, *_ = function.apply(q, k, v, None, None, *given, None, None, seed, PLAIN._replace(**options), False)
    return out, lse


def leaves(device: str, dtype: torch.dtype = torch.float32, biased: bool = False) -> list[Tensor]:
    statistics = torch.promote_types(dtype, torch.float32)
    shapes = [(shape, dtype) for shape in ((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6))]
    shapes += [(shape, statistics) for shape in BIASES.values()] if biased else []
    return [torch.randn(shape, device=device).to(kind).requires_grad_() for shape, kind in shapes]


def loss(*tensors: Tensor, **options: Any) -> Tensor:
    out, lse = attend(*tensors, **options)
    return out.float().square().sum() + lse.sum()


def test_it_is_a_function_with_all_its_parts() -> None:
    assert issubclass(FlashAttentionFunction, torch.autograd.Function)
    own = vars(FlashAttentionFunction)
    assert {"forward", "setup_context", "backward", "jvp", "vmap"} <= own.keys() and "apply" not in own


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.4, "seed": 3}, {"softcap": 1.2, "window_left": 3}], ids=str)
def test_gradients_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    tensors = leaves("cpu", torch.float64, biased=True)
    assert torch.autograd.gradcheck(lambda *t: attend(*t, **options), tensors)


@pytest.mark.dtypes("float32", "bfloat16")
def test_torch_func(device: str, dtype: torch.dtype) -> None:
    tensors = leaves(device, dtype, biased=True)
    argnums = tuple(range(len(tensors)))
    expected = torch.autograd.grad(loss(*tensors), tensors)
    detached = [t.detach() for t in tensors]
    for got, gradient in zip(torch.func.grad(loss, argnums)(*detached), expected, strict=True):
        torch.testing.assert_close(got, gradient)
    value, pullback = torch.func.vjp(attend, *detached)
    torch.testing.assert_close(value, attend(*tensors))
    expected = torch.autograd.grad(attend(*tensors), tensors, value)
    for got, gradient in zip(pullback(value), expected, strict=True):
        torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.4, "seed": 3}], ids=["plain", "dropout"])
def test_vmap_and_vmap_of_grad(device: str, options: dict[str, Any]) -> None:
    calls = [[t.detach() for t in leaves(device, biased=True)] for _ in range(3)]
    stacked = [torch.stack(each) for each in zip(*calls, strict=True)]
    outs, lses = torch.vmap(lambda *t: attend(*t, **options))(*stacked)
    gradient = torch.func.grad(lambda *t: loss(*t, **options), tuple(range(len(stacked))))
    gradients = torch.vmap(gradient)(*stacked)
    for n, call in enumerate(calls):
        torch.testing.assert_close((outs[n], lses[n]), attend(*call, **options))
        for got, expected in zip(gradients, gradient(*call), strict=True):
            torch.testing.assert_close(got[n], expected)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_as_it_was_told(device: str, randomness: str) -> None:
    q, k, v = (t.detach() for t in leaves(device))
    twice = q.expand(2, *q.shape)
    out, _ = torch.vmap(lambda q: attend(q, k, v, dropout_p=0.5), randomness=randomness)(twice)
    assert torch.equal(out[0], out[1]) == (randomness == "same")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_a_graph_break(device: str, backend: str, dynamic: bool) -> None:
    tensors = leaves(device, biased=True)

    def function(number: float, *t: Tensor) -> Tensor:
        return loss(*t, softmax_scale=number, softcap=number * 3, dropout_p=number / 2, seed=5)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for number in (0.35, 0.6, 0.9):
        expected, got = function(number, *tensors), compiled(number, *tensors)
        torch.testing.assert_close(got, expected)
        pairs = zip(torch.autograd.grad(got, tensors), torch.autograd.grad(expected, tensors), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(0.5, *tensors), function(0.5, *tensors))


def test_torch_func_inside_a_compiled_function(device: str) -> None:
    tensors = [t.detach() for t in leaves(device)]
    gradient = torch.func.grad(loss)
    got = torch.compile(gradient, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(got, gradient(*tensors))


@pytest.mark.parametrize("compiled", [False, True])
def test_twice_in_one_graph(device: str, compiled: bool) -> None:
    tensors = leaves(device)

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, lse = attend(q, k, v)
        second, _ = attend(q * lse.exp().mean(), k * 2, first[:, :, :2] @ first.new_ones(6, 6))
        return first.square().sum() + second.sum()

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of = dict(causal=True, softmax_scale=0.35)
        first, lse = flashattn_ext.forward(q, k, v, **of, return_lse=True)
        second = flashattn_ext.forward(q * lse.exp().mean(), k * 2, first[:, :, :2] @ first.new_ones(6, 6), **of)
        return first.square().sum() + second.sum()

    function = torch.compile(twice, fullgraph=True, backend="aot_eager") if compiled else twice
    got, expected = (torch.autograd.grad(f(*tensors), tensors) for f in (function, reference))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_subclass(device: str) -> None:
    class Doubled(FlashAttentionFunction):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(None if g is None else 2 * g for g in FlashAttentionFunction.backward(ctx, *gradients))

    tensors = leaves(device)
    expected, got = (
        torch.autograd.grad(loss(*tensors, function=f), tensors) for f in (FlashAttentionFunction, Doubled)
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, 2 * b)


def test_saved_tensor_hooks_see_every_tensor(device: str) -> None:
    tensors = leaves(device)
    expected = torch.autograd.grad(loss(*tensors), tensors)
    packed: list[Tensor] = []

    def pack(t: Tensor) -> int:
        packed.append(t.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda n: packed[n]):
        value = loss(*tensors)
    assert any(torch.equal(t, tensors[0]) for t in packed)
    for a, b in zip(torch.autograd.grad(value, tensors), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_checkpointing_draws_the_same_mask(device: str, use_reentrant: bool, seed: int | None) -> None:
    tensors = leaves(device)

    def block(*t: Tensor) -> Tensor:
        return loss(*t, dropout_p=0.5, seed=seed)

    torch.manual_seed(4)
    expected = torch.autograd.grad(block(*tensors), tensors)
    torch.manual_seed(4)
    value = checkpoint(block, *tensors, use_reentrant=use_reentrant)
    torch.manual_seed(99)  # what happens between forward and backward must not matter
    value.backward()
    for t, gradient in zip(tensors, expected, strict=True):
        torch.testing.assert_close(t.grad, gradient)


def test_only_what_is_needed_has_a_gradient(device: str) -> None:
    tensors = [t.detach() for t in leaves(device, biased=True)]
    tensors[1].requires_grad_()
    tensors[4].requires_grad_()
    loss(*tensors).backward()
    assert [t.grad is not None for t in tensors] == [False, True, False, False, True, False, False]


def test_errors_name_the_argument(device: str) -> None:
    q, k, v = leaves(device)
    with pytest.raises(ValueError, match=r"^k: "):
        attend(q, k[:, :, :, :3], v)
    with pytest.raises(ValueError, match=r"^dropout_p: "):
        attend(q, k, v, dropout_p=1.5)
