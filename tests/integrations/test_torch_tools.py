"""torch's tools on the ops: FLOP counts, torch.func, torch.export, AOTInductor, profiles, nested tensors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext
from flashattn_ext import Mask


def _qkv(device: str, *lead: int, Sq: int = 12, Sk: int = 17, Hq: int = 4, Hk: int = 2, **kind: Any) -> list[Tensor]:
    shapes = ((Sq, Hq, 8), (Sk, Hk, 8), (Sk, Hk, 16))
    return [torch.randn(*lead, *shape, **kind).to(device) for shape in shapes]


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def _counted(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (0, -1)},
    {"window_size": (-1, 4)},
    {"window_size": (5, 5), "causal": True},
    {"window_size": (1000, 1000)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("Sq", "Sk"), [(12, 17), (17, 12), (16, 16), (1, 9), (9, 1)])
def test_flops_are_those_of_visible_pairs(Sq: int, Sk: int, options: dict[str, Any]) -> None:
    q, k, v = (t.requires_grad_() for t in _qkv("cpu", 3, Sq=Sq, Sk=Sk))
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    distance = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)
    visible = torch.ones(Sq, Sk, dtype=torch.bool)
    visible &= (distance >= -left) if left >= 0 else visible
    visible &= (distance <= right) if right >= 0 else visible
    pairs = 3 * 4 * int(visible.sum())
    assert _counted(lambda: flashattn_ext.forward(q, k, v, **options)) == 2 * pairs * (8 + 16)
    both = _counted(lambda: flashattn_ext.forward(q, k, v, **options).sum().backward())
    assert both == 2 * pairs * (8 + 16) + 2 * pairs * (3 * 8 + 2 * 16)


@pytest.mark.parametrize(
    ("names", "forward_mode", "second"), [("qkv", 3 * 8 + 2 * 16, 7 * 8 + 3 * 16), ("q", 2 * 8 + 16, 5 * 8 + 2 * 16), ("v", 8 + 16, 3 * 8 + 16)]
)  # fmt: skip
def test_flops_of_second_derivatives(names: str, forward_mode: int, second: int) -> None:
    """Tangents that are not given are not counted: docs/derivatives.md. The last two arguments are for one visible pair."""
    pairs = 3 * 4 * sum(i + 1 + 17 - 12 for i in range(12))
    tensors = dict(zip("qkv", _qkv("cpu", 3), strict=True))
    given = {name: torch.randn_like(tensors[name]) for name in names}
    rest = {name: t for name, t in tensors.items() if name not in given}
    both = 2 * pairs * (8 + 16 + forward_mode)

    def attend(given: dict[str, Tensor]) -> Tensor:
        return flashattn_ext.forward(**given, **rest, causal=True)

    primals = {name: tensors[name] for name in names}
    assert _counted(lambda: torch.func.jvp(attend, (primals,), (given,))) == both
    leaves = {name: t.requires_grad_() for name, t in primals.items()}
    gradients = torch.autograd.grad(attend(leaves).square().sum(), leaves.values(), create_graph=True)
    twice = _counted(lambda: torch.autograd.grad(gradients, leaves.values(), tuple(given.values())))
    # The gradient of dout, which depends on out, adds a backward.
    assert twice == 2 * pairs * (forward_mode + second + 3 * 8 + 2 * 16)


def test_flops_of_packed_sequences() -> None:
    q, k, v = _qkv("cpu", Sq=20, Sk=25)
    lengths_q, lengths_k = (5, 0, 15), (5, 7, 13)
    cu_q, cu_k = torch.tensor([0, 5, 5, 20], dtype=torch.int32), torch.tensor([0, 5, 12, 25], dtype=torch.int32)
    counted = _counted(lambda: flashattn_ext.varlen_forward(q, k, v, cu_q, cu_k, 15, 13, causal=True))
    pairs = sum(
        sum(min(max(i + Sk - Sq + 1, 0), Sk) for i in range(Sq)) for Sq, Sk in zip(lengths_q, lengths_k, strict=True)
    )
    assert counted == 2 * 4 * pairs * (8 + 16)
    on_device = [t.to("meta") for t in (q, k, v, cu_q, cu_k)]  # unreadable lengths: FLOPs of whole rectangles
    assert _counted(lambda: flashattn_ext.varlen_forward(*on_device, 15, 13, causal=True)) == 2 * 4 * 20 * 13 * (8 + 16)


def test_flops_of_decoding() -> None:
    """Two products of each query with every key of its sequence after appending; empty rows of the cache do not count."""
    q, cache, new = torch.randn(2, 3, 4, 16), torch.randn(2, 64, 2, 16), torch.randn(2, 3, 2, 16)
    lengths = torch.tensor([10, 20], dtype=torch.int32)
    pair = 2 * 2 * 16 * 4 * 3
    assert _counted(lambda: flashattn_ext.flash_attn_with_kvcache(q, cache, cache.clone())) == pair * 128
    assert (
        _counted(lambda: flashattn_ext.flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=lengths))
        == pair * 30
    )
    appends = _counted(
        lambda: flashattn_ext.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths)
    )
    assert appends == pair * 36


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_flops_of_a_mask(heads: int) -> None:
    q, k, v = _qkv("cpu", 2, Sq=17)
    mask = Mask(torch.randint(-3, 20, (1, heads, 17, 2), dtype=torch.int32))
    visible = mask.dense(17).expand(2, heads, 17, 17).repeat_interleave(4 // heads, 1).tril()
    meta = [t.to("meta") for t in (q, k, v)]
    counted = _counted(lambda: flashattn_ext.forward(*meta, mask=mask.to("meta"), causal=True))
    assert counted == 2 * 2 * 4 * (17 * 18 // 2) * (8 + 16)  # unreadable intervals: FLOPs of the causal mask
    counted = _counted(lambda: flashattn_ext.forward(q, k, v, mask=mask, causal=True))
    assert counted == 2 * int(visible.sum()) * (8 + 16)
    beyond = {"window_size": (sys.maxsize, sys.maxsize), "mask": mask}
    assert _counted(lambda: flashattn_ext.forward(q, k, v, causal=True, **beyond)) == counted


# --- torch.func -------------------------------------------------------------------------------------------------------


def _loss(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out, lse = flashattn_ext.forward(q, k, v, causal=True, return_lse=True, **options)
    return out.square().sum() + lse.sum()


def test_func_grad(device: str) -> None:
    tensors = _qkv(device, 2, Sk=12)
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(_loss(*leaves), leaves)
    for got, gradient in zip(torch.func.grad(_loss, argnums=(0, 1, 2))(*tensors), expected, strict=True):
        torch.testing.assert_close(got, gradient, rtol=0, atol=0)
    value, pullback = torch.func.vjp(lambda q: flashattn_ext.forward(q, *tensors[1:]), tensors[0])
    assert pullback(torch.ones_like(value))[0].shape == tensors[0].shape


def test_func_grad_of_a_sink_and_dropout(device: str) -> None:
    tensors, sink = _qkv(device, 2, Sk=12), torch.randn(4, device=device)
    leaf = sink.clone().requires_grad_()
    options = {"dropout_p": 0.3, "rng_seed": 4}
    (expected,) = torch.autograd.grad(_loss(*tensors, sink=leaf, **options), leaf)
    got = torch.func.grad(lambda s: _loss(*tensors, sink=s, **options))(sink)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_func_grad_inside_a_compiled_function(device: str) -> None:
    """Also without a graph break: torch.compile traces the derivative."""
    tensors = _qkv(device, 3, 2, Sk=12)
    functions = [torch.func.grad(_loss, argnums=(0, 1, 2)), torch.vmap(torch.func.grad(_loss, argnums=(0, 1, 2)))]
    for function, given in zip(functions, ([t[0] for t in tensors], tensors), strict=True):
        torch._dynamo.reset()
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
        for gradient, expected in zip(got, function(*given), strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_tangents(compiled: bool) -> None:
    q, k, v = _qkv("cpu", 2, Sk=12)

    def tangent(attention: Any, q: Tensor) -> Tensor | None:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            return torch.autograd.forward_ad.unpack_dual(attention(dual, k, v)).tangent

    torch._dynamo.reset()
    function = torch.compile(tangent, backend="aot_eager") if compiled else tangent
    expected = tangent(flashattn_ext.attention_reference, q)
    torch.testing.assert_close(function(flashattn_ext.forward, q), expected)


def test_gradients_in_batches(device: str) -> None:
    """is_grads_batched runs the backward under torch's older vmap."""
    tensors = [t.requires_grad_() for t in _qkv(device, 2, Sk=12)]
    out = flashattn_ext.forward(*tensors, causal=True)
    douts = torch.randn(3, *out.shape, device=device)
    got = torch.autograd.grad(out, tensors, douts, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, tensors, dout, retain_graph=True) for dout in douts]
    for gradient, each in zip(got, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(gradient, torch.stack(each), rtol=1e-5, atol=1e-6)


def test_compiled_autograd(device: str) -> None:
    tensors = [t.requires_grad_() for t in _qkv(device, 2, Sk=12)]
    expected = torch.autograd.grad(_loss(*tensors), tensors)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        _loss(*tensors).backward()
    for t, gradient in zip(tensors, expected, strict=True):
        torch.testing.assert_close(t.grad, gradient)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 1, 1)], ids=str)
