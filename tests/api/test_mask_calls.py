"""Masks as arguments of calls: compiled, checkpointed, exported, and against the same mask in another form.

Tests in tests/kernels compare numbers, and tests/api/test_mask.py tests the constructors.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from helpers import cu_seqlens
from mask_cases import KINDS, make_mask
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashattn_ext
from flashattn_ext import Mask

S = 70


def rows(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (2, S)), 2, 16, device=device).to(dtype).requires_grad_()


def some_documents(device: str, seed: int) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.randint(0, 9, (2, S), generator=generator) == 0).cumsum(1)
    return Mask.documents(ids.to(device))


def two_layers(x: Tensor, mask: Mask) -> Tensor:
    y = flashattn_ext.forward(x, x, x, mask=mask, causal=True)
    return flashattn_ext.forward(y, x, y, mask=mask)


def gradient(function: Callable[[Tensor, Mask], Tensor], x: Tensor, mask: Mask) -> Tensor:
    (grad,) = torch.autograd.grad(function(x, mask).float().square().sum(), x)
    return grad


@pytest.mark.dtypes("float32", "bfloat16")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_a_bias_of_minus_infinity(device: str, dtype: torch.dtype, kind: str, causal: bool) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    mask = make_mask(kind, 2, [(S, 90)] * 2, generator).to(device)
    q, k = rows(device, dtype=dtype), rows(device, 2, 90, dtype=dtype)
    bias = torch.zeros(2, 2, S, 90, device=device).masked_fill(~mask.dense(S), -math.inf)
    out = flashattn_ext.forward(q, k, k, mask=mask, causal=causal)
    expected = flashattn_ext.forward(q, k, k, bias=bias, causal=causal)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out, expected, **tolerance)


@pytest.mark.dtypes("float32", "bfloat16")
def test_documents_are_sequences(device: str, dtype: torch.dtype) -> None:
    """A document's result agrees with the document as a packed sequence."""
    lengths = [20, 1, 30, 19]
    x = rows(device, 1, S, dtype=dtype)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].to(device)
    starts = cu_seqlens(lengths, device)
    out = flashattn_ext.forward(x, x, x, mask=Mask.documents(ids), causal=True)
    packed = flashattn_ext.varlen_forward(x[0], x[0], x[0], starts, starts, 30, 30, causal=True)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[0], packed, **tolerance)


def test_what_is_written_into_the_intervals_is_seen(device: str) -> None:
    x, mask = rows(device), some_documents(device, 0)
    flashattn_ext.forward(x, x, x, mask=mask)
    other = some_documents(device, 1)
    mask.intervals.copy_(other.intervals)
    assert torch.equal(flashattn_ext.forward(x, x, x, mask=mask), flashattn_ext.forward(x, x, x, mask=other))


def test_layers_share_what_is_computed_of_a_mask(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = flashattn_ext.ops.mask_extremes
    monkeypatch.setattr(flashattn_ext.ops, "mask_extremes", lambda intervals: made.append(intervals) or make(intervals))
    gradient(two_layers, rows(device), some_documents(device, 0))
    assert len(made) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_masks_that_change_need_no_new_compilation(device: str, backend: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    function = torch.compile(two_layers, fullgraph=True, backend=counter)
    for step in range(4):
        x, mask = rows(device), some_documents(device, step)
        if step == 2:
            mask.extremes()  # extremes cached by calls outside the graph make no difference
        torch.testing.assert_close(gradient(function, x, mask), gradient(two_layers, x, mask), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_a_mask_made_inside_a_compiled_function(device: str) -> None:
    torch._dynamo.reset()

    def step(x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = Mask.documents(ids) & Mask.prefix_lm(lengths, S, S) & Mask.window(30, -1, S, S, 4, device=x.device)
        return flashattn_ext.forward(x, x, x, mask=mask)

    x, ids = rows(device), torch.arange(S, device=device)[None] // 20
    lengths = torch.tensor([5, 30], device=device)
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(x, ids, lengths)
    torch.testing.assert_close(out, step(x, ids, lengths))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device: str, use_reentrant: bool) -> None:
    x, mask = rows(device), some_documents(device, 0)
    expected = gradient(two_layers, x, mask)
    checkpoint(two_layers, x, mask, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_export(device: str) -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: Tensor, mask: Mask) -> Tensor:
            return two_layers(x, mask)

    x, mask = rows(device).detach(), some_documents(device, 0)
    program = torch.export.export(Attention(), (x, mask))
    other = some_documents(device, 1)
    torch.testing.assert_close(program.module()(x, other), two_layers(x, other))


def test_a_saved_program_with_a_mask_is_loaded(device: str) -> None:
    """Its example inputs, the Mask included, go through torch.load, which accepts only data and safe globals."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, mask: Mask) -> Tensor:
            return flashattn_ext.forward(x, x, x, mask=mask)

    x, mask, file = rows(device), some_documents(device, 0), io.BytesIO()
    torch.export.save(torch.export.export(Layer(), (x, mask)), file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert torch.equal(loaded.module()(x, mask), Layer()(x, mask))
    assert torch.equal(loaded.example_inputs[0][1].intervals, mask.intervals)


def test_meta_tensors(device: str) -> None:
    x, mask = rows("meta"), some_documents(device, 0).to("meta")
    assert gradient(two_layers, x, mask).shape == x.shape


@pytest.mark.parametrize("shape", [(2, 2, S, 2), (1, 2, S, 2), (2, 1, S, 2)], ids=str)
def test_pairs_that_are_not_contiguous(device: str, shape: tuple[int, ...]) -> None:
    x = rows(device).detach()
    intervals = torch.randint(0, S, shape, dtype=torch.int32, device=device)
    expected = flashattn_ext.forward(x, x, x, mask=Mask(intervals))
    spread = torch.zeros(*shape[:-1], 3, dtype=torch.int32, device=device)[..., ::2].copy_(intervals)
    for view in (spread, intervals.transpose(-1, -2).contiguous().transpose(-1, -2)):
        assert torch.equal(flashattn_ext.forward(x, x, x, mask=Mask(view)), expected)
