"""torch.compile and checkpointing know that only drawing the RNG state is random in a call with dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import run_python
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flashattn_ext

COMPILERS = ("aot_eager", "inductor")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(function: Callable, backend: str) -> Callable:
    return torch.compile(function, fullgraph=True, backend=backend)


def dropped(q: torch.Tensor, **options) -> torch.Tensor:
    return flashattn_ext.forward(q, q, q, dropout_p=0.5, **options)


def new_q(device: str) -> torch.Tensor:
    return torch.randn(2, 32, 2, 16, device=device, requires_grad=True)


@pytest.mark.parametrize("backend", COMPILERS)
def test_two_calls_of_a_graph_drop_different_weights(device: str, backend: str) -> None:
    q = new_q(device)
    difference = compiled(lambda q: dropped(q) - dropped(q), backend)(q)
    assert difference.abs().sum() > 1
    (gradient,) = torch.autograd.grad(difference.square().sum(), q)
    assert gradient.abs().sum() > 1


def test_equal_seeds_are_one_mask(device: str) -> None:
    q = new_q(device)
    assert not compiled(lambda q: dropped(q, rng_seed=3) - dropped(q, rng_seed=3), "inductor")(q).any()
    torch.testing.assert_close(compiled(partial(dropped, rng_seed=3), "inductor")(q), dropped(q, rng_seed=3))


def test_compiled_calls_draw_the_masks_of_eager_ones(device: str) -> None:
    q = new_q(device)
    results = []
    for function in (dropped, compiled(dropped, "aot_eager")):
        torch.manual_seed(5)
        outs = [function(q) for _ in range(3)]
        results.append([*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), q)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize("backend", COMPILERS)
def test_the_backward_has_the_mask_of_its_forward(device: str, backend: str) -> None:
    q, k = (torch.randn(1, 40, 2, 16, device=device) for _ in range(2))
    v = torch.randn(1, 40, 2, 16, device=device, requires_grad=True)
    out = compiled(lambda q, k, v: flashattn_ext.forward(q, k, v, dropout_p=0.5), backend)(q, k, v)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    # out is linear in v, so that <dout, out> = <dv, v> when both use the same weights.
    torch.testing.assert_close((dv * v).sum(), (dout * out).sum(), rtol=1e-4, atol=1e-3)


def policy(saves_forward: bool, _context, op, *_arguments, **_options) -> CheckpointPolicy:
    is_forward = op is torch.ops.flashattn_ext.forward.default
    return CheckpointPolicy.MUST_SAVE if is_forward and saves_forward else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("saves_forward", [True, False], ids=["forward saved", "forward recomputed"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_selective_checkpointing_redraws_nothing(device: str, backend: str, saves_forward: bool) -> None:
    q = new_q(device)

    def block(q: torch.Tensor) -> torch.Tensor:
        y = dropped(torch.sin(q))
        return dropped(torch.cos(y))

    def checkpointed(q: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, partial(policy, saves_forward))
        return checkpoint(block, q, use_reentrant=False, context_fn=contexts)

    function = checkpointed if backend == "eager" else compiled(checkpointed, backend)
    torch.manual_seed(7)
    out = function(q)
    dout = torch.randn_like(out)
    torch.manual_seed(8)  # what happens between forward and backward must not matter
    (gradient,) = torch.autograd.grad(out, q, dout)
    torch.manual_seed(7)
    if backend == "inductor":  # inductor draws other numbers: compare with another call of the same function
        again = function(q)
        torch.testing.assert_close(again, out)
        torch.testing.assert_close(torch.autograd.grad(again, q, dout)[0], gradient)
        return
    if backend == "aot_eager" and device == "cuda":
        # A graph that redraws in its backward has its own generators on CUDA (graphsafe_rng_functionalization), so that
        # its masks differ from the masks of eager calls. The next test holds for every device: a backward has the masks
        # of its forward.
        assert gradient.abs().sum() > 1
        return
    expected = block(q)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, q, dout)[0])


@pytest.mark.parametrize("saves_forward", [True, False], ids=["forward saved", "forward recomputed"])
@pytest.mark.parametrize("backend", ["eager", *COMPILERS])
def test_a_checkpointed_backward_has_the_masks_of_its_forward(device: str, backend: str, saves_forward: bool) -> None:
    q = torch.randn(2, 32, 2, 16, device=device)
    v = torch.randn(2, 32, 2, 16, device=device, requires_grad=True)

    def block(v: torch.Tensor) -> torch.Tensor:
        inner = flashattn_ext.forward(q, q, v * 2, dropout_p=0.5)
        return flashattn_ext.forward(q, q, inner * 2, dropout_p=0.5)

    def checkpointed(v: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, partial(policy, saves_forward))
        return checkpoint(block, v, use_reentrant=False, context_fn=contexts)

    out = (checkpointed if backend == "eager" else compiled(checkpointed, backend))(v)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    # out is linear in v, so that <dout, out> = <dv, v> when both use the same weights.
    torch.testing.assert_close((dv * v).sum(), (dout * out).sum(), rtol=1e-4, atol=1e-3)


def test_checkpointing_inside_a_graph(device: str) -> None:
    q = new_q(device)
    v = torch.randn(2, 32, 2, 16, device=device, requires_grad=True)

    def block(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda v: flashattn_ext.forward(q, q, v.sin().asin(), dropout_p=0.5), v, use_reentrant=False)

    with torch.no_grad():
        v.clamp_(-1, 1)
    out = compiled(block, "inductor")(q, v)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close((dv * v).sum(), (dout * out).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("order", "processes"), [((0.0, 0.5), 2), ((0.5, 0.0, 0.25), 1)], ids=["none first", "some first"]
)
def test_a_probability_that_changes(tmp_path: Path, order: tuple[float, ...], processes: int) -> None:
    """A graph compiled with probability 0 drew no RNG state, and torch reused it for other probabilities.

    The second process finds the graphs of the first one on disk.
    """
    code = f"""
        import torch, flashattn_ext

        def call(q, p):
            return flashattn_ext.forward(q, q, q, dropout_p=p, rng_seed=3)

        compiled = torch.compile(call, fullgraph=True, dynamic=True)
        q = torch.randn(1, 24, 2, 16, requires_grad=True)
        for p in {order}:
            for tensor in (q.detach(), q):
                expected, out = call(tensor, p), compiled(tensor, p)
                torch.testing.assert_close(out, expected)
                if tensor.requires_grad:
                    gradients = [torch.autograd.grad(result.square().sum(), q)[0] for result in (expected, out)]
                    torch.testing.assert_close(*gradients)
        drawn = torch.compile(lambda q, p: flashattn_ext.forward(q, q, q, dropout_p=p), fullgraph=True, dynamic=True)
        for p in {order}:
            same = torch.equal(drawn(q, p), drawn(q, p))
            assert same == (p == 0), p
    """
    for _process in range(processes):
        done = run_python(code, timeout=300, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]