def test_vmap_over_a_batch_dimension(device: str, in_dims: tuple[int | None, ...]) -> None:
    """The same as one call after the other, forward and gradients, also gradients of inputs that are not mapped over."""
    tensors = [
        t.movedim(0, dim) if dim is not None else t[0]
        for t, dim in zip(_qkv(device, 3, 2, Sk=12), in_dims, strict=True)
    ]

    def one(i: int, leaves: list[Tensor]) -> list[Tensor]:
        return [t if dim is None else t.select(dim, i) for t, dim in zip(leaves, in_dims, strict=True)]

    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.stack([flashattn_ext.forward(*one(i, leaves), causal=True) for i in range(3)])
    mapped = [t.clone().requires_grad_() for t in tensors]
    got = torch.vmap(lambda q, k, v: flashattn_ext.forward(q, k, v, causal=True), in_dims)(*mapped)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for name, a, b in zip(
        "qkv",
        torch.autograd.grad(got.square().sum(), mapped),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"d{name}: {m}")


def test_gradients_of_every_sample(device: str) -> None:
    """vmap of grad, with a sink that all samples share: each sample has its own gradient."""
    tensors, sink = _qkv(device, 3, 2, Sk=12), torch.randn(4, device=device)
    function = torch.func.grad(lambda q, k, v, s: _loss(q, k, v, sink=s), argnums=(0, 3))
    dq, dsink = torch.vmap(function, (0, 0, 0, None))(*tensors, sink)
    for i in range(3):
        expected_dq, expected_dsink = function(*(t[i] for t in tensors), sink)
        torch.testing.assert_close(dq[i], expected_dq, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dsink[i], expected_dsink, rtol=1e-5, atol=1e-6)


