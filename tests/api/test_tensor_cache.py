"""Values that are kept for tensors (a Mask's extremes, what integrations read from masks) do not depend on where they were made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext
from flashattn_ext import Mask
from flashattn_ext.integrations.transformers import attention
from flashattn_ext.tensor_cache import TensorCache

S = 160  # several tiles of keys, so that the extremes decide which are skipped


def documents() -> Mask:
    return Mask.documents((torch.arange(S) // 50)[None])


def hidden() -> Tensor:
    """Intervals in which no row sees a key of the second half."""
    intervals = torch.tensor([0, S], dtype=torch.int32).repeat(1, 1, S, 1)
    intervals[:, :, S // 2 :] = 0
    return intervals.clone()  # without a count of writes, as the intervals that it replaces


def with_mask(q: Tensor, mask: Mask) -> Tensor:
    return flashattn_ext.forward(q, q, q, mask=mask)


def transformers_layer(q: Tensor, visible: Tensor) -> Tensor:
    heads_first = q.transpose(1, 2)
    out, _ = attention(torch.nn.Module(), heads_first, heads_first, heads_first, visible, is_causal=False)
    return out


# A call, and what makes the object that it keeps something for.
CALLS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[], Any]]] = {
    "Mask": (with_mask, documents),
    "dense mask of transformers": (transformers_layer, lambda: documents().dense(S)),
}


@contextmanager
def real_tensors_too() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "flops": lambda: FlopCounterMode(display=False),
    "fake": real_tensors_too,
}
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": torch.func.grad,
    "jvp of grad": lambda f: lambda q: torch.func.jvp(torch.func.grad(f), (q,), (q,)),
    "hessian product": lambda f: lambda q: torch.func.grad(lambda x: (torch.func.grad(f)(x) * x).sum())(q),
    "vmap": lambda f: lambda q: torch.vmap(f)(q[None]),
    "vmap of grad": lambda f: lambda q: torch.vmap(torch.func.grad(f))(q[None]),
    "functionalize": torch.func.functionalize,
}


def gradient(call: Callable[[Tensor, Any], Tensor], q: Tensor, kept: Any) -> Tensor:
    """Of a training step after everything else."""
    x = q.clone().requires_grad_()
    (found,) = torch.autograd.grad(call(x, kept).square().sum(), x)
    return found


# Whether a dense mask consists of intervals cannot be read in a FakeTensorMode.
IN_MODES = [(name, mode) for name in CALLS for mode in MODES if name == "Mask" or mode != "fake"]


@pytest.mark.parametrize(("name", "mode"), IN_MODES)
def test_what_a_mode_made_does_not_outlive_it(name: str, mode: str) -> None:
    call, make = CALLS[name]
    q, kept = torch.randn(1, S, 2, 8), make()
    expected = gradient(call, q, make())
    with MODES[mode]():
        call(torch.randn(1, S, 2, 8), kept)
    assert type(call(q, kept)) is Tensor
    assert torch.equal(gradient(call, q, kept), expected)
    with MODES[mode]():  # and back, with what the training step made
        call(torch.randn(1, S, 2, 8), kept)
    assert torch.equal(gradient(call, q, kept), expected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_a_transform_made_does_not_outlive_it(name: str, transform: str) -> None:
    """docs/derivatives.md's loops with one Mask: their second turn met a wrapper of the first."""
    call, make = CALLS[name]
    q, kept = torch.randn(1, S, 2, 8), make()
    transformed = TRANSFORMS[transform](lambda x: call(x, kept).square().sum())
    expected = TRANSFORMS[transform](lambda x: call(x, make()).square().sum())(q)
    for _ in range(2):
        torch.testing.assert_close(transformed(q), expected)
    assert torch.equal(gradient(call, q, kept), gradient(call, q, make()))


def test_a_hessian_twice() -> None:
    q, mask = torch.randn(1, 20, 1, 2), Mask.documents((torch.arange(20) // 7)[None])
    hessian = torch.func.hessian(lambda x: with_mask(x, mask).square().sum())
    assert torch.equal(hessian(q), hessian(q))


def test_a_transform_over_the_intervals() -> None:
    q = torch.randn(3, 1, S, 2, 8)
    intervals = torch.stack([hidden(), documents().intervals, hidden()])
    mapped = torch.vmap(lambda x, i: with_mask(x, Mask(i)))(q, intervals)
    for x, i, out in zip(q, intervals, mapped, strict=True):
        torch.testing.assert_close(out, with_mask(x, Mask(i)))


def test_a_traced_graph_computes_the_extremes_itself() -> None:
    """A graph that holds the extremes as a constant would skip tiles by what the intervals were."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, mask = torch.randn(1, S, 2, 8), documents()
    with_mask(q, mask)
    traced = make_fx(lambda x, intervals: with_mask(x, Mask(intervals)))(q, mask.intervals)
    assert any("mask_extremes" in str(node.target) for node in traced.graph.nodes)
    assert torch.equal(traced(q, hidden()), with_mask(q, Mask(hidden())))


REPLACED: dict[str, Callable[[Mask], None]] = {
    "swap_tensors": lambda mask: torch.utils.swap_tensors(mask.intervals, hidden()),
    "data": lambda mask: setattr(mask.intervals, "data", hidden()),
    "set_": lambda mask: mask.intervals.set_(hidden()),
    "copy_": lambda mask: mask.intervals.copy_(hidden()),
    "attribute": lambda mask: setattr(mask, "intervals", hidden()),
}


@pytest.mark.parametrize("how", REPLACED)
def test_intervals_that_change_after_the_first_use(how: str) -> None:
    q = torch.randn(1, S, 2, 8)
    mask = Mask(torch.tensor([0, S], dtype=torch.int32).repeat(1, 1, S, 1))
    with_mask(q, mask)  # all tiles are wholly visible
    REPLACED[how](mask)
    assert torch.equal(with_mask(q, mask), with_mask(q, Mask(hidden())))


def test_extremes_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Tensor] = []
    real = flashattn_ext.ops.mask_extremes
    monkeypatch.setattr(
        flashattn_ext.ops, "mask_extremes", lambda intervals: counted.append(intervals) or real(intervals)
    )
    q, mask = torch.randn(1, S, 2, 8), documents()
    for _ in range(3):
        with_mask(q, mask)
        with torch.inference_mode():
            with_mask(q, mask)
        torch.func.grad(lambda x: with_mask(x, mask).sum())(q)
    assert len(counted) == 1
    with_mask(q, copy.deepcopy(mask))
    assert len(counted) == 2


def test_values_are_constants() -> None:
    """Also where the call that makes them records a graph."""
    kept, given = TensorCache(), torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        assert not kept.get([given], lambda: given * 2).is_inference()
    value = kept.get([given], lambda: given * 3)
    assert not value.requires_grad and torch.equal(value, torch.full((3,), 2.0))


def test_lengths_written_through_numpy() -> None:
    """They are read at every call on the CPU, also in inference mode."""
    q, pages = torch.randn(1, 1, 2, 16), torch.randn(4, 16, 2, 16)
    lengths, table = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)

    def call() -> Tensor:
        return flashattn_ext.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)

    call()
    lengths.numpy()[0] = 33
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(RuntimeError, match="the longest sequence has 33 keys") as raised:
            call()
        assert isinstance(raised.value, ValueError)