def test_vmap_with_masks_and_biases(device: str) -> None:
    tensors = _qkv(device, 3, 2, Sk=12)
    bias = torch.randn(3, 1, 4, 12, 12, device=device)
    mask = Mask.documents(torch.arange(12, device=device)[None] // 5)
    got = torch.vmap(lambda q, k, v, b: flashattn_ext.forward(q, k, v, bias=b, mask=mask))(*tensors, bias)
    for i in range(3):
        expected = flashattn_ext.forward(*(t[i] for t in tensors), bias=bias[i], mask=mask)
        torch.testing.assert_close(got[i], expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_dim", [0, 1])
def test_vmap_over_masks(device: str, in_dim: int) -> None:
    """torch's own fallback warns of an unimplemented rule."""
    of_each = [Mask.chunked(n, 33, 33, device=device).intervals for n in (5, 9, 20)]
    intervals = torch.stack(of_each, in_dim)
    extremes = torch.vmap(flashattn_ext.ops.mask_extremes, in_dim)(intervals)
    assert torch.equal(extremes, torch.stack([flashattn_ext.ops.mask_extremes(each) for each in of_each]))
    packed = torch.vmap(flashattn_ext.ops.mask_extremes)(intervals.movedim(in_dim, 0)[:, 0])
    assert torch.equal(packed, extremes[:, 0])
    q = torch.randn(1, 33, 2, 16, device=device)
    out = torch.vmap(lambda i: flashattn_ext.forward(q, q, q, mask=Mask(i)), in_dim)(intervals)
    expected = torch.stack([flashattn_ext.forward(q, q, q, mask=Mask(each)) for each in of_each])
    torch.testing.assert_close(out, expected)


def test_vmap_says_how_dropout_is_random(device: str) -> None:
    tensors = _qkv(device, 2, 1, Sk=12)
    same = [t[:1].expand_as(t) for t in tensors]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashattn_ext.forward(q, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(attend)(*same)
    for randomness in ("same", "different"):
        first, second = torch.vmap(attend, randomness=randomness)(*same)
        assert torch.equal(first, second) == (randomness == "same")
    one, mapped = [t[0] for t in same], torch.zeros(2, device=device)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda _: attend(*one))(mapped)
    for randomness in ("same", "different"):  # no argument is mapped over
        first, second = torch.vmap(lambda _: attend(*one), randomness=randomness)(mapped)
        assert torch.equal(first, second) == (randomness == "same")
    seeded = torch.vmap(lambda q, k, v: flashattn_ext.forward(q, k, v, dropout_p=0.5, rng_seed=3))(*same)
    expected = flashattn_ext.forward(*(t[0] for t in same), dropout_p=0.5, rng_seed=3)
    assert torch.equal(seeded[0], expected) and torch.equal(seeded[1], expected)


# --- export, profiles -------------------------------------------------------------------------------------------------


class _Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashattn_ext.forward(q, k, v, causal=True, window_size=(4, -1))


def _exported() -> torch.export.ExportedProgram:
    length = torch.export.Dim("length", min=2, max=256)
    return torch.export.export(_Module(), tuple(_qkv("cpu", 2, Sk=12)), dynamic_shapes=({1: length},) * 3)


def test_export_with_dynamic_lengths(tmp_path: Path) -> None:
    program = _exported()
    torch.export.save(program, tmp_path / "attention.pt2")
    other = _qkv("cpu", 2, Sq=31, Sk=31)
    expected = _Module()(*other)
    for kept in (program, program.run_decompositions(), torch.export.load(tmp_path / "attention.pt2")):
        assert any("flashattn_ext.forward" in str(node.target) for node in kept.graph.nodes)
        assert torch.equal(kept.module()(*other), expected)


def test_aot_inductor(tmp_path: Path) -> None:
    quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    package = torch._inductor.aoti_compile_and_package(
        _exported(), package_path=str(tmp_path / "attention.pt2"), inductor_configs=quickly
    )
    other = _qkv("cpu", 2, Sq=31, Sk=31)
    assert torch.equal(torch._inductor.aoti_load_package(package)(*other), _Module()(*other))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_a_profile_shows_one_range_for_each_call(dropout_p: float) -> None:
    q, k, v = (t.requires_grad_() for t in _qkv("cpu", 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            flashattn_ext.forward(q, k, v, dropout_p=dropout_p).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("flashattn_ext::")}
    assert counts.pop("flashattn_ext::forward") == 3
    assert counts.pop("flashattn_ext::backward") == 3
    assert not counts


# --- nested tensors ---------------------------------------------------------------------------------------------------

LENGTHS = (7, 0, 12, 3)


def _nested(device: str, heads: int, width: int) -> list[Tensor]:
    return [torch.randn(length, heads, width, device=device) for length in LENGTHS]


def _as_nested(parts: list[Tensor], like: Tensor | None = None) -> Tensor:
    if like is not None:
        return torch.nested.nested_tensor_from_jagged(torch.cat(parts), like.offsets())
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_jagged_tensors_are_packed_sequences(device: str, layout: str) -> None:
    parts = [_nested(device, heads, width) for heads, width in ((4, 8), (2, 8), (2, 16))]
    q = _as_nested(parts[0])
    nested = [q, *(_as_nested(part, q) for part in parts[1:])]
    leaves = [t.detach().requires_grad_() for t in nested]
    given = leaves if layout == "bshd" else [t.transpose(1, 2) for t in leaves]
    options = {"causal": True, "dropout_p": 0.2, "rng_seed": 3}
    out, lse = flashattn_ext.forward(*given, layout=layout, return_lse=True, **options)
    assert out.is_nested and out.layout == torch.jagged
    out = out if layout == "bshd" else out.transpose(1, 2)
    assert out.shape == (4, q.shape[1], 4, 16)  # out has the ragged length of q, so that the two can be combined
    cu_seqlens = torch.tensor([0, 7, 7, 19, 22], dtype=torch.int32, device=device)
    packed = [torch.cat(part).requires_grad_() for part in parts]
    expected, expected_lse = flashattn_ext.varlen_forward(
        *packed, cu_seqlens, cu_seqlens, 12, 12, return_lse=True, **options
    )
    torch.testing.assert_close(out.values(), expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    out.values().square().sum().backward()
    expected.square().sum().backward()
    for leaf, t in zip(leaves, packed, strict=True):
        torch.testing.assert_close(leaf.grad.values(), t.grad, rtol=0, atol=0)


def test_jagged_tensors_that_cannot_be_packed() -> None:
    q = _as_nested(_nested("cpu", 2, 8))
    bad: list[tuple[type[Exception], str, tuple[Tensor, ...], dict[str, Any]]] = [
        (
            TypeError,
            "k: expected a nested tensor of layout torch.jagged, like the others",
            (q, q.values()[None], q),
            {},
        ),
        (
            TypeError,
            "q: expected a nested tensor of layout torch.jagged",
            (torch.nested.nested_tensor(_nested("cpu", 2, 8)),) * 3,
            {},
        ),
        (ValueError, "q: expected 4 dimensions with the sequence, dimension 2, ragged", (q, q, q), {"layout": "bhsd"}),
        (ValueError, "v: expected a nested tensor with the offsets of k", (q, q, _as_nested(_nested("cpu", 2, 8))), {}),
        (ValueError, "bias: expected None", (q, q, q), {"bias": torch.zeros(1, 1, 1, 22)}),
    ]
    for kind, message, tensors, options in bad:
        with pytest.raises(kind, match=re.escape(message)):
            flashattn_ext.forward(*tensors, **options)
